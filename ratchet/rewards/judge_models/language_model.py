"""A judge model that the run itself loads: it answers the questions of LLM-judge rewards."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ratchet.data.render_thread import run_beside_loop
from ratchet.errors import DataError
from ratchet.rewards.judge_models.base import JudgeModel
from ratchet.types import Message, Sampling

if TYPE_CHECKING:  # importing rewards must not load torch
    from ratchet.data.chat.renderer import Renderer
    from ratchet.protocols import Generator


class LanguageModelJudge(JudgeModel):
    """A judge with a generator of its own, whose weights never change.

    A reply depends on the judge, the question and the run's seed alone: with a temperature, the
    draw is seeded by the question. So a resumed run gets the replies that it would have got.

    Args:
        name: The judge's name in the recipe.
        generator: The generator that writes the replies.
        renderer: Renders a question with the judge's own template and tokenizer.
        max_context: Maximum number of tokens of a question and its reply together.
        seed: The run's seed.
    """

    def __init__(
        self, name: str, generator: Generator, renderer: Renderer, *, max_context: int, seed: int
    ) -> None:
        self.name = name
        self.generator = generator
        self.max_context = max_context
        self._renderer = renderer
        self._seed = seed

    async def reply(self, question: str, *, temperature: float, max_tokens: int) -> str:
        """Return the text of the model's reply.

        Raises DataError if the question does not fit into the context, or the reply was cut off or
        is empty; and the errors of the generator.
        """
        messages = [Message("user", question)]
        tokens = await run_beside_loop(messages, lambda: self._renderer.prompt(messages))
        n_free = self.max_context - len(tokens)
        if n_free < 1:
            raise DataError(
                f"judge {self.name}: the question has {len(tokens)} tokens, and the model's "
                f"context {self.max_context}. Lower the reward's max_chars, or take a judge with "
                "a longer context"
            )
        completion = await self.generator.generate(
            tokens,
            Sampling(
                temperature=temperature,
                max_new_tokens=min(max_tokens, n_free),
                stop_ids=self._renderer.stop_ids,
                seed=self._derive_seed(question),
            ),
        )
        text = self._renderer.parse(completion.tokens.tolist(), completion.stop).text.strip()
        # A reply that was cut off may lack the score, or show "Score: 1" where "Score: 10" was
        # meant.
        if not completion.stop.finished:
            raise DataError(
                f"judge {self.name}: the reply was cut off after {len(completion.tokens)} tokens "
                f"({completion.stop}): {text[-300:]!r}. Raise the reward's max_tokens"
            )
        if not text:
            raise DataError(f"judge {self.name} answered with an empty message")
        return text

    def _derive_seed(self, question: str) -> int:
        parts = "\x1f".join((str(self._seed), self.name, question))
        digest = hashlib.blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    @property
    def final_error(self) -> Exception | None:
        return self.generator.final_error

    async def close(self) -> None:
        await self.generator.close()
