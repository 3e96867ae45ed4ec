"""A run takes the same steps whether its learner is Megatron Core's or Ratchet's own."""

import pytest
from recipes.test_generator_workers import RANKS, config, metrics_of

from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.local import LocalExecutor

pytestmark = [pytest.mark.slow, pytest.mark.needs("megatron")]
MEGATRON = {"kind": "megatron", "micro_batch_tokens": 64}


@pytest.fixture(scope="module")
def executor():
    made = LocalExecutor(LocalClusterConfig(), threads=1, device="cpu")
    yield made
    made.close()


def test_a_run_with_pushes_to_the_engine_is_that_of_another_learner(executor, tmp_path):
    """Its parity gate compares engine and learner after every push."""
    wanted = metrics_of(config(**RANKS), executor, tmp_path / "dtensor")
    for options in ({"data_parallel": 2, "overlap_gradients": True}, {"tensor_parallel": 2}):
        found = metrics_of(config(learner={**MEGATRON, **options}), executor, tmp_path / "megatron")
        assert_alike(found, wanted)


@pytest.mark.needs("peft")
def test_adapters_are_trained_and_pushed_as_those_of_another_learner_are(executor, tmp_path):
    def metrics(learner, place):
        settings = config(learner=learner, lora={"rank": 4, "alpha": 8.0})
        # a stage with an adapter is the last
        grpo = settings.model_copy(update={"stages": settings.stages[1:]})
        return metrics_of(grpo, executor, tmp_path / place)

    found = metrics({**MEGATRON, "tensor_parallel": 2, "sequence_parallel": True}, "megatron")
    assert_alike(found, metrics(RANKS["learner"], "dtensor"))
    assert found[0]["policy/trainable_share"] < 0.3


def assert_alike(found, wanted):
    for mine, other in zip(found, wanted, strict=True):
        assert mine.keys() == other.keys()
        assert {
            k: v for k, v in mine.items() if "loss" in k or k.endswith("grad_norm")
        } == pytest.approx(
            {k: v for k, v in other.items() if "loss" in k or k.endswith("grad_norm")},
            rel=1e-3,
            abs=1e-5,
        )
