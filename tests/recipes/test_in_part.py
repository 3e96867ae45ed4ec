"""What recipes and pages state, in the first part of long runs, which take turns by the day;
test_rotating.py runs them whole."""

import json

import pytest
from recipes.daily import seed_of_today
from support.rotation import todays

from ratchet.commands.eval import evaluate_target
from ratchet.commands.eval_setup import EvaluationSettings
from ratchet.evals.results import EvalResults
from ratchet.recipes import RECIPES_DIR
from ratchet.testing.tiny_vlm import SHAPES, write_tiny_vlm
from ratchet.training.start import start_run

KEYS = ("questions=[colour,shape]", "things=[1,2]")  # as in the recipe
SHORTER = ["logging.progress=off", "stages.grpo.steps=70", "evaluation.every=0"]


def accuracy(run, place, *words):
    evaluate_target(
        str(run),
        EvaluationSettings(on="shapes", overrides=(*KEYS, *words), tasks=512, samples=0),
        out=place,
    )
    greedy = [attempt.reward for attempt in EvalResults.read(place).accuracy_attempts]
    return sum(reward == 1.0 for reward in greedy) / len(greedy)


def check_shapes(folder):
    """Pictures are learned from examples, better from reward alone, and none of it blindly."""
    seed = seed_of_today(4) // 2  # its turn comes every second day
    model, run = write_tiny_vlm(folder / "model", SHAPES), folder / "run"
    overrides = [f"seed={seed}", f"model.path={model}", *SHORTER]
    assert start_run(RECIPES_DIR / "shapes.yaml", overrides, run, command="test") == 0
    sft, grpo = json.loads((run / "summary.json").read_text())["stages"]
    blind = accuracy(run, folder / "blind", "shuffled=true")
    assert accuracy(run, folder / "seeing") == pytest.approx(grpo["accuracy_after"])
    assert sft["accuracy_after"] > blind + 0.1
    assert grpo["accuracy_after"] > sft["accuracy_after"] + 0.05


def check_asynchronous(folder):
    """Attempts of weights that are up to four steps old teach, with a correction
    (docs/asynchronous.md)."""
    run = folder / "run"
    overrides = [f"seed={seed_of_today(3)}", *SHORTER]
    assert start_run(RECIPES_DIR / "asynchronous.yaml", overrides, run, command="test") == 0
    _, grpo = json.loads((run / "summary.json").read_text())["stages"]
    assert grpo["accuracy_after"] > grpo["accuracy_before"] + 0.2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    staleness = [row.get("rollout/staleness_max", 0) for row in rows if "rollout/reward" in row]
    assert max(staleness) == 4
    assert sum(behind > 0 for behind in staleness) > len(staleness) / 2


CHECKS = {"shapes": check_shapes, "asynchronous": check_asynchronous}


@pytest.mark.slow
@pytest.mark.needs("PIL")
@pytest.mark.parametrize("name", todays([*CHECKS], 1))
def test_the_first_part_of_a_recipe(name, tmp_path):
    CHECKS[name](tmp_path)
