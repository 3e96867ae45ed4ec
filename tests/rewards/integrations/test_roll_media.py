"""ROLL's rewards for boxes in pictures and for questions about videos."""

import asyncio
import json
import random
from statistics import fmean

import pytest
from oracles import detection as oracle
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.rewards.answers.bounding_box import Box
from ratchet.rewards.integrations.roll_detection import (
    COCO_THRESHOLDS,
    IOU_THRESHOLDS,
    LabelledBox,
    compute_scores,
)
from ratchet.testing import answered
from ratchet.types import Failed, Message, Task


def judged(kind, text, answer, meta=None, **keys):
    task = Task("t/0", (Message("user", "?"),), answer=answer, meta=meta or {})
    reward = build(resolve("rewards", {"kind": kind, **keys}))
    return asyncio.run(reward.score([answered(task, text)], task))[0]


def draw(number, count):
    boxes = {}
    for _ in range(count):
        left, top = number.randrange(8), number.randrange(8)
        box = (left, top, left + number.randrange(3, 9), top + number.randrange(3, 9))
        boxes[box] = number.choice("ab")
    return [(label, box) for box, label in boxes.items()]


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_those_of_the_definitions(seed):
    number = random.Random(seed)
    gold = draw(number, number.randrange(1, 5))
    boxes = [gold[0], *(pair for pair in draw(number, 3) if pair[1] != gold[0][1])]
    number.shuffle(boxes)
    lists = [
        [LabelledBox(name, Box(*map(float, box))) for name, box in pairs] for pairs in (boxes, gold)
    ]
    scores = compute_scores(lists[0], lists[1], None, 0.3)
    overlaps = (scores["iou_max_iou_first"], scores["iou_max_label_first"])
    for score, match in zip(overlaps, (oracle.largest_pairs, oracle.label_pairs), strict=True):
        expected = fmean(
            oracle.overlap_score(match(boxes, gold, threshold), len(boxes), len(gold), 0.3)
            for threshold in IOU_THRESHOLDS
        )
        assert score == pytest.approx(expected, abs=1e-12)
    precisions = [oracle.average_precision(boxes, gold, value) for value in COCO_THRESHOLDS]
    assert scores["map"] == pytest.approx(fmean(precisions), abs=1e-12)
    assert (scores["map50"], scores["map75"]) == pytest.approx((precisions[0], precisions[5]))


def entry(label, *corners):
    return {"bbox_2d": list(corners), "label": label}


def tagged(boxes):
    return f"<think>hm</think>\n<answer>\n{boxes}\n</answer>"


GOLD = json.dumps([entry("Cat", 0, 0, 10, 10), entry("dog", 20, 20, 30, 40)])
CAT, DOG = entry("cat", 0, 0, 10, 10), entry("dog", 20, 20, 30, 40)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (tagged(json.dumps([CAT, DOG])), 1.0),
        (tagged([DOG, CAT]), 1.0),  # single quotes, another order
        (tagged(json.dumps([CAT, entry("dog's toy", 0, 0, 9, 9)])), (0.5 + 0.1) / 1.1),
        (tagged(json.dumps([CAT, DOG]).replace("cat", r"c\at")), 1.0),
        (tagged(json.dumps([CAT, DOG, CAT])), 1.0),  # a position counts once
        (tagged(json.dumps([CAT, DOG])[:-1] + ',{"bbox_2d": [1'), 1.0),  # a cut box
        (f"<answer>{json.dumps([CAT, DOG])}</answer>", 1 / 1.1),  # without line ends
        (tagged(json.dumps([CAT])), (0.6 * 0.5 + 0.1) / 1.1),
        (tagged(json.dumps([CAT, {**DOG, "label": "cow"}])), (0.5 + 0.1) / 1.1),
        (tagged(json.dumps([CAT, {**DOG, "bbox_2d": [30, 40, 20, 20]}])), (0.6 * 0.5 + 0.1) / 1.1),
        (json.dumps([CAT, DOG]), 0.0),
        (tagged("[]"), 0.0),
        (tagged("{" * 10_000), 0.0),
        (tagged('[{"bbox_2d": [0, 0, 1e999, 1], "label": "cat"}]'), 0.0),
        (tagged(json.dumps([entry("cat", n, 0, n + 1, 1) for n in range(101)])), 0.1 / 1.1),
    ],
)  # fmt: skip
def test_boxes_earn_by_overlap_label_number_and_form(text, reward):
    assert judged("detection", text, GOLD).reward == pytest.approx(reward)


