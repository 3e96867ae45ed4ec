from ratchet.config.key_paths import find_section, keys, leaf_keys
from ratchet.config.resolve import section_class
from ratchet.config.schema import STAGE_KEYS, RunConfig


def test_leaf_keys_are_every_key_that_holds_a_value():
    leaves = leaf_keys(RunConfig)
    assert len(leaves) == len(set(leaves))
    for key in (
        "seed",
        "model.overrides",
        "tokenizer[characters].alphabet",
        "stages.name",
        "stages.optimizer[adamw].betas",
        "stages.algorithm[grpo].group_size",
        "stages.algorithm[sft].train",
        "stages.environment[sorting].digits",
        "stages.rewards[countdown].weight",
        "stages.rewards[countdown].partial",
        "stages.learner[local].micro_batch_tokens",
    ):
        assert key in leaves
    assert not {
        "stages",
        "stages.optimizer",
        "stages.algorithm",
        "model",
        "stages.algorithm[grpo].kind",
    } & set(leaves)


def test_keys_are_shown_as_a_recipe_may_write_them():
    by_path = {key.path: key for key in keys(RunConfig)}
    key = by_path["stages.algorithm[grpo].advantage[rloo].scale"]
    assert (key.recipe_path, key.kinds) == ("algorithm.advantage.scale", "grpo, rloo")
    assert by_path["stages.optimizer[adamw].lr"].recipe_path == "optimizer.lr"


def test_every_leaf_is_described():
    for key in keys(RunConfig):
        if key.is_leaf:
            assert _describe(key.path), key.path


def test_a_field_with_another_default_keeps_the_description():
    assert section_class("algorithm", "rloo").describe_field("advantage") == "Advantage estimator."


def _describe(path):
    model, description = RunConfig, ""
    for part in path.split("."):
        name, _, kind = part.partition("[")
        field, description = model.model_fields[name], model.describe_field(name)
        if kind:
            slot = next(mark for mark in field.metadata if hasattr(mark, "is_list"))
            model = section_class(slot.name, kind.rstrip("]"))
        else:
            model = find_section(field.annotation) or model
    return description


def test_every_stage_key_but_its_name_can_stand_at_the_top():
    assert set(STAGE_KEYS) == {
        "algorithm", "environment", "rewards", "eval_rewards", "steps", "passes", "batch_size", "examples", "sampling", "optimizer",
        "learner", "generator", "evaluation", "checkpoint", "agent", "rollouts", "parity", "weight_sync", "lora", "curriculum",
        "sentinels",
    }  # fmt: skip
    assert not set(STAGE_KEYS) & set(RunConfig.model_fields)
