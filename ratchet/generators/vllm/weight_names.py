"""Names of weights in vLLM, for the families whose names in transformers vLLM does not know.

For Qwen2-Audio vLLM 0.32 knows only the names of the published checkpoint; transformers 5 has
others in memory, and writes a third form (`language_model.model.model...`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ratchet.models.weights.hf_weights import save_weights

# By `model_type`: beginnings of canonical names, and those of vLLM's; the first that fits counts.
PREFIXES: Mapping[str, Sequence[tuple[str, str]]] = {
    "qwen2_audio": (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", ""),
    )
}


def make_rename(model_config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return the function from a weight's canonical name to its name in vLLM.

    Most families have the same names in both: vLLM knows those of transformers.
    """
    prefixes = PREFIXES.get(str(model_config.get("model_type")), ())

    def rename(name: str) -> str:
        old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        return new + name.removeprefix(old)

    return rename


def rewrite_start_weights(
    directory: Path, model_config: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Replace the weights in a model's directory by `weights` with vLLM's names, where they differ.

    weights: all weights, by their canonical names.
    """
    if str(model_config.get("model_type")) not in PREFIXES:
        return
    rename = make_rename(model_config)
    renamed = [(rename(name), weight) for name, weight in weights]
    save_weights(renamed, directory, renamed[0][1].dtype)
