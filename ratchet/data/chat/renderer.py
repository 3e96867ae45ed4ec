"""Render messages as tokens, and parse completions as messages.

This covers prompts, supervised rows with exact trainable spans, and the tokens between a sampled
completion and the next one.

One rule makes training and sampling agree: wherever the assistant starts or stops writing, the text
is cut before it is tokenized. So the tokens of a supervised row are those of the prompt, then those
of the answer alone, then the end of turn, exactly as in sampling; no BPE merge crosses a cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ratchet.data.chat.assistant_spans import Conversation, Piece, TurnShape, turn_shape
from ratchet.data.chat.chat_templates import SENTINEL, ChatTemplate, printed_time, template_source
from ratchet.data.chat.tokenizer import After, Tokenizer
from ratchet.data.chat.tool_calls import ToolFormat, tool_format
from ratchet.data.processor import Expanded, Processor
from ratchet.errors import DataError
from ratchet.types import Message, Placed, StopReason

Tools = Sequence[Mapping[str, Any]]

USER = Message("user", "u")
# A turn with reasoning and one without: a template that rewrites history changes one of them.
PROBES = (Message("assistant", "<think>\nr\n</think>\n\na"), Message("assistant", "a"))


class Renderer:
    """A renderer of conversations by one chat template.

    Token arguments and results hold all tokens of a medium, not its placeholder.

    Args:
        template: a built-in name ("plain", "turns", "chatml"), a .jinja file, Jinja text, or None
            for the tokenizer's own.
        processor: the model's, for messages with images, audio and videos; None: the model reads
            text alone.
        variables: passed to the template (such as `enable_thinking=False`).
        now: the time that the template may print (default: see `print_date`).
        tool_format: one of `ratchet.data.chat.tool_calls.FORMATS`, or "auto": inferred from the
            template.

    Raise DataError if there is no template, or if it has a syntax error.
    """

    processor: Processor | None = None  # the default of subclasses with an __init__ of their own

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        processor: Processor | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        tool_format: str = "auto",
    ) -> None:
        self.tokenizer, self.processor, self._tool_format = tokenizer, processor, tool_format
        names = {**tokenizer.special_tokens, **(variables or {})}
        self.template = ChatTemplate(
            template_source(template, tokenizer), names, now or printed_time()
        )

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the conversation's tokens, up to where the assistant's next turn begins."""
        conversation = self._conversation(messages, tools)
        pieces, _ = conversation.before(len(messages))
        return [token for token, _ in self._with_media(conversation.tokens(pieces), messages)]

    def supervised(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        train: Literal["all", "last"],
    ) -> tuple[list[int], list[bool]]:
        """Return (tokens, trainable) of a row that ends with the assistant's last turn.

        Trainable are the tokens that the assistant wrote, including the one that ends its turn, in
        every turn or in the last.

        Raise DataError if the last message is not the assistant's, or if the template rewrites an
        earlier turn that should train.
        """
        last = len(messages) - 1
        if last < 0 or messages[last].role != "assistant":
            raise DataError(
                "a supervised conversation ends with a message of the assistant: drop what follows "
                "its last answer"
            )
        conversation = self._conversation(messages, tools)
        pieces, rewritten = conversation.before(last)
        if train == "all" and rewritten:
            # If the turn itself is at fault, this raises an error that says why.
            conversation.turn(rewritten[0])
            raise DataError(
                f"message {rewritten[0]}: the chat template rewrites this turn once others follow "
                "(as when it drops earlier "
                'reasoning), so it can\'t train as it was written: use train="last", with one row '
                "a turn"
            )
        _, answer = conversation.turn(last)
        marked = self._with_media(conversation.tokens([*pieces, Piece(answer, last)]), messages)
        tokens = [token for token, _ in marked]
        trainable = [turn is not None and (train == "all" or turn == last) for _, turn in marked]
        # If the template does not end the turn, the model still must.
        if marked[-1][1] != last or tokens[-1] not in self._controls:
            tokens.append(self._eos())
            trainable.append(True)
        return tokens, trainable

    def extend(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        *,
        history: Sequence[Message] = (),
        tools: Tools | None = None,
    ) -> list[int]:
        """Return the tokens to append to a sampled completion so that the model can answer
        `messages`.

        They are the end of its turn if `sampled` lacks it (sampling stopped at a string, or was
        cut off), the messages, and the header of the next turn. history: the messages before the
        completion, for templates whose headers depend on them.
        """
        before = [*(history or (USER,)), Message("assistant", SENTINEL)]
        conversation = self._conversation([*before, *messages], tools)
        _, separator, follows = conversation.text(
            len(before) + len(messages), prompt=True
        ).partition(SENTINEL)
        if not separator:
            raise DataError(
                "the chat template leaves out what the assistant said once others answer: it can't "
                "hold a dialogue"
            )
        shape, last = self._shape, sampled[-1] if sampled else None
        ended = last in self.stop_ids
        if ended:
            follows = follows.removeprefix(shape.end)
        after: After = "special" if last in self._controls else "text"
        added = [
            token
            for token, _ in self._with_media(conversation.tokens([Piece(follows)], after), messages)
        ]
        # If the template has no end of turn, the first token of the next header ends the turn; the
        # model may have sampled it already.
        return added[1:] if ended and not shape.end and added[:1] == [last] else added

    def keeps(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        *,
        history: Sequence[Message],
        said: Message,
        tools: Tools | None = None,
    ) -> bool:
        """Return True if the template keeps `said` and its prompt unchanged once `messages` follow.

        Then `extend` gives what the template would. `sampled` is the completion that `said` was
        parsed from, `history` the messages before it. The spacing of a call's JSON does not count:
        the tokens stay as they were sampled.
        """
        conversation, n = self._conversation([*history, said, *messages], tools), len(history)
        shown, prompt = (
            conversation.text(n + 1 + len(messages), prompt=True),
            conversation.text(n, prompt=True),
        )
        if shown.startswith(
            prompt + self._text(sampled, None, skip_special=False) + self._shape.end
        ):
            return True
        try:
            prompt, answer = conversation.turn(n)
        except DataError:
            return False
        return shown.startswith(prompt + answer)

    def media(
        self, tokens: Sequence[int] | NDArray[np.int64], messages: Sequence[Message]
    ) -> tuple[Placed, ...]:
        """Return the media of `messages` with their places in `tokens`.

        `tokens` hold these messages and no others with media. Raise DataError if a medium is not
        found in them.
        """
        media = self._media(messages)
        if not media:
            return ()
        assert self.processor is not None, "a model that reads media has one"
        reserved, row, placed, end = (
            self.processor.reserved,
            np.asarray(tokens, dtype=np.int64),
            list[Placed](),
            0,
        )
        marks = np.isin(row, list(reserved)).nonzero()[0]
        for one in media:
            before = next(i for i, token in enumerate(one.tokens) if token in reserved)
            later_marks = marks[marks >= end]
            start = int(later_marks[0]) - before if len(later_marks) else len(row)
            end = start + one.medium.span
            if start < 0 or tuple(row[start:end].tolist()) != one.tokens:
                raise DataError(
                    f"{len(media)} media in the messages, and not all of them in the tokens: "
                    "render them together"
                )
            placed.append(Placed(start, one.medium))
        return tuple(placed)

    def stray(self, sampled: Sequence[int] | NDArray[np.int64]) -> str | None:
        """Return the first sampled token that stands for a medium, as text; None: there is none.

        Such a token is invalid: a policy can't write media.
        """
        if self.processor is None:
            return None
        reserved = next((int(token) for token in sampled if token in self.processor.reserved), None)
        return None if reserved is None else self.tokenizer.decode([reserved], skip_special=False)

    def parse(self, tokens: Sequence[int], stop: StopReason | None = None) -> Message:
        """Return the completion as the message that renders to it.

        The end of turn and other special tokens are left out, and so is a character that was cut in
        the middle. The beginning of the answer that the prompt already held is added.
        """
        text = self._text(tokens, stop, skip_special=True)
        return Message("assistant", self._shape.prefill + text.removeprefix(self._shape.lead))

    def parse_calls(
        self,
        tokens: Sequence[int],
        stop: StopReason | None = None,
        *,
        tools: Tools = (),
        first: int = 0,
    ) -> tuple[Message, int]:
        """Return the completion with its tool calls apart, and the number of malformed calls.

        If any call is malformed, the message is that of `parse`: it has no calls, and its text is
        the whole completion. Calls are numbered from `first` on.

        Raise ConfigError if the format of tool calls can't be inferred: set
        `tokenizer.tool_format`.
        """
        whole = self._text(tokens, stop, skip_special=False)
        parsed = self.tool_format.read(
            self._shape.prefill + whole.removeprefix(self._shape.lead), tools
        )
        if parsed.malformed or not parsed.calls:
            return self.parse(tokens, stop), parsed.malformed
        content = "".join(
            piece for piece in self.tokenizer.pieces(parsed.content) if isinstance(piece, str)
        )
        return Message("assistant", content, self.tool_format.numbered(parsed.calls, first)), 0

    @cached_property
    def tool_format(self) -> ToolFormat:
        """Return the model's format of tool calls. Raise ConfigError if it can't be inferred."""
        return tool_format(self._tool_format, self.template.source, self.tokenizer.special_ids)

    def _text(self, tokens: Sequence[int], stop: StopReason | None, *, skip_special: bool) -> str:
        kept = list(tokens)
        if kept and kept[-1] in self.stop_ids:
            kept.pop()
        text = self.tokenizer.decode(kept, skip_special=skip_special)
        return text.rstrip("\ufffd") if stop is not None and not stop.finished else text

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end the assistant's turn: EOS ids, and the template's end of turn."""
        turn_ends = () if self._shape.end_id is None else (self._shape.end_id,)
        return tuple(dict.fromkeys((*self.tokenizer.eos_ids, *turn_ends)))

    @cached_property
    def extends_history(self) -> bool:
        """Return True if a longer conversation keeps every earlier turn as it was written.

        Then one sequence of tokens can hold it. It is False if the template drops or changes turns
        once the user answers (earlier reasoning, say).
        """
        return not any(self.rewritten_turns([USER, said, USER]) for said in PROBES)

    def rewritten_turns(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the indices of assistant messages that the template does not show as written."""
        return self._conversation(messages, tools).before(len(messages))[1]

    @cached_property
    def _controls(self) -> frozenset[int]:
        return frozenset(self.tokenizer.special_ids.values())

    @cached_property
    def _shape(self) -> TurnShape:
        return turn_shape(self.template, self.tokenizer)

    def _conversation(self, messages: Sequence[Message], tools: Tools | None) -> Conversation:
        return Conversation(self.template, self.tokenizer, self._shape, messages, tools)

    def _media(self, messages: Sequence[Message]) -> list[Expanded]:
        """Return the media of all messages, in order."""
        expanded: list[Expanded] = []
        for index, message in enumerate(messages):
            parts = () if isinstance(message.content, str) else message.content
            for part in (part for part in parts if part.type != "text"):
                if self.processor is None:
                    raise DataError(
                        f"message {index} has a part of the type '{part.type}', and the model "
                        "reads text alone: choose a model "
                        "that reads it, or remove the part"
                    )
                expanded.append(self.processor.expanded(part, where=f"message {index}"))
        return expanded

    def _with_media(
        self, marked: list[tuple[int, int | None]], messages: Sequence[Message]
    ) -> list[tuple[int, int | None]]:
        """Return the tokens with each placeholder replaced by its medium's tokens, of turn None.

        Raise DataError if placeholders and media differ in number or kind.
        """
        media = self._media(messages)
        if self.processor is None:
            return marked
        whole, placeholders, used = list[tuple[int, int | None]](), self.processor.placeholders, 0
        for token, turn in marked:
            kind = placeholders.get(token)
            if kind is None:
                whole.append((token, turn))
                continue
            if used < len(media) and media[used].medium.kind == kind:
                whole += [(part, None) for part in media[used].tokens]
            used += 1
        wanted, found = (
            [one.medium.kind for one in media],
            [placeholders[t] for t, _ in marked if t in placeholders],
        )
        if wanted != found:
            raise DataError(
                f"the messages hold {_listed(wanted)}, and the chat template writes placeholders "
                f"for {_listed(found)}: use the "
                "model's own template, and no placeholders in it beside those of parts"
            )
        return whole

    def _eos(self) -> int:
        if not self.tokenizer.eos_ids:
            raise DataError(
                "neither the template nor the tokenizer ends the assistant's turn: set eos_token "
                "in its config"
            )
        return self.tokenizer.eos_ids[0]


def _listed(kinds: Sequence[str]) -> str:
    counts = {kind: kinds.count(kind) for kind in kinds}
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or "no media"
