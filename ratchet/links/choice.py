"""Which link leads from a learner to a generator."""

from __future__ import annotations

from ratchet.interfaces import Generator, Learner, Link
from ratchet.links.direct import DirectLink
from ratchet.links.shared import SharedLink


def link_between(learner: Learner, generator: Generator, *, apart: bool = False) -> Link:
    """A generator that reads the tensors of this process's model says so in `shares_weights`; any other is sent them. apart:
    the learner lives in other processes."""
    shares = getattr(generator, "shares_weights", False) and not apart
    return SharedLink(generator) if shares else DirectLink(learner, generator)
