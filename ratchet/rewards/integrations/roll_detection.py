"""Reward the boxes of an answer as ROLL does for object detection, by overlap and label.

    IoU score = (1 - c) · Σ IoU of matches / n + c · (1 - (misses / n + false alarms / m) / 2)

for n boxes of the task, m boxes of the answer and the weight c of completeness. A score is
multiplied by 0.6^|m - n|. The mean average precision is COCO's (Lin et al. 2014, arXiv:1405.0312),
of 101 recalls, where all boxes of an answer have the same confidence.

Source: `DetectionVerifier` of ROLL's `detection_reward_worker.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.answers.bounding_box import Box, compute_iou, get_side_lengths
from ratchet.rewards.answers.final_answer import extract_first_tagged
from ratchet.rewards.base import AnswerReward
from ratchet.types import Scored, Task, is_number_not_bool
from ratchet.utils.safe_read import parse_json

Score = Literal["iou_max_iou_first", "iou_max_label_first", "map", "map50", "map75"]


def default_weights() -> dict[Score, float]:
    """Return the weights of a reward that pays for overlap alone."""
    return {"iou_max_iou_first": 1.0}


class DetectionConfig(Section):
    """A reward of ROLL, from 0 to 1, for several labelled boxes and their form."""

    builds: ClassVar[str] = "ratchet.rewards.integrations.roll_detection:Detection"

    weights: dict[Score, float] = Field(default_factory=default_weights)
    """Weights of the scores: iou_max_iou_first (pairs of the largest overlap), iou_max_label_first
    (pairs of one label), map, map50 and map75 (COCO's). A row's
    reward_model.verifier_parm.det_reward_ratio replaces them."""
    completeness: float = Field(0.0, ge=0, le=1)
    """Weight of misses and false alarms in the overlap scores. A row's
    det_reward_ratio.iou_completeness replaces it."""
    iou_threshold: float | None = Field(None, ge=0.5, le=0.99)
    """Smallest overlap of a pair; null: the mean over 0.5, 0.55, ..., 0.95, 0.99."""
    format_weight: float = Field(0.1, ge=0)
    """Weight of the form beside the weight 1 of the boxes. A row's reward_model.format_ratio and
    accuracy_ratio replace both."""
    answer_units: Literal["pixels", "thousand"] = "thousand"
    """Units of the answer's boxes: pixels of its picture, or 0 to 1000 as the task's boxes."""

    def check_keys(self) -> None:
        weights = self.weights.values()
        if not sum(weights) > 0 or min(weights) < 0:
            raise ValueError(
                f"weights={self.weights} must be 0 or more, and one of them above 0. Set "
                "weights.iou_max_iou_first=1"
            )


IOU_THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99)
COCO_THRESHOLDS = tuple((50 + 5 * index) / 100 for index in range(10))
SCORES: tuple[Score, ...] = get_args(Score)
SIZE_PENALTY = 0.6
MAX_BOXES = 100  # COCO's maximum; an answer with more boxes of 100 or fewer earns nothing anyway
MAX_COORDINATE = 1e9


@dataclass(frozen=True)
class LabelledBox:
    label: str
    box: Box


class Detection(AnswerReward):
    """A reward for the labelled boxes between `<answer>` and `</answer>`.

    They are a list of {"bbox_2d": [x1, y1, x2, y2], "label": text}; single quotes will do. The
    task's boxes are such a list, with or without the tags, in its answer or in its column
    `reward_model`, as ROLL's rows have it. Letters' case does not count.

    It differs from ROLL's where pairs of the largest overlap are chosen: ROLL computes that
    overlap, but pairs the last boxes.
    """

    name = "detection"
    bounds = (0.0, 1.0)

    def __init__(self, config: DetectionConfig) -> None:
        self.config = config

    def grade(self, text: str, task: Task) -> Scored:
        """Return the reward, with the scores as parts.

        Raises DataError if the task has no boxes, or if the picture's size is needed and unknown.
        """
        settings = _read_settings(self.config, task)
        gold = _parse_boxes(settings.ground_truth)
        if not any(box.box.area > 0 for box in gold):
            raise DataError(
                f"{task.where}: its answer {settings.ground_truth[:80]!r} is no list of "
                '{"bbox_2d": [x1, y1, x2, y2], "label": text} with an area'
            )
        boxes = self._read_answer(text, task)
        is_formatted = bool(boxes) and "\n<answer>\n" in text and text.count("\n</answer>") == 1
        scores: dict[Score, float] = dict.fromkeys(SCORES, 0.0)
        if 0 < len(boxes) <= max(MAX_BOXES, len(gold)):
            penalty = SIZE_PENALTY ** abs(len(boxes) - len(gold))
            full = compute_scores(boxes, gold, self.config.iou_threshold, settings.completeness)
            scores = {name: penalty * value for name, value in full.items()}
        total_weight = sum(settings.weights.values())
        accuracy = sum(weight * scores[name] for name, weight in settings.weights.items())
        accuracy /= total_weight
        share = settings.format_weight / (settings.format_weight + settings.accuracy_weight)
        reward = (1 - share) * accuracy + share * is_formatted
        return Scored(reward, {"accuracy": accuracy, "format": float(is_formatted), **scores})

    def _read_answer(self, text: str, task: Task) -> list[LabelledBox]:
        boxes = _parse_boxes(extract_first_tagged(text) or "")
        if not boxes or self.config.answer_units == "thousand":
            return boxes
        width, height = get_side_lengths("pixels", task)
        scaled = (box.box.scale(1000 / width, 1000 / height) for box in boxes)
        return [
            LabelledBox(box.label, Box(*map(float, map(int, corners))))
            for box, corners in zip(boxes, scaled, strict=True)
        ]


@dataclass(frozen=True)
class DetectionSettings:
    """The settings of one task: those of its row, else those of the reward."""

    ground_truth: str
    weights: Mapping[Score, float]
    completeness: float
    format_weight: float
    accuracy_weight: float


def _read_settings(config: DetectionConfig, task: Task) -> DetectionSettings:
    row = task.meta.get("reward_model")
    if row and not isinstance(row, Mapping):
        raise DataError(
            f"{task.where}: reward_model={row!r:.80} must be an object with ground_truth. Convert "
            "it, or remove the column"
        )
    values: Mapping[str, Any] = row if isinstance(row, Mapping) else {}
    verifier = values.get("verifier_parm")
    ratio = verifier.get("det_reward_ratio") if isinstance(verifier, Mapping) else None
    ground_truth = values.get("ground_truth", task.answer)
    ratios = {name: values.get(name) for name in ("format_ratio", "accuracy_ratio")}
    if isinstance(ratio, Mapping):
        ratios |= {str(name): value for name, value in ratio.items()}
    # Keys that a row does not give are null in a table of rows.
    numbers = {name: value for name, value in ratios.items() if value is not None}
    for name, value in numbers.items():
        if not is_number_not_bool(value) or not 0 <= value <= 1:
            raise DataError(f"{task.where}: {name}={value!r:.40} must be a number from 0 to 1")
    weights: Mapping[Score, float] = config.weights
    completeness = config.completeness
    if isinstance(ratio, Mapping):
        weights = {name: float(numbers.get(name, 0.0)) for name in SCORES}
        completeness = float(numbers.get("iou_completeness", 0.0))
    format_weight = numbers.get("format_ratio", config.format_weight)
    accuracy_weight = numbers.get("accuracy_ratio", 1.0)
    if not sum(weights.values()) or not format_weight + accuracy_weight:
        raise DataError(
            f"{task.where}: its weights are all 0: set one of reward_model.verifier_parm."
            "det_reward_ratio, and format_ratio or accuracy_ratio, above 0"
        )
    text = "" if ground_truth is None else str(ground_truth)
    tagged = extract_first_tagged(text)
    return DetectionSettings(
        text if tagged is None else tagged, weights, completeness, format_weight, accuracy_weight
    )


def _parse_boxes(text: str) -> list[LabelledBox]:
    """Return the boxes of a list, without those whose position occurred before.

    Entries that are no labelled box are left out, and a last one that is cut off too.
    """
    text = text.strip().lower().replace("[[", "[").replace("]]", "]")
    if not text.endswith("]"):
        text = text.rsplit("},", 1)[0] + "}]"
    entries = _parse_list(text)
    if entries is None:  # single quotes, or a quote that is escaped needlessly
        entries = _parse_list(text.replace("'", '"').replace("\\", ""))
    boxes: dict[Box, LabelledBox] = {}
    for entry in entries or []:
        corners = entry.get("bbox_2d") if isinstance(entry, dict) else None
        label = entry.get("label") if isinstance(entry, dict) else None
        if not isinstance(label, str) or not isinstance(corners, list) or len(corners) != 4:
            continue
        if not all(_is_coordinate(value) for value in corners):
            continue
        box = Box(*map(float, corners))
        if box.left <= box.right and box.top <= box.bottom:
            boxes.setdefault(box, LabelledBox(label, box))
    return list(boxes.values())


def _parse_list(text: str) -> list[Any] | None:
    try:
        entries = parse_json(text)
    except ValueError:
        return None
    return entries if isinstance(entries, list) else None


def _is_coordinate(value: Any) -> bool:
    return is_number_not_bool(value) and abs(value) <= MAX_COORDINATE


def _compute_overlaps(
    boxes: Sequence[LabelledBox], gold: Sequence[LabelledBox]
) -> list[list[float]]:
    """Return the intersections over unions, by the answer's box and the task's box."""
    return [
        [
            compute_iou(box.box, other.box) if box.box.area + other.box.area > 0 else 0.0
            for other in gold
        ]
        for box in boxes
    ]


def compute_scores(
    boxes: Sequence[LabelledBox],
    gold: Sequence[LabelledBox],
    iou_threshold: float | None,
    completeness: float,
) -> dict[Score, float]:
    """Return the scores of an answer's boxes, without the penalty on their number."""
    overlaps = _compute_overlaps(boxes, gold)
    thresholds = IOU_THRESHOLDS if iou_threshold is None else (iou_threshold,)

    def compute_mean(match: Callable[..., list[float]]) -> float:
        return fmean(
            _compute_iou_score(match(boxes, gold, overlaps, threshold), boxes, gold, completeness)
            for threshold in thresholds
        )

    precisions = {
        threshold: _compute_mean_precision(boxes, gold, overlaps, threshold)
        for threshold in COCO_THRESHOLDS
    }
    return {
        "iou_max_iou_first": compute_mean(match_largest_overlaps),
        "iou_max_label_first": compute_mean(match_labels),
        "map": fmean(precisions.values()),
        "map50": precisions[COCO_THRESHOLDS[0]],
        "map75": precisions[COCO_THRESHOLDS[5]],
    }


def match_largest_overlaps(
    boxes: Sequence[LabelledBox],
    gold: Sequence[LabelledBox],
    overlaps: Sequence[Sequence[float]],
    threshold: float,
) -> list[float]:
    """Return the overlaps of pairs, the largest first; a pair of two labels counts 0."""
    order = sorted(
        ((-overlaps[i][j], i, j) for i in range(len(boxes)) for j in range(len(gold))),
    )
    used_boxes: set[int] = set()
    used_gold: set[int] = set()
    matches: list[float] = []
    for negative, i, j in order:
        if -negative < threshold:
            break
        if i not in used_boxes and j not in used_gold:
            used_boxes.add(i)
            used_gold.add(j)
            matches.append(-negative if boxes[i].label == gold[j].label else 0.0)
    return matches


def match_labels(
    boxes: Sequence[LabelledBox],
    gold: Sequence[LabelledBox],
    overlaps: Sequence[Sequence[float]],
    threshold: float,
) -> list[float]:
    """Return the overlaps of the task's boxes with the best box of their label that is left."""
    free = set(range(len(boxes)))
    matches: list[float] = []
    for j, other in enumerate(gold):
        candidates = [i for i in sorted(free) if boxes[i].label == other.label]
        best = max(candidates, key=lambda i: overlaps[i][j], default=None)
        if best is not None and overlaps[best][j] >= threshold:
            free.remove(best)
            matches.append(overlaps[best][j])
    return matches


def _compute_iou_score(
    matches: Sequence[float],
    boxes: Sequence[LabelledBox],
    gold: Sequence[LabelledBox],
    completeness: float,
) -> float:
    misses = (len(gold) - len(matches)) / len(gold)
    false_alarms = (len(boxes) - len(matches)) / len(boxes)
    is_complete = 1 - (misses + false_alarms) / 2
    return (1 - completeness) * sum(matches) / len(gold) + completeness * is_complete


def _compute_mean_precision(
    boxes: Sequence[LabelledBox],
    gold: Sequence[LabelledBox],
    overlaps: Sequence[Sequence[float]],
    threshold: float,
) -> float:
    """Return COCO's average precision at one overlap, the mean over the task's labels."""
    return fmean(
        _compute_precision(
            [
                [overlaps[i][j] for j, other in enumerate(gold) if other.label == label]
                for i, box in enumerate(boxes)
                if box.label == label
            ],
            sum(other.label == label for other in gold),
            threshold,
        )
        for label in dict.fromkeys(other.label for other in gold)
    )


def _compute_precision(overlaps: Sequence[Sequence[float]], n_gold: int, threshold: float) -> float:
    """Return the precision of one label's boxes, the mean over 101 recalls.

    Each box in turn is paired with the free box of the task with the largest overlap, the last of
    equals. The precision at a recall is the best of that recall and of higher ones.
    """
    free = set(range(n_gold))
    n_hits = 0
    hits_and_precisions: list[tuple[int, float]] = []
    for count, row in enumerate(overlaps, 1):
        best = max(sorted(free, reverse=True), key=lambda j: row[j], default=None)
        if best is not None and row[best] >= threshold:
            free.remove(best)
            n_hits += 1
        hits_and_precisions.append((n_hits, n_hits / count))
    return fmean(
        max(
            (value for hits, value in hits_and_precisions if hits / n_gold >= recall / 100),
            default=0.0,
        )
        for recall in range(101)
    )
