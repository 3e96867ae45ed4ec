"""What ratchet/recipes/shapes.yaml states, in its first half: pictures are learned from examples,
better from reward alone, and none of it blindly. test_rotating.py runs it whole."""

import json

import pytest
from recipes.daily import seed_of_today

from ratchet.commands.eval import evaluate_target
from ratchet.commands.eval_setup import EvaluationSettings
from ratchet.evals.results import EvalResults
from ratchet.testing.tiny_vlm import SHAPES, write_tiny_vlm
from ratchet.training.start import start_run

pytestmark = [pytest.mark.slow, pytest.mark.needs("PIL")]
KEYS = ("questions=[colour,shape]", "things=[1,2]")  # as in the recipe


def accuracy(run, place, *words):
    evaluate_target(
        str(run),
        EvaluationSettings(on="shapes", overrides=(*KEYS, *words), tasks=512, samples=0),
        out=place,
    )
    greedy = [attempt.reward for attempt in EvalResults.read(place).accuracy_attempts]
    return sum(reward == 1.0 for reward in greedy) / len(greedy)


def test_pictures_are_looked_at_and_reward_teaches_more_than_examples_did(repository, tmp_path):
    seed = seed_of_today(2)
    model, run = write_tiny_vlm(tmp_path / "model", SHAPES), tmp_path / "run"
    overrides = [
        f"seed={seed}",
        f"model.path={model}",
        "logging.progress=off",
        "stages.grpo.steps=70",
        "evaluation.every=0",
    ]
    assert (
        start_run(repository / "ratchet/recipes/shapes.yaml", overrides, run, command="test") == 0
    )
    sft, grpo = json.loads((run / "summary.json").read_text())["stages"]
    blind = accuracy(run, tmp_path / "blind", "shuffled=true")
    assert accuracy(run, tmp_path / "seeing") == pytest.approx(grpo["accuracy_after"])
    assert sft["accuracy_after"] > blind + 0.1
    assert grpo["accuracy_after"] > sft["accuracy_after"] + 0.05
