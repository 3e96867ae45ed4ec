"""Which link leads from a learner to a generator."""

from __future__ import annotations

from ratchet.interfaces import Generator, Learner, Link
from ratchet.links.direct import DirectLink
from ratchet.links.shared import SharedLink


def link_between(learner: Learner, generator: Generator) -> Link:
    """A generator that reads the learner's own tensors says so in `shares_weights`; any other is sent them."""
    return SharedLink(generator) if getattr(generator, "shares_weights", False) else DirectLink(learner, generator)
