"""Reward the overlap of the answer's bounding box with the task's box.

    IoU = |A ∩ B| / |A ∪ B|        GIoU = IoU - |C \\ (A ∪ B)| / |C|,  C: smallest box around both

Rezatofighi et al. (2019), arXiv:1902.09630, algorithm 1.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from ratchet.config.base import Section
from ratchet.config.media_limits import MediaLimits
from ratchet.data.formats.media import check_media
from ratchet.data.formats.media_columns import list_media
from ratchet.errors import DataError
from ratchet.rewards.answers.final_answer import extract_marked_answer
from ratchet.rewards.answers.numeric import find_last_match
from ratchet.rewards.base import FinalAnswer
from ratchet.types import Task, is_number_not_bool
from ratchet.utils.safe_read import parse_json


class BoundingBoxConfig(Section):
    """The overlap of the answer's box with the task's box.

    It is the intersection over union, from 0 to 1, or GIoU, from -1 to 1.
    """

    builds: ClassVar[str] = "ratchet.rewards.answers.bounding_box:BoundingBox"

    measure: Literal["iou", "giou"] = "iou"
    """Measure of the overlap. giou (arXiv:1902.09630) also distinguishes near misses from far
    misses."""
    threshold: float | None = Field(None, ge=-1, le=1)
    """The reward is 1 if the measure is at least this, else 0; null: the reward is the measure."""
    corners: Literal["xyxy", "xywh"] = "xyxy"
    """Form of the task's box: two corners (xyxy), or a corner and the size (xywh)."""
    task_units: Literal["pixels", "unit", "thousand"] = "pixels"
    """Units of the task's box: pixels of its picture, 0 to 1, or 0 to 1000."""
    answer_units: Literal["pixels", "unit", "thousand"] = "pixels"
    """Units of the answer's box. An answer always gives two corners."""


NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,12})?"
COMMA = r"\s{0,3},\s{0,3}"
FOUR_NUMBERS = re.compile(
    rf"[\[(]\s{{0,3}}({NUMBER}){COMMA}({NUMBER}){COMMA}({NUMBER}){COMMA}({NUMBER})\s{{0,3}}[\])]"
)
LOWEST_VALUES = {"iou": 0.0, "giou": -1.0}
SIDE_BY_UNIT = {"unit": 1.0, "thousand": 1000.0}


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    @property
    def area(self) -> float:
        return max(0.0, self.right - self.left) * max(0.0, self.bottom - self.top)

    def scale(self, x_factor: float, y_factor: float) -> Box:
        return Box(
            self.left * x_factor, self.top * y_factor, self.right * x_factor, self.bottom * y_factor
        )


def compute_iou(a: Box, b: Box) -> float:
    """Return the intersection over union of boxes with a positive area."""
    intersection = _compute_intersection_area(a, b)
    return intersection / (a.area + b.area - intersection)


def compute_giou(a: Box, b: Box) -> float:
    """Return the generalized intersection over union."""
    enclosing_area = Box(
        min(a.left, b.left), min(a.top, b.top), max(a.right, b.right), max(a.bottom, b.bottom)
    ).area
    union = a.area + b.area - _compute_intersection_area(a, b)
    return compute_iou(a, b) - (enclosing_area - union) / enclosing_area


def _compute_intersection_area(a: Box, b: Box) -> float:
    return Box(
        max(a.left, b.left), max(a.top, b.top), min(a.right, b.right), min(a.bottom, b.bottom)
    ).area


def extract_box(text: str) -> Box | None:
    """Return the last four bracketed numbers of the marked answer, or of a text without a mark.

    None if there are none, or if they are not a top left and a bottom right corner.
    """
    marked = extract_marked_answer(text)
    match = find_last_match(FOUR_NUMBERS, text if marked is None else marked)
    box = None if match is None else Box(*map(float, match.groups()))
    return box if box is not None and box.left < box.right and box.top < box.bottom else None


class BoundingBox(FinalAnswer):
    """A reward for the box in the answer. An answer without a box earns the lowest value."""

    name = "bounding_box"

    def __init__(self, config: BoundingBoxConfig) -> None:
        self.config = config
        self.lowest = 0.0 if config.threshold is not None else LOWEST_VALUES[config.measure]
        self.bounds = (self.lowest, 1.0)

    def answer(self, text: str) -> str | None:
        box = extract_box(text)
        return None if box is None else str(tuple(box))

    def grade(self, text: str, task: Task) -> float:
        """Return the overlap; with a threshold, return 0 or 1.

        Raises DataError if the task's answer is not a box, or if pixels must be converted and the
        picture's size is unknown.
        """
        gold, box = self._read_task_box(task), extract_box(text)
        if box is None:
            return self.lowest
        if self.config.task_units != self.config.answer_units:
            task_width, task_height = get_side_lengths(self.config.task_units, task)
            answer_width, answer_height = get_side_lengths(self.config.answer_units, task)
            box = box.scale(task_width / answer_width, task_height / answer_height)
        value = compute_iou(box, gold) if self.config.measure == "iou" else compute_giou(box, gold)
        return value if self.config.threshold is None else float(value >= self.config.threshold)

    def _read_task_box(self, task: Task) -> Box:
        try:
            values: Any = parse_json(task.answer) if isinstance(task.answer, str) else task.answer
            first, second, third, fourth = map(float, values)
        except (TypeError, ValueError):
            raise DataError(
                f"{task.where}: its answer {str(task.answer)[:100]!r} is not a box [x1, y1, x2, y2]"
            ) from None
        gold = (
            Box(first, second, third, fourth)
            if self.config.corners == "xyxy"
            else Box(first, second, first + third, second + fourth)
        )
        if not gold.area:
            raise DataError(
                f"{task.where}: its box {task.answer} has no area if read as "
                f"corners={self.config.corners}: set the other form of corners, or correct the box"
            )
        return gold


def get_side_lengths(units: str, task: Task) -> tuple[float, float]:
    """Return the width and height of the task's picture in these units.

    Raises DataError for pixels if the picture's size is unknown.
    """
    if units != "pixels":
        return SIDE_BY_UNIT[units], SIDE_BY_UNIT[units]
    width, height = task.meta.get("width"), task.meta.get("height")
    if is_number_not_bool(width) and is_number_not_bool(height) and min(width, height) > 0:
        return float(width), float(height)
    image = next((part for part in list_media(task.messages) if part.type == "image"), None)
    size = None if image is None else check_media(image, where=task.where, limits=MediaLimits())
    if size is None:
        raise DataError(
            f"{task.where} has neither a picture nor the columns width and height, which are "
            "needed to convert pixels: add them"
        )
    return size
