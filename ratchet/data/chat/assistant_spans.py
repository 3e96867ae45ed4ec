"""Find the assistant's turns in a conversation that a chat template has rendered.

A turn's span is found by rendering the conversation without and with it. Searching for the
message's text would fail where the template changes it, or where the text occurs twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ratchet.data.chat.chat_templates import SENTINEL, ChatTemplate
from ratchet.data.chat.inline_text import Segment, merge_inline, split_segments
from ratchet.data.chat.tokenizer import After, Tokenizer
from ratchet.errors import DataError
from ratchet.types import Message, Part

# Code points that replace special tokens in messages while the template renders them.
PRIVATE_CODE_POINTS = range(0xF0000, 0xFFFFE)


class Piece(NamedTuple):
    """A piece of text that is tokenized by itself."""

    text: str
    turn: int | None = None
    """The index of the assistant message that the text belongs to; None for the template's text."""


@dataclass(frozen=True, slots=True)
class TurnShape:
    """The text that a template puts around the assistant's text.

    A rendered turn is: prompt, generated lead, text, end, rest.
    """

    generated_lead: str
    """Text after the prompt that the model has to write (Mistral's space, Qwen3's empty
    reasoning)."""
    prefill: str
    """The beginning of the answer that the prompt already contains (DeepSeek-R1's <think>). Either
    `generated_lead` or `prefill` is empty."""
    end: str
    """Text up to and including the token `end_id`."""
    rest: str
    """Text that the template adds after the turn."""
    end_id: int | None
    """Id of the token that ends the turn; None if the template has no such token."""


def find_turn_shape(template: ChatTemplate, tokenizer: Tokenizer) -> TurnShape:
    """Return the shape of a turn, found by rendering a probe.

    Raise DataError if the template omits the assistant's text, or if the header of its prompt
    differs from the header of its turns.
    """
    user = Message("user", "u")
    prompt = template.render([user], None, prompt=True)
    header, separator, trailer = template.render(
        [user, Message("assistant", SENTINEL)], None, prompt=False
    ).partition(SENTINEL)
    if not separator:
        raise DataError(
            "the chat template leaves out what the assistant says, so it can't be used: choose "
            "another `tokenizer.template`"
        )
    if not (header.startswith(prompt) or prompt.startswith(header)):
        raise DataError(
            "the chat template writes another header for the assistant's turn than for its prompt, "
            "so they can't be aligned: choose another `tokenizer.template`"
        )
    specials = tokenizer.find_special_tokens(trailer)
    split, end_id = (specials[0].end, specials[0].id) if specials else (0, None)
    return TurnShape(
        header[len(prompt) :], prompt[len(header) :], trailer[:split], trailer[split:], end_id
    )


