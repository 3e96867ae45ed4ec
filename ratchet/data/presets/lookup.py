"""Look up presets of published datasets and benchmarks by name."""

from __future__ import annotations

from difflib import get_close_matches

from ratchet.data.presets.benchmarks import BENCHMARKS
from ratchet.data.presets.datasets import PRESETS, Preset
from ratchet.data.presets.media_datasets import MEDIA_PRESETS
from ratchet.errors import ConfigError

PUBLISHED = {**PRESETS, **MEDIA_PRESETS, **BENCHMARKS}


def find_dataset_preset(name: str) -> Preset:
    """Return a preset. Raise ConfigError, with the nearest name, if its name is unknown."""
    if name not in PUBLISHED:
        near = get_close_matches(name, PUBLISHED, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"'{name}' is not the preset of a dataset: {hint}there are {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]
