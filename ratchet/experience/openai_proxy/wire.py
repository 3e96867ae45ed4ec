"""Read requests of the OpenAI API and of vLLM's additions to it, and refuse unsupported ones.

A field that could change tokens is refused by name if the policy can't follow it, or if it would
make the recorded tokens useless for training. It is ignored only if the recipe lists it in
`agent.ignore`. Other fields that are not known have no effect; `IgnoredFields` counts them.

Sources: the API reference of OpenAI, and the request classes of vLLM 0.32
(vllm/entrypoints/openai and vllm/entrypoints/scale_out).
"""

from __future__ import annotations

import difflib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json

from ratchet.data.chat.tool_call_grammar import CallRules
from ratchet.errors import SamplingError
from ratchet.structured_output import KINDS
from ratchet.types import Sampling

log = logging.getLogger(__name__)

MODEL = "policy"  # the name of the served model; requests may use any other name for it
MAX_STOP_CHARS = 1024  # of a stop string
MAX_STOP_IDS = 64  # stop token ids per request
MAX_PATH_CHARS = 200  # of an invalid field's path, which holds keys of the request
# Maximum number of JSON values in a request, arguments of calls included. Each value takes about a
# hundred bytes, and a microsecond in which no other request is answered. Without this limit a body
# of 8 MiB could hold four million.
MAX_VALUES = 2**16
# A request of token ids holds a value for each token.
MAX_TOKEN_VALUES = 2**20
MAX_UNKNOWN_FIELDS = 64  # per request
MAX_COUNTED_FIELDS = 64  # different names of ignored fields that are counted

# Fields that change tokens or the prompt. They are refused on endpoints whose request class does
# not declare them, unless they have one of these neutral values. None is always accepted.
TOKEN_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "beam_width": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "extra_args": ({},),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "input": (),
    "instructions": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "messages": (),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "previous_response_id": (),
    "prompt": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_sequences": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "system": ("",),
    "thinking": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
REFUSAL_REASONS = {
    "n": "; send one request for each answer",
    "parallel_tool_calls": "; sampling can't be limited to a single call",
    "thinking": "; the chat template decides (tokenizer.chat_template_kwargs of the recipe)",
    "reasoning": "; the chat template decides (tokenizer.chat_template_kwargs of the recipe)",
    "context_management": "; send the conversation as it should be read",
    "truncation": "; send the conversation as it should be read",
    "conversation": "; send previous_response_id, or all items as input",
    "background": "; wait for the response, or read its stream",
    "mcp_servers": "; the client has to run all tools",
    "presence_penalty": "; the learner could not reproduce its logprobs",
    "frequency_penalty": "; the learner could not reproduce its logprobs",
    "repetition_penalty": "; the learner could not reproduce its logprobs",
    "stream": "; completions of token ids are not streamed: use /v1/completions",
    "skip_special_tokens": "; set return_token_ids to get all tokens of an answer",
}


class ApiError(Exception):
    """An error response of the API. `param` is the faulty part of the request."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def json(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class JsonValueBudget:
    """The budget of JSON values of one request."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self.max_values = self.remaining = max_values

    def take(self, text: bytes) -> None:
        """Subtract the number of values in a JSON text from the budget, without parsing the text.

        Raises:
            ValueError: The text has more values than the budget has left.
        """
        # Backslashes occur only in strings. Once escapes are removed, each quote begins or ends a
        # string.
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
        # A value has at most four quotes: two if it is a string, and two of its key.
        if text.count(b'"') <= 4 * self.remaining:
            outside = b"".join(text.split(b'"')[::2])
            self.remaining -= sum(outside.count(mark) for mark in (b",", b"[", b"{"))
            if self.remaining >= 0:
                return
        self.remaining = 0
        raise ValueError(f"the request holds more than {self.max_values} values of JSON")


class IgnoredFields:
    """The fields of requests that have no effect, and how often requests had them.

    `names` are fields that might change tokens, and that the recipe's `agent.ignore` lists. The
    first request with each ignored field is logged.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = frozenset(names)
        self.counts: Counter[str] = Counter()

    def remove(self, body: bytes) -> bytes:
        """Return the body without the fields of `names`, also in its `sampling_params`."""
        if not self.names:
            return body
        try:
            request = from_json(body)
        except ValueError:
            return body  # validation refuses it
        if not isinstance(request, dict):
            return body
        for part in (request, request.get("sampling_params")):
            if not isinstance(part, dict):
                continue
            for name in sorted(self.names.intersection(part)):
                self.count(name, part.pop(name))
        return json.dumps(request).encode()

    def count(self, name: str, value: Any) -> None:
        """Count a field that has no effect, and log the first one of its name."""
        name = name[:MAX_PATH_CHARS]
        if name not in self.counts:
            if len(self.counts) >= MAX_COUNTED_FIELDS:
                name = "others"
            else:
                log.log(
                    logging.WARNING if name in self.names else logging.INFO,
                    "a request has %s=%.100s, which has no effect%s. Further requests with %s are "
                    "counted in /metrics, not logged",
                    name,
                    json.dumps(value, default=str),
                    " (agent.ignore)" if name in self.names else "",
                    name,
                )
        self.counts[name] += 1


class WireModel(BaseModel):
    """A part of a request whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)