class RenderedConversation:
    """A conversation that one template renders, with the spans of its assistant turns."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        shape: TurnShape,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._shape = shape
        self._tools = tools
        hidden, self._token_by_code_point = _hide_special_tokens(messages, tokenizer.special_ids)
        self._messages, self._segments = merge_inline(hidden)

    def __len__(self) -> int:
        """Return the number of messages after inline text has been merged into its turns."""
        return len(self._messages)

    def render_text(self, n: int, *, prompt: bool) -> str:
        """Return the first n messages as text. `prompt` adds the header of the assistant's turn."""
        return self._template.render(self._messages[:n], self._tools, prompt=prompt)

    def split_turn(self, i: int, prompt: str | None = None) -> tuple[str, str]:
        """Return the prompt for message i, and the assistant's text with the end of its turn.

        Both are rendered without the later messages, as when message i was written. Raise DataError
        if the turn does not continue the prompt.

        Args:
            i: The index of an assistant message.
            prompt: The rendered prompt for message i, if the caller has it.
        """
        if prompt is None:
            prompt = self.render_text(i, prompt=True)
        whole = self.render_text(i + 1, prompt=False)
        shape = self._shape
        if whole.startswith(prompt):
            return prompt, whole[len(prompt) : self._find_turn_end(whole, len(prompt))]
        if shape.prefill and whole.startswith(prompt.removesuffix(shape.prefill)):
            return prompt, self._remove_prefill(i) + shape.end
        # The template changes earlier text once the answer is there (Mistral drops the system
        # message). The model reads the prompt as it is, so only the answer is taken from `whole`.
        probe = [*self._messages[:i], Message("assistant", SENTINEL)]
        header, separator, _ = self._template.render(probe, self._tools, prompt=False).partition(
            SENTINEL
        )
        header = header.removesuffix(shape.generated_lead)
        if not separator or shape.prefill or not whole.startswith(header):
            raise DataError(
                f"message {i}: the chat template writes another header for this turn than for its "
                "prompt"
            )
        return prompt, whole[len(header) : self._find_turn_end(whole, len(header))]

    def _find_turn_end(self, whole: str, start: int) -> int:
        """Return the end of the last turn in the rendered conversation `whole`.

        It is the start of the template's `rest`, or else the end of the last special token.
        """
        if whole.endswith(self._shape.rest):
            return len(whole) - len(self._shape.rest)
        ends = [
            special.end
            for special in self._tokenizer.find_special_tokens(whole)
            if special.end > start
        ]
        return ends[-1] if ends else len(whole)

    def _remove_prefill(self, i: int) -> str:
        answer, prefill = self._messages[i].text, self._shape.prefill
        if not answer.startswith(prefill) or self._messages[i].tool_calls:
            raise DataError(
                f"message {i}: the chat template's prompt ends with {prefill!r}, so the "
                "assistant's text must begin with it: put it before the text, or choose another "
                "`tokenizer.template`"
            )
        return answer[len(prefill) :]

    def split_prompt(self, n: int) -> tuple[list[Piece], list[int]]:
        """Return the pieces of the prompt for message n, and the rewritten assistant messages.

        The second list holds the indices of messages that the prompt shows in a changed form, for
        example without their reasoning.
        """
        text = self.render_text(n, prompt=True)
        pieces: list[Piece] = []
        rewritten: list[int] = []
        position = 0
        for i in (i for i, message in enumerate(self._messages[:n]) if message.role == "assistant"):
            try:
                prompt, answer = self.split_turn(i)
            except DataError:
                rewritten.append(i)
                continue
            if text.startswith(prompt + answer):
                pieces += [Piece(text[position : len(prompt)]), Piece(answer, i)]
                position = len(prompt) + len(answer)
            else:
                rewritten.append(i)
        return [*pieces, Piece(text[position:])], rewritten

    def _split_inline(self, piece: Piece) -> list[Piece]:
        """Return the piece, cut where inline text begins or ends. Inline text belongs to no turn.

        Raise DataError if the template changes a turn with inline text.
        """
        segments: Sequence[Segment] = self._segments.get(piece.turn, ())
        if not segments:
            return [piece]
        texts = split_segments(piece.text, segments, self._shape.prefill)
        return [
            Piece(text, None if segment.is_inline else piece.turn)
            for text, segment in zip(texts, segments, strict=True)
        ]

    def tokenize(
        self, pieces: Sequence[Piece], after: After = "start"
    ) -> list[tuple[int, int | None]]:
        """Return (id, turn) of every token.

        Only the template's text can contain special tokens. In a message, the text of a special
        token stays plain text.
        Inline text is tokenized by itself, as it is in sampling.

        Args:
            after: What precedes the pieces, see `Tokenizer.encode`.
        """
        tokens: list[tuple[int, int | None]] = []
        cut_pieces = [part for piece in pieces for part in self._split_inline(piece)]
        for piece in cut_pieces:
            for part in self._tokenizer.split_special(piece.text):
                if isinstance(part, int):
                    tokens.append((part, piece.turn))
                    after = "special"
                else:
                    ids = self._tokenizer.encode(
                        part.translate(self._token_by_code_point), after=after
                    )
                    tokens += [(token, piece.turn) for token in ids]
                    after = "text"
        return tokens


def _hide_special_tokens(
    messages: Sequence[Message], specials: Mapping[str, int]
) -> tuple[list[Message], dict[int, str]]:
    """Return the messages with private code points in place of special tokens in their text.

    Also return the special token of each code point. The template's own special tokens can then be
    told from those that a user typed.
    """
    joined = "\n".join(text for message in messages for text in _list_texts(message))
    typed_tokens = sorted(
        [special for special in specials if special in joined], key=len, reverse=True
    )
    if not typed_tokens:
        return list(messages), {}
    unused_points = (point for point in PRIVATE_CODE_POINTS if chr(point) not in joined)
    token_by_code_point = dict(zip(unused_points, typed_tokens, strict=False))

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            for point, special in token_by_code_point.items():
                value = value.replace(special, chr(point))
            return value
        if isinstance(value, Part):
            return replace(value, value=hide(value.value)) if value.type == "text" else value
        if isinstance(value, Mapping):
            return {hide(key): hide(item) for key, item in value.items()}
        return type(value)(map(hide, value)) if isinstance(value, list | tuple) else value

    converted = [
        replace(
            message,
            content=hide(message.content),
            tool_calls=tuple(
                replace(call, arguments=hide(call.arguments)) for call in message.tool_calls
            ),
        )
        for message in messages
    ]
    return converted, token_by_code_point


def _list_texts(message: Message) -> list[str]:
    calls = (
        json.dumps(dict(call.arguments), ensure_ascii=False, default=str)
        for call in message.tool_calls
    )
    return [message.text, *calls]
