"""The environment variables that programs started by a run get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def inherited(**more: str) -> dict[str, str]:
    """Those of this process, and some more."""
    return {**os.environ, **more}


@contextmanager
def settings(variables: Mapping[str, str]) -> Iterator[None]:
    """For what is configured by variables while it starts: with these, as far as the user hasn't
    set them. Afterwards all is as it was, so that what it may have set itself (libraries to be
    preloaded, say) reaches no other program."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name not in before})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
