"""Build the environment of a section."""

from __future__ import annotations

from ratchet.config import resolve
from ratchet.config.base import Section
from ratchet.protocols import Environment
from ratchet.utils.user_parts import add_missing_members


def build_environment(section: Section) -> Environment:
    """Return the section's environment. A user's plain class gets the members that it lacks."""
    return add_missing_members(resolve.build(section), Environment)
