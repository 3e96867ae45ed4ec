"""A run of a model that transformers runs takes the same steps whether its learner is Megatron
Core's or FSDP2's."""

import pytest
from models.conftest import reference as reference
from models.convert.cases import BASE, MODELS
from models.convert.conftest import save_reference
from recipes.test_generator_workers import GRPO, RANKS, RECIPE, STAGE, metrics_of
from recipes.test_megatron import MEGATRON, assert_alike
from recipes.test_megatron import executor as executor

from ratchet.config.schema import RunConfig
from ratchet.executors.freeze import freeze

pytestmark = [pytest.mark.slow, pytest.mark.needs("megatron")]
RANKS_WITH_EXPERTS = {**MEGATRON, "data_parallel": 2, "expert_parallel": 2}


LORA = {"rank": 2, "target_modules": ["q_b_proj", "kv_b_proj", "o_proj"]}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("qwen2_moe", {}),
        ("glm4_moe", {}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {"lora": {"rank": 2, **EXPERTS}}),
        ("deepseek_v3", {"lora": LORA}),
    ],
    ids=str,
)
def test_weights_are_pushed_under_the_names_that_transformers_gives_them(
    executor, reference, tmp_path, name, adapter
):
    family, fields = MODELS[name]
    save_reference(reference(family, shape=BASE, **fields), tmp_path / "model")
    recipe = {**RECIPE, "model": {"path": str(tmp_path / "model")}}

    def metrics(learner, place):
        stage = {**STAGE, **GRPO, "steps": 2, "learner": learner, "generator": {"kind": "hf"}}
        stage |= adapter
        settings = freeze(RunConfig.model_validate({**recipe, "stages": [stage]}))
        return metrics_of(settings, executor, tmp_path / place)

    wanted = metrics(RANKS["learner"], "dtensor")
    assert_alike(metrics(RANKS_WITH_EXPERTS, "megatron"), wanted)
