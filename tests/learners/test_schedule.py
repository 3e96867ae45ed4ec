import pytest

from ratchet.learners.schedule import lr_factor


def factors(schedule, steps, **options):
    return [lr_factor(step, schedule=schedule, **options) for step in steps]


def test_warmup_then_constant():
    options = {"total": 10, "warmup": 4, "min_ratio": 0.0}
    assert factors("constant", range(6), **options) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_by_hand():
    options = {"total": 10, "warmup": 0, "min_ratio": 0.1}
    assert factors("linear", [0, 5, 10, 99], **options) == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_cosine_by_hand():
    options = {"total": 12, "warmup": 2, "min_ratio": 0.0}
    assert factors("cosine", [0, 1, 2, 7, 12], **options) == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
