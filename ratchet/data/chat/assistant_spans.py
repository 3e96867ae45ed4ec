"""One conversation rendered by one template: where each turn of the assistant lies in the text,
found by rendering the messages before it and the messages up to it, never by searching for what was
said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ratchet.data.chat.chat_templates import SENTINEL, ChatTemplate
from ratchet.data.chat.tokenizer import After, Tokenizer
from ratchet.errors import DataError
from ratchet.types import Message, Part

# One private code point stands for each control token in a message while the template works on it.
PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Piece(NamedTuple):
    """A stretch of text that is tokenized by itself; `turn` is the message that the assistant wrote
    it in."""

    text: str
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class TurnShape:
    """The text that a template puts around the assistant's text.

    prompt | lead | text | end, rest: a prompt stops before `lead`, which the model has to write
    (Mistral's space, Qwen3's empty reasoning); `end` runs to the token `end_id` that ends the turn
    (None: the template has none); `rest` is the template's again. `prefill` is the opposite of
    `lead`: a prompt that already begins the answer (DeepSeek-R1's <think>).
    """

    lead: str
    prefill: str
    end: str
    rest: str
    end_id: int | None


def turn_shape(template: ChatTemplate, tokenizer: Tokenizer) -> TurnShape:
    """Found by rendering one turn. Raises DataError for a template that does not write what the
    assistant says."""
    user = Message("user", "u")
    prompt = template.render([user], None, prompt=True)
    header, separator, trailer = template.render(
        [user, Message("assistant", SENTINEL)], None, prompt=False
    ).partition(SENTINEL)
    if not separator:
        raise DataError(
            "the chat template leaves out what the assistant says: it can't be trained or sampled "
            "with"
        )
    if not (header.startswith(prompt) or prompt.startswith(header)):
        raise DataError(
            "the chat template's prompt and its assistant's turn begin differently: they can't be "
            "aligned"
        )
    specials = tokenizer.specials(trailer)
    split, end_id = (specials[0].end, specials[0].id) if specials else (0, None)
    return TurnShape(
        header[len(prompt) :], prompt[len(header) :], trailer[:split], trailer[split:], end_id
    )


class Conversation:
    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        shape: TurnShape,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._template, self._tokenizer, self._shape, self._tools = (
            template,
            tokenizer,
            shape,
            tools,
        )
        self._messages, self._typed = _shield(messages, tokenizer.special_ids)

    def text(self, n: int, *, prompt: bool) -> str:
        """The first n messages, rendered; with the header of the assistant's next turn where
        `prompt`."""
        return self._template.render(self._messages[:n], self._tools, prompt=prompt)

    def turn(self, i: int) -> tuple[str, str]:
        """(the prompt before message i, what the assistant writes in it, the end of its turn
        included), as it was written: last in the conversation. Raises DataError when the second
        does not follow from the first."""
        prompt, whole, shape = (
            self.text(i, prompt=True),
            self.text(i + 1, prompt=False),
            self._shape,
        )
        if whole.startswith(prompt):
            return prompt, whole[len(prompt) : self._turn_end(whole, len(prompt))]
        if shape.prefill and whole.startswith(prompt.removesuffix(shape.prefill)):
            return prompt, self._after_prefill(i) + shape.end
        # The answer changes what stands before it (Mistral drops the system message): the prompt is
        # what the model reads.
        probe = [*self._messages[:i], Message("assistant", SENTINEL)]
        header, separator, _ = self._template.render(probe, self._tools, prompt=False).partition(
            SENTINEL
        )
        header = header.removesuffix(shape.lead)
        if not separator or shape.prefill or not whole.startswith(header):
            raise DataError(
                f"message {i}: the chat template begins this turn otherwise than its prompt does"
            )
        return prompt, whole[len(header) : self._turn_end(whole, len(header))]

    def _turn_end(self, whole: str, start: int) -> int:
        """Return where the last turn ends in the rendering of a conversation: before what the
        template adds, else with its last control token."""
        if whole.endswith(self._shape.rest):
            return len(whole) - len(self._shape.rest)
        ends = [special.end for special in self._tokenizer.specials(whole) if special.end > start]
        return ends[-1] if ends else len(whole)

    def _after_prefill(self, i: int) -> str:
        answer, prefill = self._messages[i].text, self._shape.prefill
        if not answer.startswith(prefill) or self._messages[i].tool_calls:
            raise DataError(
                f"message {i}: the chat template's prompt ends with {prefill!r}, so the "
                "assistant's text must begin with it: "
                "put it there, or choose another `tokenizer.template`"
            )
        return answer[len(prefill) :]

    def before(self, n: int) -> tuple[list[Piece], list[int]]:
        """(pieces of the prompt for message n, messages of the assistant that the template has
        rewritten by then)."""
        text = self.text(n, prompt=True)
        pieces: list[Piece] = []
        rewritten: list[int] = []
        position = 0
        for i in (i for i, message in enumerate(self._messages[:n]) if message.role == "assistant"):
            try:
                prompt, answer = self.turn(i)
            except DataError:
                rewritten.append(i)
                continue
            if text.startswith(prompt + answer):
                pieces += [Piece(text[position : len(prompt)]), Piece(answer, i)]
                position = len(prompt) + len(answer)
            else:
                rewritten.append(i)
        return [*pieces, Piece(text[position:])], rewritten

    def tokens(
        self, pieces: Sequence[Piece], after: After = "start"
    ) -> list[tuple[int, int | None]]:
        """(id, turn) of every token. What the template wrote may hold control tokens; what was said
        holds none."""
        marked: list[tuple[int, int | None]] = []
        for piece in pieces:
            for part in self._tokenizer.pieces(piece.text):
                if isinstance(part, int):
                    marked.append((part, piece.turn))
                    after = "special"
                else:
                    ids = self._tokenizer.encode(part.translate(self._typed), after=after)
                    marked += [(token, piece.turn) for token in ids]
                    after = "text"
        return marked


def _shield(
    messages: Sequence[Message], specials: Mapping[str, int]
) -> tuple[list[Message], dict[int, str]]:
    """Return the messages with every control token in their text as one private code point, and
    what each code point stands for."""
    joined = "\n".join(text for message in messages for text in _texts(message))
    typed = sorted([special for special in specials if special in joined], key=len, reverse=True)
    if not typed:
        return list(messages), {}
    free = (point for point in PRIVATE_USE if chr(point) not in joined)
    table = dict(zip(free, typed, strict=False))

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            for point, special in table.items():
                value = value.replace(special, chr(point))
            return value
        if isinstance(value, Part):
            return replace(value, value=hide(value.value)) if value.type == "text" else value
        if isinstance(value, Mapping):
            return {hide(key): hide(item) for key, item in value.items()}
        return type(value)(map(hide, value)) if isinstance(value, list | tuple) else value

    hidden = [
        replace(
            message,
            content=hide(message.content),
            tool_calls=tuple(
                replace(call, arguments=hide(call.arguments)) for call in message.tool_calls
            ),
        )
        for message in messages
    ]
    return hidden, table


def _texts(message: Message) -> list[str]:
    calls = (
        json.dumps(dict(call.arguments), ensure_ascii=False, default=str)
        for call in message.tool_calls
    )
    return [message.text, *calls]
