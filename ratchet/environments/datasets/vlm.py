"""Questions about images, clips and videos: rows of data, as `dataset` reads them, each with a
medium, judged by what their answers are. Free of torch and of what reads the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from ratchet.environments.datasets.config import DatasetConfig

# What judges each kind of answer unless the recipe names rewards.
JUDGES: Mapping[str, Mapping[str, Any]] = {
    "text": {"kind": "exact_match", "marked": True, "ignore_case": True},
    "number": {"kind": "numeric_answer"},
    "choice": {"kind": "multiple_choice"},
    "box": {"kind": "bounding_box"},
}


class VLMConfig(DatasetConfig):
    """Rows with images, clips or videos, and questions about them (docs/multimodal.md). All keys
    are those of `dataset`."""

    needs_media = True

    answers: Literal["text", "number", "choice", "box"] | None = Field(
        None,
        description="What answers are, and so what judges them; null: as the preset says, or text.",
    )

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.answers is not None:
            return JUDGES[self.answers]
        return super().default_reward or JUDGES["text"]
