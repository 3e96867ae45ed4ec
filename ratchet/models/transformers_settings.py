"""Read the settings of transformers' configurations, which differ by architecture."""

from __future__ import annotations

from typing import Any


def read_setting(config: Any, name: str, default: Any = None) -> Any:
    """Return a setting of a model's configuration, or the default if it has none of this name."""
    return getattr(config, name, default)


def read_max_positions(text_config: Any) -> int | None:
    """Return the length of the longest context, in tokens; None if the configuration names none."""
    return read_setting(text_config, "max_position_embeddings") or None
