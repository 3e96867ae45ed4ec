"""Run rendering and tokenizing in threads beside the event loop, and bound the size of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ratchet.data.chat.renderer import Renderer

# Threads that render prompts outside the event loop. They run in parallel, because tokenizing
# releases the GIL.
RENDERING = ThreadPoolExecutor(4, thread_name_prefix="render")
# Maximum number of characters that a tokenizer's normalisation (such as NFKC) merges into one.
MAX_MERGED_CHARS = 4
T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread so that the event loop goes on.

    Rendering, tokenizing or decoding a long text takes seconds, and no other request should wait
    for that.
    """
    return await asyncio.get_running_loop().run_in_executor(RENDERING, work)


def count_max_chars(renderer: Renderer, max_context: int) -> int:
    """Return an upper bound on the characters of a text with `max_context` tokens."""
    return MAX_MERGED_CHARS * renderer.tokenizer.max_token_chars * max_context
