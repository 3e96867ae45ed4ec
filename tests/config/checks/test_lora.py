"""Recipes whose `lora` can't be: each is refused when it is read, with what to change."""

import pytest

from ratchet.config.loader import load_config
from ratchet.errors import ConfigError

RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: sorting}
algorithm: {kind: grpo}
lora: {rank: 4}
"""
REFUSED = {
    "lora.rank=0": "lora.rank: 0 must be at least 1",
    "lora.dropout=1": "lora.dropout: 1 must be less than 1",
    "lora.init=pissa": "lora.init: 'pissa' must be 'kaiming' or 'gaussian'",
    "lora.target_modules=[q_prj]": "no linear layer of the model is called 'q_prj'; did you "
    "mean 'q_proj'?",
    "lora.target_modules=[]": "target_modules=[] leaves nothing to adapt",
    "lora.target_parameters=[mlp.experts.down_proj]": "own decoder, which this model has, fuses none",
    "lora.alfa=3": "lora.alfa: unknown key; did you mean 'alpha'?",
    "lora.target_modules=[w1]": "no linear layer of the model is called 'w1'",
    "generator={kind: vllm}": "lora.rank=4 is more than generator.lora_rank=0",
    "generator={kind: workers, worker: {kind: vllm, lora_rank: 2}}": "lora.rank=4 is more than "
    "generator.worker.lora_rank=2",
}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("override", REFUSED)
@pytest.mark.fault("C6")
def test_what_cannot_be_is_refused_when_the_recipe_is_read(override, recipe):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [override])
    assert REFUSED[override] in str(caught.value)


@pytest.mark.parametrize("kind", ["dtensor", "megatron"])
def test_pipeline_stages_have_adapters(kind, recipe):
    learner = f"learner={{kind: {kind}, tensor_parallel: 2, pipeline_parallel: 2}}"
    assert load_config(recipe, [learner]).stages[0].lora.rank == 4
    load_config(recipe, [learner, "learner.sequence_parallel=true", "model.preset=tiny-moe"])


@pytest.mark.parametrize(
    "learner", ["{kind: dtensor, dp_shard: 2", "{kind: megatron, data_parallel: 2"]
)
def test_dropout_before_divided_experts_is_refused(learner, recipe):
    spread = [f"learner={learner}, expert_parallel: 2}}", "model.preset=tiny-moe"]
    load_config(recipe, spread)
    load_config(recipe, [*spread, "lora.dropout=0.1", "lora.target_modules=[q_proj, o_proj]"])
    with pytest.raises(ConfigError, match=r"Set lora\.dropout=0, or leave the experts out of"):
        load_config(recipe, [*spread, "lora.dropout=0.1"])


@pytest.fixture
def transformers_recipe(recipe):
    text = RECIPE.replace("preset: tiny", "path: some/model, backend: transformers")
    recipe.write_text(text.replace("characters", "bytes"))
    return recipe


def test_what_fused_experts_can_have(transformers_recipe):
    fused = ["generator={kind: hf}", "lora.target_parameters=[mlp.experts.down_proj]"]
    for override in (
        "learner={kind: local}",
        "learner={kind: dtensor, dp_shard: 2, tensor_parallel: 2, expert_parallel: 2}",
        "generator={kind: vllm, lora_rank: 8}",
    ):
        lora = load_config(transformers_recipe, [*fused, override]).stages[0].lora
        assert lora.target_parameters == ("mlp.experts.down_proj",)
    load_config(transformers_recipe, ["lora.dropout=0.1"])
    message = r"lora\.dropout=0\.1 would drop inputs of linear layers alone\. Set 0"
    with pytest.raises(ConfigError, match=message):
        load_config(transformers_recipe, [*fused, "lora.dropout=0.1"])


def test_transformers_model_is_adapted_by_dtensor(transformers_recipe):
    learner = ["learner={kind: dtensor, dp_shard: 2}"]
    assert load_config(transformers_recipe, learner).stages[0].lora.rank == 4


STAGES = "stages: [{name: a, algorithm: {kind: sft}}, {name: b}]"


@pytest.mark.parametrize(
    "places",
    ["learner={kind: dtensor, dp_shard: 2}", "generator={kind: workers, worker: {kind: engine}}"],
)
def test_an_adapter_in_other_processes_is_that_of_the_last_stage(places, recipe):
    recipe.write_text(f"{RECIPE}{STAGES}")
    load_config(recipe)
    load_config(recipe, [places, "stages.a.lora=null"])
    with pytest.raises(ConfigError, match="stage a has lora and is not the last"):
        load_config(recipe, [places])


def test_defaults_adapt_every_map(recipe):
    lora = load_config(recipe).stages[0].lora
    assert lora.target_modules == "all-linear"
    assert lora.scale == 8.0
    assert load_config(recipe, ["lora.rslora=true"]).stages[0].lora.scale == 16.0
    assert load_config(recipe, ["lora.target_modules=[q_proj, v_proj]"]).stages[
        0
    ].lora.target_modules == ("q_proj", "v_proj")
