"""The command `ratchet chat`: talk to a model in the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ratchet.commands.model_target import open_target
from ratchet.errors import DataError
from ratchet.experience.seeds import derive_seed
from ratchet.training.stage import Policy
from ratchet.types import Message, Sampling
from ratchet.utils.terminal_text import make_console


def chat_with(
    path: Path, *, prompts: Sequence[str], temperature: float, max_new_tokens: int, seed: int
) -> None:
    """Answer each of `prompts` in one conversation; if there are none, read prompts from the
    terminal until its input ends.

    Raises:
        DataError: One of `prompts` can't be answered. For a prompt typed in the terminal, the error
            is printed, and the chat continues.
    """
    console = make_console()
    policy = open_target(path).policy
    sampling = policy.with_stop_ids(
        Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
    )
    messages: list[Message] = []
    with ExitStack() as stack:
        # All turns share one event loop, since a generator may keep tasks in it.
        runner = stack.enter_context(asyncio.Runner())
        stack.callback(lambda: runner.run(policy.close()))
        for turn, text in enumerate(prompts or _read_prompts(console)):
            question = Message("user", text)
            try:
                answer = runner.run(
                    _answer(
                        policy,
                        [*messages, question],
                        replace(sampling, seed=derive_seed(seed, turn)),
                    )
                )
            # For example, the tokenizer may not know a character. The user may try again.
            except DataError as error:
                if prompts:
                    raise
                console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
                continue
            messages += [question, answer]
            console.print(answer.text, markup=False, highlight=False, soft_wrap=True)


async def _answer(policy: Policy, messages: Sequence[Message], sampling: Sampling) -> Message:
    completion = await policy.generator.generate(policy.renderer.prompt(messages), sampling)
    return policy.renderer.parse(completion.tokens.tolist(), completion.stop)


def _read_prompts(console: Console) -> Iterator[str]:
    console.print("An empty line or Ctrl-D ends the chat.", style="dim")
    while True:
        try:
            text = console.input("> ")
        except EOFError:
            return
        if not text:
            return
        yield text
