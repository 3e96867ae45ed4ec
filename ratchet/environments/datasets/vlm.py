"""The configuration of questions about images, audio clips and videos.

Each row has the columns of the `dataset` environment, and an image, audio clip or video. The kind
of answer chooses the reward. Importing the module loads no data library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ratchet.environments.datasets.config import DatasetConfig

# The default reward for each kind of answer.
DEFAULT_REWARDS: Mapping[str, Mapping[str, Any]] = {
    "text": {"kind": "exact_match", "marked": True, "ignore_case": True},
    "number": {"kind": "numeric_answer"},
    "choice": {"kind": "multiple_choice"},
    "box": {"kind": "bounding_box"},
}


class VLMConfig(DatasetConfig):
    """Questions about images, audio clips or videos (docs/multimodal.md).

    It has the keys of `dataset`, and the key `answers`.
    """

    needs_media = True

    answers: Literal["text", "number", "choice", "box"] | None = None
    """Kind of the answers, which chooses the reward; null: the preset's reward, or text."""

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.answers is not None:
            return DEFAULT_REWARDS[self.answers]
        return super().default_reward or DEFAULT_REWARDS["text"]
