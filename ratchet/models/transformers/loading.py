"""Model directories that transformers reads: what is checked before it does, and how its errors
become one of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ratchet.config.model_shape.config_json import SIZES
from ratchet.errors import ModelError, RatchetError
from ratchet.utils import safe_read
from ratchet.utils.terminal_text import get_first_line

READ = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# Ends of the names of sizes in any family's configuration, and what they may be at most.
ENDS: Mapping[str, int] = {
    "_layers": SIZES["n_layers"][1],
    "n_layer": SIZES["n_layers"][1],
    "depth": SIZES["n_layers"][1],
    "_size": SIZES["vocab_size"][1],
    "_dim": SIZES["vocab_size"][1],
    "n_embd": SIZES["vocab_size"][1],
    "d_model": SIZES["vocab_size"][1],
    "_heads": SIZES["n_heads"][1],
    "_experts": SIZES["n_experts"][1],
}


@contextmanager
def translate_errors(directory: Path, what: str) -> Iterator[None]:
    """Turn any error of transformers into a ModelError with its first line, after a look at the
    directory's files."""
    require_plausible(directory)
    try:
        yield
    except RatchetError:
        raise
    # its code is as many families as there are, each with errors of its own kinds
    except Exception as error:
        reason = get_first_line(str(error) or type(error).__name__)
        raise ModelError(f"transformers can't load {what} from {directory}: {reason}") from error


def refuse_missing_weights(directory: Path, loading: Mapping[str, Any]) -> None:
    """Raise ModelError if transformers filled weights with random numbers because no file has them.

    loading: What `from_pretrained(..., output_loading_info=True)` returns; tied weights and buffers
    are not in it.
    """
    missing = sorted(loading["missing_keys"])
    if missing:
        examples = ", ".join(missing[:3]) + (
            f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        )
        raise ModelError(
            f"{directory} has no weights {examples}, which its config.json asks for. "
            "Add the missing weight files, or correct config.json"
        )


def require_plausible(directory: Path) -> None:
    """Raise ModelError for a file that is a pipe or a device, and for a configuration with sizes
    beyond those of any model, which transformers would compute with until memory ends."""
    for path in (path for pattern in READ for path in directory.glob(pattern)):
        try:
            safe_read.require_file(path)
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}") from None
    path = directory / "config.json"
    if not path.is_file():
        return
    try:
        config = safe_read.read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object")
    for key, value in _numbers(config):
        limit = next((limit for end, limit in ENDS.items() if key.endswith(end)), None)
        if limit is not None and not 0 <= value <= limit:
            raise ModelError(
                f"{path} says {key}={value:.6g}, which no model has: take the file from the "
                "original model"
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield (key, number) of a configuration and of those in it; a key twice where both have it."""
    waiting: list[Mapping[str, Any]] = [config]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield key, value
