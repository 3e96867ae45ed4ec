import pytest

from ratchet.learners.optim.schedule import compute_lr_factor


def factors(schedule, steps, **options):
    return [compute_lr_factor(step, schedule=schedule, **options) for step in steps]


def test_warmup_then_constant():
    options = {"total": 10, "warmup": 4, "min_ratio": 0.0}
    assert factors("constant", range(6), **options) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_by_hand():
    options = {"total": 10, "warmup": 0, "min_ratio": 0.1}
    assert factors("linear", [0, 5, 10, 99], **options) == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_cosine_by_hand():
    options = {"total": 12, "warmup": 2, "min_ratio": 0.0}
    assert factors("cosine", [0, 1, 2, 7, 12], **options) == pytest.approx(
        [0.5, 1.0, 1.0, 0.5, 0.0]
    )


def test_wsd_is_flat_and_then_the_chord():
    options = {"total": 20, "warmup": 4, "min_ratio": 0.2, "decay": 5}
    expected = [min((step + 1) / 4, 1.0, 0.2 + 0.8 * (20 - step) / 5) for step in range(20)]
    assert factors("wsd", range(20), **options) == pytest.approx(expected)
    assert factors("wsd", [15, 16, 19, 20, 99], **options) == pytest.approx(
        [1.0, 0.84, 0.36, 0.2, 0.2]
    )


def test_wsd_that_decays_from_the_warm_up_on_is_linear():
    options = {"total": 9, "warmup": 2, "min_ratio": 0.1}
    assert factors("wsd", range(9), decay=7, **options) == factors("linear", range(9), **options)
    # a shorter stage of a role
    assert factors("wsd", range(9), decay=50, **options) == factors("linear", range(9), **options)