def test_a_row_brings_its_own_ratios_and_units():
    ratios = {"iou_max_iou_first": None, "map50": 0.5, "iou_completeness": 0.2}
    row = {
        "ground_truth": f"<answer>\n{GOLD}\n</answer>",
        "format_ratio": 0.25,
        "accuracy_ratio": 0.75,
        "verifier_parm": {"det_reward_ratio": ratios},
    }
    outcome = judged("detection", tagged(json.dumps([CAT, DOG])), None, {"reward_model": row})
    assert (outcome.reward, outcome.parts["iou_max_iou_first"]) == (1.0, 1.0)
    outcome = judged("detection", f"<answer>{[CAT]}</answer>", None, {"reward_model": row})
    assert outcome.reward == pytest.approx(0.75 * 0.6 * 0.5)
    assert outcome.parts["iou_max_iou_first"] == pytest.approx(0.6 * (0.8 * 0.5 + 0.2 * 0.75))
    apostrophe = [entry("the dog's toy", 0, 0, 10, 10)]
    row = {"ground_truth": json.dumps(apostrophe), "format_ratio": None, "accuracy_ratio": None}
    meta = {"reward_model": row}
    answer = f"<answer>{json.dumps(apostrophe)}</answer>"
    assert judged("detection", answer, None, meta, format_weight=3).reward == 0.25
    pixels = tagged(json.dumps([entry("cat", 0, 0, 2, 4), entry("dog", 4, 8, 6, 16)]))
    size = {"width": 200, "height": 400}
    assert judged("detection", pixels, GOLD, size, answer_units="pixels").reward == 1.0
    for answer, meta, why in (
        ("4", {}, "is no list of"),
        (json.dumps([entry("cat", 5, 5, 5, 5)]), {}, "with an area"),
        (GOLD, {"reward_model": json.dumps({"format_ratio": 0.5})}, "must be an object"),
        (GOLD, {"reward_model": {"format_ratio": 2}}, "format_ratio=2 must be"),
        (GOLD, {"reward_model": {"format_ratio": True}}, "format_ratio=True must be"),
        (GOLD, {"reward_model": {"ground_truth": GOLD, "verifier_parm": {"det_reward_ratio": {}}}}, "are all 0"),
    ):  # fmt: skip
        failed = judged("detection", pixels, answer, meta)
        assert isinstance(failed, Failed)
        assert why in failed.detail
    with pytest.raises(ValidationError, match="one of them above 0"):
        resolve("rewards", {"kind": "detection", "weights": {"map": 0}})


@pytest.mark.parametrize(
    ("kind", "answer", "gold", "accuracy"),
    [
        ("multiple choice", "<answer> B. tea </answer>", "<answer>B</answer>", 1.0),
        ("multiple choice", r"so \boxed{A}, no \boxed{B}", "B", 1.0),
        ("multiple choice", "A", "B", 0.0),
        ("free-form", "The cat sat", "the cat sat.", 1.0),
        # 3 of 4 and 3 words, 2 of 3 and 2 pairs, a common subsequence of 3
        ("free-form", "the cat sat down", "the cat sat", (6 / 7 + 4 / 5 + 6 / 7) / 3),
        ("free-form", "", "the cat", 0.0),
        ("numerical", "<answer>1,000</answer>", "1000.0", 1.0),
        ("numerical", "3.14159", "3.14", 1.0),
        ("numerical", "3", "3.0", 0.0),
        ("numerical", "three", "3", 0.0),
        ("OCR", "a b c", "a x c d", 0.5),
        ("OCR", "a a a a", "a", 0.0),
        ("regression", "9", "10", 0.9),
        ("regression", "30", "10", 0.0),
        ("regression", "about 9", "10", 0.0),
        ("regression", "nan", "10", 0.0),
    ],
)
def test_answers_about_videos_are_judged_by_their_kind(kind, answer, gold, accuracy):
    outcome = judged("video_r1", answer, gold, {"reward_model": kind})
    assert outcome.reward == pytest.approx(accuracy)
    assert outcome.parts["format"] == 0.0
    if answer.startswith("<answer>"):
        whole = judged("video_r1", f"<think>hm</think>\n{answer}", gold, {"reward_model": kind})
        assert whole.reward == pytest.approx(accuracy + 1)


def test_an_unknown_kind_of_question_fails_the_attempt():
    outcome = judged("video_r1", "B", "B", {"reward_model": "riddle"})
    assert isinstance(outcome, Failed)
    assert "must be one of multiple choice, free-form" in outcome.detail
    for blank in (None, " "):
        assert "has no answer" in judged("video_r1", "", blank, {"reward_model": "OCR"}).detail


@pytest.mark.parametrize(
    ("kind", "gold"),
    [
        ("multiple choice", "<answer>.</answer>"),
        ("multiple choice", "(A)"),  # "(B)" has the same first character
        ("free-form", "\u732b"),
        ("numerical", "three"),
        ("regression", "about 9"),
        ("regression", "0"),
    ],
)
def test_a_task_whose_own_answer_earns_nothing_fails_the_attempt(kind, gold):
    outcome = judged("video_r1", gold, gold, {"reward_model": kind})
    assert isinstance(outcome, Failed)
    assert f"can't be judged as {kind}" in outcome.detail


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" + " " * 300_000,
        "<answer>" * 30_000,
        "\\boxed{" * 30_000,
        "<think>" + "</think><answer>" * 15_000 + "</answer>." * 15_000,
    ],
    ids=["spaces", "open_tags", "open_boxes", "many_tags"],
)
def test_the_time_of_judging_is_linear_in_a_hostile_text(text):
    """A pattern that backtracks would take minutes to hours here."""
    assert judged("video_r1", text, "B", {"reward_model": "multiple choice"}).reward == 0.0
    assert judged("detection", text, GOLD).reward == 0.0
