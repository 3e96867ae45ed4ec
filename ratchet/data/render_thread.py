"""Render and tokenize long texts in threads, so that the event loop continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ratchet.types import Message

# Threads that render prompts outside the event loop. They run in parallel, because tokenizing
# releases the GIL.
RENDERING = ThreadPoolExecutor(4, thread_name_prefix="render")
# Maximum number of characters that are tokenized in the event loop, which takes some 10 ms.
MAX_LOOP_CHARS = 2**15
T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread so that the event loop continues.

    Rendering, tokenizing or decoding a long text takes seconds, and no other request should wait
    for that.
    """
    return await asyncio.get_running_loop().run_in_executor(RENDERING, work)


async def run_beside_loop(messages: Sequence[Message], work: Callable[[], T]) -> T:
    """Return the result of `work`, which renders messages: in a thread if they are long.

    `work` must change no state, since it goes on if the caller is cancelled.
    """
    if sum(len(message.text) for message in messages) <= MAX_LOOP_CHARS:
        return work()
    return await run_in_thread(work)
