"""Run `ratchet serve`: serve a trained model through the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ratchet.allowed_tokens import AllowedTokens
from ratchet.commands.model_target import open_target
from ratchet.data.chat.renderer import Renderer
from ratchet.data.packing import pack
from ratchet.errors import ConfigError
from ratchet.executors.signals import STOP_SIGNALS
from ratchet.experience.openai_proxy.answers import TokenScores
from ratchet.experience.openai_proxy.responses_api.store import MAX_SERVED_BYTES, ResponseStore
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.server import make_chat_app
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.experience.openai_proxy.strands import AgentAnswer
from ratchet.experience.openai_proxy.wire import (
    DISTRIBUTION_FIELDS,
    ApiError,
    SamplingFields,
    apply_sampling,
)
from ratchet.learners.compute.forward import Forward, resolve_chunk_mib
from ratchet.models.policy import PolicyModel
from ratchet.training.stage import Policy
from ratchet.types import Group, Owner, Sampling, Task, Trajectory
from ratchet.web.guard import LOOPBACK
from ratchet.web.server import Server

NO_LOGPROB = -9999.0  # OpenAI's value for a token that can't be drawn


class OneAnswerSession(AgentSession):
    """A session of a single answer, which no learner scores."""

    trains = False


@dataclass(frozen=True)
class ServedModel:
    """A model that answers each request independently."""

    policy: Policy
    """The model, its tokenizer and its generator."""
    sampling: Sampling
    """The defaults for requests. A request without a seed gets a random seed."""
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(MAX_SERVED_BYTES))
    """The responses that later requests may continue from."""

    @property
    def renderer(self) -> Renderer:
        return self.policy.renderer

    @property
    def max_context(self) -> int:
        return self.policy.model.max_positions

    async def answer(self, request: ChatRequest) -> AgentAnswer:
        """Answer a request. Raises ApiError."""
        session = self._open_session(request, self.policy.with_stop_ids(self.sampling))
        return await session.answer(_strip_distribution(request, top_logprobs=None))

    async def count_prompt(self, request: ChatRequest) -> int:
        """Return the number of tokens of a conversation. Raises ApiError."""
        return await self._open_session(SamplingFields(), self.sampling).count_prompt(request)

    async def complete(
        self, tokens: Sequence[int], request: SamplingFields, *, n_top: int = 0
    ) -> AgentAnswer:
        """Complete a prompt of token ids, up to the end-of-text token. Raises ApiError."""
        sampling = replace(self.sampling, stop_ids=self.policy.tokenizer.eos_ids)
        session = self._open_session(request, sampling)
        return await session.complete(tokens, _strip_distribution(request))

    async def score(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        n_top: int,
        allowed: AllowedTokens | None = None,
    ) -> TokenScores:
        """Return the log-probabilities of a text's tokens, and of the likeliest tokens there.

        allowed: the tokens that a grammar allowed at each token of the text.

        Raises:
            ApiError: The text is longer than the model's context.
        """
        if len(tokens) > self.max_context:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens, the context {self.max_context}",
                param="prompt",
                code="context_length_exceeded",
            )
        if not 0 <= min(tokens) <= max(tokens) < self.policy.model.vocab_size:
            raise ApiError(
                400,
                f"the prompt has a token outside of 0 to {self.policy.model.vocab_size - 1}",
                param="prompt",
                code="invalid_value",
            )
        return await asyncio.to_thread(
            score_tokens,
            self.policy.model,
            tokens,
            temperature=temperature or 1.0,
            n_top=n_top,
            allowed=allowed,
        )

    def record(self, answer: AgentAnswer) -> None:
        """Do nothing: answers are not kept."""

    def _open_session(self, request: SamplingFields, sampling: Sampling) -> AgentSession:
        """Return a session for one answer, with the sampling parameters of the request."""
        parameters: dict[str, Any] = {
            name: value
            for name in DISTRIBUTION_FIELDS
            if (value := getattr(request, name)) is not None
        }
        seed = secrets.randbits(32) if request.seed is None else request.seed
        return OneAnswerSession(
            self.policy.generator,
            self.policy.renderer,
            apply_sampling(sampling, seed=seed, **parameters),
            max_context=self.max_context,
            max_turns=1,
        )


R = TypeVar("R", bound=SamplingFields)


def _strip_distribution(request: R, **changes: Any) -> R:
    """Return a request without the sampling parameters, which `_open_session` has applied."""
    return request.model_copy(update={**dict.fromkeys(DISTRIBUTION_FIELDS), **changes})


def score_tokens(
    model: PolicyModel,
    tokens: Sequence[int],
    *,
    temperature: float,
    n_top: int,
    allowed: AllowedTokens | None = None,
) -> TokenScores:
    """Return the log-probabilities of a text's T tokens, and of the `n_top` likeliest at each.

    The arrays have the shapes (T,) and (T, n_top). They are computed in float32 by the code that
    a learner scores with. A token that a grammar does not allow has NO_LOGPROB.
    """
    token_array = np.asarray(tokens, dtype=np.int64)
    count = len(token_array)
    # Every token except the first is predicted.
    is_predicted = np.arange(count) > 0
    trajectory = Trajectory(
        tokens=token_array,
        owner=np.where(is_predicted, np.int8(Owner.POLICY), np.int8(Owner.PROMPT)),
        trainable=is_predicted,
        rollout_logprobs=np.zeros(count, np.float32),
        versions=np.full(count, -1, np.int32),
        temperature=temperature,
        allowed=allowed,
    )
    batch = pack([Group("scored", Task("scored", ()), (trajectory,))])
    device = next(model.parameters()).device.type
    forward = Forward(
        model, None, chunk_mib=resolve_chunk_mib("auto", device), autocast=False, shared_vocab=None
    )
    names = ("logprobs", "topk_ids", "topk_logprobs") if n_top else ("logprobs",)
    columns = {
        name: column.float().cpu().numpy() if column.is_floating_point() else column.cpu().numpy()
        for name, column in forward.score(batch, names, top_k=n_top).items()
    }
    columns["logprobs"][0] = np.nan  # no token precedes the first one
    if not n_top:
        no_tokens = np.zeros((count, 0))
        return TokenScores(
            columns["logprobs"], no_tokens.astype(np.int64), no_tokens.astype(np.float32)
        )
    # The last column is the probability of all other tokens together.
    return TokenScores(
        columns["logprobs"],
        columns["topk_ids"],
        columns["topk_logprobs"][:, :n_top].clip(min=NO_LOGPROB),
    )


def serve(
    target: Path,
    *,
    host: str,
    port: int,
    key: str,
    sampling: Sampling,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGINT, SIGTERM or, unless it is ignored, SIGHUP.

    Raises ConfigError if the address can't be used, or if other machines could reach it without a
    key.

    Args:
        port: The port to listen on; 0 lets the system choose a free port.
        key: The API key that requests must send; "" for none.
        sampling: The defaults for requests.
        say: A function that prints a line with the address, once the model is loaded.
    """
    if host not in LOOPBACK and not key:
        raise ConfigError(
            f"--host {host} can be reached from other machines: give --api-key too, or leave "
            "--host at 127.0.0.1"
        )
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(
            f"--port {port} on {host} can't be used: {error.strerror or error}; choose another"
        ) from error
    asyncio.run(_serve(target, listener, key, sampling, say))


async def _serve(
    target: Path,
    listener: socket.socket,
    key: str,
    sampling: Sampling,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    # The target is opened inside the event loop, because a generator may keep tasks there.
    policy = open_target(target).policy
    model = ServedModel(policy, sampling)
    hosts = None if key else tuple(dict.fromkeys((*LOOPBACK, listener.getsockname()[0])))
    app = make_chat_app(
        lambda request_key: (
            model if not key or hmac.compare_digest(request_key.encode(), key.encode()) else None
        ),
        hosts=hosts,
    )
    server = Server(app, listener, access_log=True)
    received_signals = list[int]()

    def stop(signal_number: int) -> None:
        received_signals.append(signal_number)
        server.stop()

    for signal_number in STOP_SIGNALS:
        # Under `nohup`, SIGHUP is ignored, so that the server outlives its terminal. It must stay
        # ignored.
        if (
            signal_number is not signal.SIGHUP
            or signal.getsignal(signal_number) is not signal.SIG_IGN
        ):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop, signal_number)
    host, port = server.address
    say(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1 serves {target} (Ctrl-C ends it)")
    try:
        await server.run()
    finally:
        await policy.close()
    if received_signals:
        raise SystemExit(128 + received_signals[0])