class WireRequest(BaseModel):
    """A validated request body. Unknown fields are kept, and `read` checks them."""

    model_config = ConfigDict(extra="allow", strict=True)
    max_values: ClassVar[int] = MAX_VALUES

    model: str = MODEL

    @classmethod
    def read(cls, body: bytes, ignored: IgnoredFields | None = None) -> Self:
        """Parse a request body. Fields that have no effect are counted in `ignored`.

        Raises:
            ApiError: 400 for an invalid body, or a field that can't be followed.
        """
        budget = JsonValueBudget(cls.max_values)
        ignored = IgnoredFields() if ignored is None else ignored
        try:
            budget.take(body)
        except ValueError as error:
            raise ApiError(400, f"the body: {error}", code="invalid_value") from None
        try:
            request = cls.model_validate_json(ignored.remove(body), context=budget)
        except ValidationError as error:
            raise explain_first_error(error) from None
        request.check_unknown_fields(ignored)
        return request

    def check_unknown_fields(self, ignored: IgnoredFields) -> None:
        """Count the unknown fields, which have no effect.

        Raises:
            ApiError: 400 for an unknown field that would change tokens.
        """
        unknown_fields = self.model_extra or {}
        if len(unknown_fields) > MAX_UNKNOWN_FIELDS:
            raise ApiError(
                400,
                f"the request has {len(unknown_fields)} unknown fields: send at most "
                f"{MAX_UNKNOWN_FIELDS}",
                code="invalid_value",
            )
        for name, value in unknown_fields.items():
            refuse_token_field(name, value, known_names=type(self).model_fields)
            ignored.count(name, value)


class StructuredOutputs(WireModel):
    """vLLM's grammar of an answer: exactly one of its first five fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # These would change tokens in ways that are not supported, so only their defaults pass.
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return the grammar as `StructuredOutput.from_mapping` reads it."""
        mapping: dict[str, Any] = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        if self.json_object:
            # Beside a schema, `json_object` is a second grammar, which `from_mapping` refuses.
            mapping["json" if self.json_ is None else "json_object"] = {"type": "object"}
        return mapping


Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


class SamplingFields(WireRequest):
    """The sampling parameters that a request may set.

    `top_k` is as in vLLM: 0 and -1 mean off.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Annotated[list[Stop], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    structured_outputs: StructuredOutputs | None = None
    # Names of older releases of vLLM for `structured_outputs`.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _wrap_single(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("top_k")
    @classmethod
    def _normalize_top_k(cls, top_k: int | None) -> int | None:
        return 0 if top_k == -1 else top_k

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""
        return self.max_tokens

    def find_call_rules(self) -> CallRules | None:
        """Return the rules of forced or strict tool calls; None if the request has neither."""
        return None

    def list_grammars(self) -> dict[str, Mapping[str, Any]]:
        """Return the grammars that the request sets for its answer, by the name of the field.

        Each is a mapping that `StructuredOutput.from_mapping` reads.
        """
        grammars: dict[str, Mapping[str, Any]] = {}
        if self.structured_outputs is not None:
            grammars["structured_outputs"] = self.structured_outputs.to_mapping()
        for kind in KINDS:
            if (value := getattr(self, f"guided_{kind}")) is not None:
                grammars[f"guided_{kind}"] = {kind: value}
        return grammars


# Sampling fields that a request may not change during training: they must equal the recipe's.
DISTRIBUTION_FIELDS = ("temperature", "top_p", "top_k", "min_p")


def refuse_token_field(name: str, value: Any, *, known_names: Mapping[str, Any]) -> None:
    """Raise ApiError if ignoring an unknown field would change tokens.

    A name that is nearly that of a known field is refused too: it is probably mistyped.
    """
    if name in TOKEN_FIELDS:
        if value is None or value in TOKEN_FIELDS[name]:
            return
        reason = REFUSAL_REASONS.get(name, "; it would change the tokens, and can't be followed")
        shown_value = json.dumps(value, default=str)
        raise ApiError(
            400, f"{name}={shown_value:.100}{reason}", param=name, code="unsupported_value"
        )
    similar_names = difflib.get_close_matches(name[:MAX_PATH_CHARS], known_names, 1, cutoff=0.85)
    if similar_names:
        raise ApiError(
            400,
            f"{name:.200}: there is no such field; did you mean {similar_names[0]}?",
            param=name[:MAX_PATH_CHARS],
            code="unknown_parameter",
        )


def explain_first_error(error: ValidationError) -> ApiError:
    """Return the ApiError for the first error of an invalid request."""
    first_error = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(map(str, first_error["loc"]))[:MAX_PATH_CHARS] or None
    hint = REFUSAL_REASONS.get(str(first_error["loc"][0]), "") if first_error["loc"] else ""
    message = f"{path or 'the body'}: {first_error['msg']}{hint}"
    return ApiError(400, message, param=path, code="invalid_value")


def apply_sampling(sampling: Sampling, **changes: Any) -> Sampling:
    """Return the sampling with the changes of a request.

    Raises:
        ApiError: 400 with the field's name, if the values are invalid.
    """
    try:
        return replace(sampling, **changes)
    except SamplingError as error:
        raise ApiError(400, str(error), param=error.field, code="invalid_value") from None
