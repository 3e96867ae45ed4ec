"""Render messages as tokens, and parse completions as messages.

This covers prompts, supervised rows with exact trainable spans, and the tokens between a sampled
completion and the next one.

Training and sampling agree on tokens because of one rule: the text is cut wherever the assistant
starts or stops writing, and each piece is tokenized by itself. No BPE merge crosses a cut. So a
supervised row has the tokens of the prompt, of the answer and of the end of turn, as in sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from os.path import commonprefix
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.data.chat.assistant_spans import (
    Piece,
    RenderedConversation,
    TurnShape,
    find_turn_shape,
)
from ratchet.data.chat.chat_templates import (
    SENTINEL,
    ChatTemplate,
    get_printed_time,
    load_template_source,
)
from ratchet.data.chat.harmony import CALL, is_harmony, read_text
from ratchet.data.chat.tokenizer import After, Tokenizer
from ratchet.data.chat.tool_calls import FORMATS, ToolFormat, find_tool_format
from ratchet.data.processor import ExpandedMedium, Processor
from ratchet.errors import ConfigError, DataError
from ratchet.types import Message, PlacedMedium, StopReason, TrainedTokens

Tools = Sequence[Mapping[str, Any]]

USER = Message("user", "u")
# A turn with reasoning, and a turn without: a template that rewrites history changes one of them.
PROBES = (Message("assistant", "<think>\nr\n</think>\n\na"), Message("assistant", "a"))
PROBE_CALL = ("look_up", {"text": "a b", "count": 2})
PROBE_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks up a text.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "The text."},
                    "count": {"type": "integer", "description": "The number of results."},
                },
                "required": ["text", "count"],
            },
        },
    },
)


class Renderer:
    """A converter of messages to tokens and back, by one chat template.

    All token lists contain the expanded tokens of media, not placeholders.

    Args:
        template: A built-in name ("plain", "turns", "chatml"), a .jinja file, Jinja text, or None
            for the tokenizer's own template.
        processor: The model's processor of images, audio and videos; None for a model that reads
            only text.
        variables: Variables for the template, such as `enable_thinking=False`.
        now: The time that the template may print (default: see `set_printed_date`).
        tool_format: One of `ratchet.data.chat.tool_calls.FORMATS`, or "auto" to infer it from the
            template.

    Raise DataError if there is no template, or if it has a syntax error.
    """

    processor: Processor | None = None  # default for subclasses with their own __init__

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
        self.tokenizer = tokenizer
        self.processor = processor
        self._tool_format = tool_format
        template_variables = {**tokenizer.special_tokens, **(variables or {})}
        self.template = ChatTemplate(
            load_template_source(template, tokenizer), template_variables, now or get_printed_time()
        )

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the tokens of a conversation and of the header of the assistant's next turn."""
        if messages and messages[-1].role == "inline":
            raise DataError(
                "the conversation ends with inline text, within the assistant's turn: a prompt "
                "can't begin another turn there"
            )
        conversation = self._make_conversation(messages, tools)
        pieces, _ = conversation.split_prompt(len(conversation))
        return [
            token for token, _ in self._expand_placeholders(conversation.tokenize(pieces), messages)
        ]

    def supervised(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        train: TrainedTokens,
    ) -> tuple[list[int], list[bool]]:
        """Return (tokens, trainable) of a row that ends with the assistant's last turn.

        The trainable tokens are those that the assistant wrote in all turns or in the last turn
        (`train`), including the end of the turn. With train="text" they are all tokens but the
        first and those of media.

        Raise DataError if the last message is not the assistant's, or if the template rewrites an
        earlier turn that should train.
        """
        if not messages or messages[-1].role != "assistant":
            raise DataError(
                "a supervised conversation ends with a message of the assistant: drop what follows "
                "the assistant's last answer"
            )
        conversation = self._make_conversation(messages, tools)
        last_index = len(conversation) - 1
        pieces, rewritten = conversation.split_prompt(last_index)
        if train == "all" and rewritten:
            # Raises an error with the reason if the turn itself can't be rendered.
            conversation.split_turn(rewritten[0])
            raise DataError(
                f"message {rewritten[0]}: the chat template rewrites this turn once others follow "
                "(it may drop earlier reasoning), so the turn can't train as it was written: use "
                'train="last", with one row per turn'
            )
        _, answer = conversation.split_turn(last_index, "".join(piece.text for piece in pieces))
        tokens_and_turns = self._expand_placeholders(
            conversation.tokenize([*pieces, Piece(answer, last_index)]), messages
        )
        tokens = [token for token, _ in tokens_and_turns]
        if train == "text":
            media_ids = frozenset() if self.processor is None else self.processor.media_token_ids
            trainable = [i > 0 and token not in media_ids for i, token in enumerate(tokens)]
        else:
            trainable = [
                turn is not None and (train == "all" or turn == last_index)
                for _, turn in tokens_and_turns
            ]
        # If the template does not end the turn, the model must still learn to end it.
        if tokens_and_turns[-1][1] != last_index or tokens[-1] not in self._special_ids:
            if not self.tokenizer.eos_ids:
                raise DataError(
                    "neither the chat template nor the tokenizer has an end of turn: set eos_token "
                    "in tokenizer_config.json"
                )
            tokens.append(self.tokenizer.eos_ids[0])
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
        """Return the tokens between a sampled completion and the model's answer to `messages`.

        These are the end of turn if `sampled` lacks it (sampling stopped at a string, or was cut
        off), the messages, and the header of the next turn.

        Args:
            sampled: The tokens of the completion.
            messages: The messages that follow the completion.
            history: The messages before the completion, for templates whose headers depend on them.
            tools: Descriptions of the tools that the conversation offers.
        """
        earlier = [*(history or (USER,)), Message("assistant", SENTINEL)]
        conversation = self._make_conversation([*earlier, *messages], tools)
        _, separator, continuation = conversation.render_text(
            len(conversation), prompt=True
        ).partition(SENTINEL)
        if not separator:
            raise DataError(
                "the chat template leaves out the assistant's earlier turns, so it can't be used "
                "for several turns: choose another `tokenizer.template`"
            )
        shape, last = self._shape, sampled[-1] if sampled else None
        has_ended = last in self.stop_ids
        if has_ended:
            continuation = continuation.removeprefix(shape.end)
        preceded_by: After = "special" if last in self._special_ids else "text"
        new_tokens = [
            token
            for token, _ in self._expand_placeholders(
                conversation.tokenize([Piece(continuation)], preceded_by), messages
            )
        ]
        # If the template has no end of turn, the first token of the next header ends the turn. The
        # model may have sampled that token already.
        is_sampled = has_ended and not shape.end and new_tokens[:1] == [last]
        return new_tokens[1:] if is_sampled else new_tokens

    def encode_raw(
        self, sampled: Sequence[int], messages: Sequence[Message], *, allow_special: bool = False
    ) -> list[int]:
        """Return the tokens of messages that follow the tokens `sampled` without the chat template.

        The text is tokenized by itself. What looks like a special token in it is plain text, unless
        `allow_special` is True.
        """
        after: After = "special" if sampled and sampled[-1] in self._special_ids else "text"
        text = "".join(message.text for message in messages)
        return self.tokenizer.encode(text, allow_special=allow_special, after=after)

    def parse_continued(
        self, earlier: Sequence[int], tokens: Sequence[int], stop: StopReason | None = None
    ) -> Message:
        """Return a completion that continues a turn as a message, without the turn's beginning.

        Args:
            earlier: The tokens of the turn before the completion, with those of inline text.
        """
        before = self._decode_text(earlier, None, skip_special=True)
        whole = self._decode_text([*earlier, *tokens], stop, skip_special=True)
        # A tokenizer may decode a beginning differently from the same tokens in a longer text.
        alone = self._decode_text(tokens, stop, skip_special=True)
        return Message("assistant", whole[len(before) :] if whole.startswith(before) else alone)

    def keeps_turn(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        *,
        history: Sequence[Message],
        reply: Message,
        tools: Tools | None = None,
    ) -> bool:
        """True if the template keeps a turn and its prompt unchanged once `messages` follow.

        Then `sampled` plus the tokens of `extend` spell the text that the template renders after
        the prompt. Differences in the spacing of a tool call's JSON are ignored, because the
        sampled tokens stay as they are.

        Args:
            sampled: The tokens of the turn.
            messages: The messages after the turn.
            history: The messages before the turn.
            reply: The message that was parsed from `sampled`.
        """
        if self._is_harmony:  # its template puts the parts of a call's header in another order
            return False
        conversation = self._make_conversation([*history, reply, *messages], tools)
        n = len(conversation) - len(messages) - 1
        rendered = conversation.render_text(len(conversation), prompt=True)
        prompt = conversation.render_text(n, prompt=True)
        if rendered.startswith(
            prompt + self._decode_text(sampled, None, skip_special=False) + self._shape.end
        ):
            return True
        try:
            prompt, answer = conversation.split_turn(n)
        except DataError:
            return False
        return rendered.startswith(prompt + answer)

    def media(
        self, tokens: Sequence[int] | NDArray[np.int64], messages: Sequence[Message]
    ) -> tuple[PlacedMedium, ...]:
        """Return the media of `messages` with their places in `tokens`.

        `tokens` must contain the media of these messages and no others. Raise DataError if a medium
        is not found.
        """
        media = self._list_media(messages)
        if not media:
            return ()
        assert self.processor is not None, "a model that reads media has a processor"
        media_token_ids = self.processor.media_token_ids
        row = np.asarray(tokens, dtype=np.int64)
        placed: list[PlacedMedium] = []
        end = 0
        media_positions = np.isin(row, list(media_token_ids)).nonzero()[0]
        for expanded in media:
            # The medium's tokens may begin with ordinary ones, before the first reserved token.
            n_ordinary = next(
                i for i, token in enumerate(expanded.tokens) if token in media_token_ids
            )
            later_positions = media_positions[media_positions >= end]
            start = int(later_positions[0]) - n_ordinary if len(later_positions) else len(row)
            end = start + expanded.medium.span
            if start < 0 or tuple(row[start:end].tolist()) != expanded.tokens:
                raise DataError(
                    f"the messages have {len(media)} media, and not all of them are in the tokens: "
                    "render messages and tokens together"
                )
            placed.append(PlacedMedium(start, expanded.medium))
        return tuple(placed)

    def find_media_token(self, sampled: Sequence[int] | NDArray[np.int64]) -> str | None:
        """Return the text of the first sampled token that stands for a medium, or None.

        Such a token is invalid, because a policy can't write media.
        """
        if self.processor is None:
            return None
        media_token_id = next(
            (int(token) for token in sampled if token in self.processor.media_token_ids), None
        )
        return (
            None
            if media_token_id is None
            else self.tokenizer.decode([media_token_id], skip_special=False)
        )

    def parse(self, tokens: Sequence[int], stop: StopReason | None = None) -> Message:
        """Return the completion as the message that renders to it.

        The end of turn, other special tokens and an incomplete last character are left out. The
        generated lead is removed, and the prefill is added (see `TurnShape`).
        """
        text = self._decode_text(tokens, stop, skip_special=True)
        return Message(
            "assistant", self._shape.prefill + text.removeprefix(self._shape.generated_lead)
        )

    def parse_calls(
        self,
        tokens: Sequence[int],
        stop: StopReason | None = None,
        *,
        tools: Tools = (),
        first: int = 0,
    ) -> tuple[Message, int]:
        """Return the completion as a message with tool calls, and the number of malformed calls.

        If a call is malformed, the message has no calls and its text is the whole completion, as
        with `parse`. The ids of calls are numbered from `first` on.

        Raise ConfigError if the format of tool calls can't be inferred. Setting
        `tokenizer.tool_format` avoids this.
        """
        whole = self._decode_text(tokens, stop, skip_special=False)
        parsed = self.tool_format.parse(
            self._shape.prefill + whole.removeprefix(self._shape.generated_lead), tools
        )
        if parsed.malformed or not parsed.calls:
            return self.parse(tokens, stop), parsed.malformed
        content = "".join(
            piece
            for piece in self.tokenizer.split_special(parsed.content)
            if isinstance(piece, str)
        )
        return Message("assistant", content, self.tool_format.number_calls(parsed.calls, first)), 0

    @cached_property
    def tool_format(self) -> ToolFormat:
        """Return the model's format of tool calls. Raise ConfigError if it can't be inferred."""
        return find_tool_format(self._tool_format, self.template.source, self.tokenizer.special_ids)

    def check_tool_calls(self) -> None:
        """Check that a tool call which the chat template writes is read back as the same call.

        Raise ConfigError if the format of tool calls can't be inferred, or if the template leaves
        calls out or writes them in another format.
        """
        (call,) = self.tool_format.number_calls([PROBE_CALL], 0)
        texts: list[str] = []
        for answer in (Message("assistant", SENTINEL), Message("assistant", "", (call,))):
            try:
                conversation = self._make_conversation([USER, answer], PROBE_TOOLS)
                texts.append(conversation.render_text(2, prompt=False))
            except DataError as error:
                raise ConfigError(f"the chat template can't write a tool call: {error}") from error
        header, _, end_of_turn = texts[0].partition(SENTINEL)
        # Here commonprefix compares characters, not path components, which the lint rule suspects.
        shared = commonprefix([header, texts[1]])  # noqa: RUF071
        written = texts[1][len(shared) :].removesuffix(end_of_turn)
        if list(self.tool_format.parse(written, PROBE_TOOLS).calls) != [PROBE_CALL]:
            raise ConfigError(
                f"tokenizer.tool_format={self.tool_format.name} does not read the tool calls that "
                f"the chat template writes: {written!r:.200}. Set tokenizer.tool_format to the "
                f"model's, one of {', '.join(FORMATS)}, or tokenizer.template to one that writes "
                "such calls (chatml writes hermes)"
            )

    def _decode_text(
        self, tokens: Sequence[int], stop: StopReason | None, *, skip_special: bool
    ) -> str:
        """Return the text of a completion, without its end of turn or an incomplete character."""
        ids = list(tokens)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        reads_channels = skip_special and self._is_harmony
        text = self.tokenizer.decode(ids, skip_special=skip_special and not reads_channels)
        text = text.rstrip("\ufffd") if stop is not None and not stop.finished else text
        return read_text(text) if reads_channels else text

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end the assistant's turn: EOS ids, and the template's end of turn."""
        call_end = self.tokenizer.token_id(CALL) if self._is_harmony else None
        turn_ends = [end for end in (self._shape.end_id, call_end) if end is not None]
        return tuple(dict.fromkeys((*self.tokenizer.eos_ids, *turn_ends)))

    @cached_property
    def extends_history(self) -> bool:
        """True if a longer conversation keeps every earlier turn as it was written.

        One sequence of tokens can then hold the whole conversation. False if the template
        drops or changes turns once the user answers, for example earlier reasoning.
        """
        return not any(self.rewritten_turns([USER, turn, USER]) for turn in PROBES)

    def rewritten_turns(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the indices of assistant messages that the template does not show as written."""
        conversation = self._make_conversation(messages, tools)
        return conversation.split_prompt(len(conversation))[1]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.special_ids.values())

    @cached_property
    def _is_harmony(self) -> bool:
        return is_harmony(self.template.source)

    @cached_property
    def _shape(self) -> TurnShape:
        return find_turn_shape(self.template, self.tokenizer)

    def _make_conversation(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> RenderedConversation:
        return RenderedConversation(self.template, self.tokenizer, self._shape, messages, tools)

    def _list_media(self, messages: Sequence[Message]) -> list[ExpandedMedium]:
        """Return the media of all messages, in order."""
        expanded: list[ExpandedMedium] = []
        for index, message in enumerate(messages):
            parts = () if isinstance(message.content, str) else message.content
            for part in (part for part in parts if part.type != "text"):
                if self.processor is None:
                    raise DataError(
                        f"message {index} has a part of the type '{part.type}', and the model "
                        "reads only text: choose a multimodal model, or remove the part"
                    )
                expanded.append(self.processor.expand(part, where=f"message {index}"))
        return expanded

    def _expand_placeholders(
        self, tokens_and_turns: list[tuple[int, int | None]], messages: Sequence[Message]
    ) -> list[tuple[int, int | None]]:
        """Return (id, turn) of tokens, with placeholders expanded to the tokens of their media.

        Tokens of media belong to no turn. Raise DataError if placeholders and media differ in
        number or kind.
        """
        media = self._list_media(messages)
        if self.processor is None:
            return tokens_and_turns
        expanded: list[tuple[int, int | None]] = []
        kind_by_placeholder, n_used = self.processor.kind_by_placeholder, 0
        for token, turn in tokens_and_turns:
            kind = kind_by_placeholder.get(token)
            if kind is None:
                expanded.append((token, turn))
                continue
            if n_used < len(media) and media[n_used].medium.kind == kind:
                expanded += [(part, None) for part in media[n_used].tokens]
            n_used += 1
        media_kinds = [item.medium.kind for item in media]
        kinds = (kind_by_placeholder.get(token) for token, _ in tokens_and_turns)
        placeholder_kinds = [kind for kind in kinds if kind is not None]
        if media_kinds != placeholder_kinds:
            raise DataError(
                f"the messages hold {_count_kinds(media_kinds)}, and the chat template writes "
                f"placeholders for {_count_kinds(placeholder_kinds)}: use the model's own "
                "template, which writes a placeholder for each part, and no others"
            )
        return expanded


def _count_kinds(kinds: Sequence[str]) -> str:
    counts = {kind: kinds.count(kind) for kind in kinds}
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or "no media"
