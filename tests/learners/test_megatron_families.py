"""A Megatron Core learner of families that the built-in decoder does not run computes what
transformers computes in one process."""

from functools import cache
from pathlib import Path

import pytest
import torch
from learners.megatron_cases import alone
from learners.ranks import run_ranks
from learners.spread_cases import VOCAB, assembled
from learners.test_megatron import KINDS, SEQUENCE, STEPS, by_case, check_alike
from learners.test_megatron_lora import ROUNDING
from models.conftest import reference as reference
from models.convert.cases import BASE, MODELS
from models.convert.conftest import save_reference
from safetensors.torch import load_file

from ratchet.commands.convert.dcp import DcpFiles
from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.config_json import ORIGINAL_CONTEXT
from ratchet.config.model_shape.lora_targets import ATTENTION, MLP
from ratchet.models.load import load_policy
from ratchet.models.lora.decoder import Adapter, merge_lazily
from ratchet.models.lora.files import load_adapter
from ratchet.models.weights.hf_weights import read_json

pytestmark = [pytest.mark.slow, pytest.mark.needs("megatron")]

DIVISIONS = {
    "tp2": SEQUENCE,
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
    "pp2": {"pipeline_parallel": 2, "recompute": "full"},
    "cp2": {"context_parallel": 2},
}
# Rotary embeddings of long contexts, and norms of latent states that have an epsilon of their own.
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, ORIGINAL_CONTEXT: 16}
LONG = {
    "gpt_oss": {"rope_parameters": {**YARN, "truncate": False}},
    "deepseek_v3": {
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        "rms_norm_eps": 1e-4,
    },
}
FAMILIES = ("qwen2_moe", "glm4_moe", "gpt_oss", "deepseek_v3")
VARIANTS = ("qwen2_moe-dense-first", "glm4_moe-plain-heads", "deepseek_v3-full-queries")
CASES = [
    *((f, d, k) for f in FAMILIES for d in ("tp2", "ep2", "pp2") for k in KINDS),
    *((f, d, "grpo") for f in VARIANTS for d in ("tp2", "ep2", "pp2")),
    *((f, "cp2", "grpo") for f in ("deepseek_v3", "gpt_oss")),
]
ADAPTED = {
    "qwen2_moe": (*ATTENTION, *MLP),
    "glm4_moe": ATTENTION,
    "gpt_oss": ATTENTION,
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "deepseek_v3-full-queries": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
}
PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def adapter_of(family):
    return Adapter(LoRAConfig(rank=2, alpha=4.0, target_modules=ADAPTED[family]), seed=5)


def adapter_of_experts(family, parameters=PARAMETERS):
    """Of GLM-4-MoE it is of experts alone."""
    modules = () if family == "glm4_moe" else ADAPTED[family]
    changes = {"target_modules": modules, "target_parameters": parameters}
    return Adapter(adapter_of(family).lora.model_copy(update=changes), seed=5)


@pytest.fixture(scope="module")
def directory(reference, tmp_path_factory):
    @cache
    def write(name):
        family, fields = MODELS[name]
        made = tmp_path_factory.mktemp(name)
        shape = {**BASE, "vocab_size": VOCAB}
        fields = {**fields, **LONG.get(name, {})}
        save_reference(reference(family, shape=shape, **fields), made)
        return str(made)

    return write


def run_cases(cases):
    """What each of two ranks found in each case."""
    return by_case(run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=900))


@pytest.fixture(scope="module")
def computed(directory):
    """By (family, division, kind): what each of two ranks found."""
    cases = [
        {"shape": directory(family), "kind": kind, "options": DIVISIONS[division]}
        for family, division, kind in CASES
    ]
    return dict(zip(CASES, run_cases(cases), strict=False))


@pytest.fixture(scope="module")
def expected(directory):
    return cache(lambda family, kind, adapter=None: alone(directory(family), kind, STEPS, adapter))


@pytest.mark.parametrize(("family", "division", "kind"), CASES)
def test_ranks_compute_what_transformers_does(computed, expected, family, division, kind):
    assert (family, division, kind) in computed, f"an earlier case failed: {list(computed)[-1]}"
    answers = [1] if division == "pp2" else [0, 1]
    check_alike(computed[family, division, kind], answers, expected(family, kind), kind)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_in_float64_ranks_agree_to_a_millionth(directory, family):
    """transformers computes norms in float32, whatever the weights are."""
    dtype = torch.float64
    cases = [
        {
            "shape": directory(family),
            "kind": "grpo",
            # Megatron's distributed optimizer takes no float64.
            "options": {**DIVISIONS[division], "distributed_optimizer": False},
            "dtype": dtype,
        }
        for division in ("tp2", "ep2", "pp2", "cp2")
    ]
    wanted = alone(directory(family), "grpo", STEPS, dtype=dtype)
    answering = ([0, 1], [0, 1], [1], [0, 1])
    for found, answers in zip(run_cases(cases), answering, strict=True):
        check_alike(found, answers, wanted, "grpo", rtol=1e-6)


def test_adapters_are_trained_as_pefts_are(directory, expected):
    names = {"glm4_moe": "tp2", "gpt_oss": "pp2", "deepseek_v3-full-queries": "ep2"}
    cases = [
        {"shape": directory(f), "kind": "grpo", "options": DIVISIONS[d], "adapter": adapter_of(f)}
        for f, d in names.items()
    ]
    for (family, division), found in zip(names.items(), run_cases(cases), strict=False):
        answers = [1] if division == "pp2" else [0, 1]
        wanted = expected(family, "grpo", adapter_of(family))
        check_alike(found, answers, wanted, "grpo", least=ROUNDING)


EXPERT_DIVISIONS = {
    "qwen2_moe": ("tp2", "ep2", "grpo"),
    "glm4_moe": ("ep2", "pp2", "sft"),
    "gpt_oss": ("tp2", "ep2", "grpo"),
    "deepseek_v3": ("pp2", "tp2", "sft"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_fused_experts_are_trained_as_pefts_are(directory, expected, tmp_path, family):
    """What two ranks saved goes on with the same bits, if offloaded too, and in another division."""
    first, then, kind = EXPERT_DIVISIONS[family]
    adapter = adapter_of_experts(family)

    def case(division, **more):
        common = {"shape": directory(family), "kind": kind, "adapter": adapter}
        return {**common, "options": DIVISIONS[division], **more}

    saved, exported = str(tmp_path / "saved"), tmp_path / "exported"
    cases = [
        case(first),
        case(first, steps=2, saved_to=saved),
        case(first, first=2, steps=1, loaded_from=saved, takes_turns=True),
        case(then, first=2, steps=1, loaded_from=saved, exported_to=str(exported)),
    ]
    results = run_cases(cases)
    wanted = expected(family, kind, adapter)
    for found, division, step in ((results[0], first, 0), (results[-1], then, 2)):
        answers = [1] if division == "pp2" else [0, 1]
        check_alike(found, answers, wanted, kind, first=step, least=ROUNDING)
    for unbroken, resumed in zip(results[0], results[2], strict=True):
        assert resumed[0] == unbroken[0][2:]
        pairs = zip(unbroken[1], resumed[1], strict=True)
        assert all(torch.equal(before[-1], after[-1]) for before, after in pairs)
    moved = [name for name in wanted[1] if ".experts." in name and ".lora_B." in name]
    assert moved
    assert all(wanted[1][name].any() for name in moved)
    assert all(".lora_" in name for name in DcpFiles(Path(saved) / "megatron").tensors)
    sent = assembled(results[-1])
    base = {name: weight for name, weight in sent.items() if ".lora_" not in name}
    low_rank = {name: weight for name, weight in sent.items() if name not in base}
    factors = load_policy(directory(family)).resolve_expert_factors(adapter.lora)
    merged = merge_lazily(base, low_rank, adapter.lora.scale, factors)
    for name, weight in load_policy(exported).canonical_weights():
        expected_weight = merged[name].to("cpu", torch.float32, copy=True)
        # Experts are multiplied together there, and one by one here.
        least = 1e-6 if name in factors else 0.0
        torch.testing.assert_close(weight, expected_weight, rtol=0, atol=least, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_adapters_of_fused_experts_agree_to_a_millionth(directory, family):
    """An adapter of gate_up_proj without down_proj, on which peft nests no layer."""
    adapter = adapter_of_experts(family, PARAMETERS[:1])
    dtype, divisions = torch.float64, tuple(DIVISIONS) if family == "gpt_oss" else ("ep2",)
    cases = [
        {
            "shape": directory(family),
            "kind": "grpo",
            "options": {**DIVISIONS[division], "distributed_optimizer": False},
            "adapter": adapter,
            "dtype": dtype,
        }
        for division in divisions
    ]
    wanted = alone(directory(family), "grpo", STEPS, adapter, dtype=dtype)
    assert not any(".experts.base_layer." in name for name in wanted[1])
    for found, division in zip(run_cases(cases), divisions, strict=True):
        answers = [1] if division == "pp2" else [0, 1]
        # transformers computes norms in float32, and B begins at 0.
        check_alike(found, answers, wanted, "grpo", rtol=1e-6, least=1e-7)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt_oss", {"data_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2}),
        ("glm4_moe", {"data_parallel": 4, "expert_parallel": 2}),
    ],
)
def test_fused_experts_rest_beside_their_adapter(directory, tmp_path, family, options):
    """And four ranks export what one process reads."""
    adapter = adapter_of_experts(family)
    results = run_ranks(
        4, "learners.megatron_cases:apart", directory(family), options, adapter, tmp_path
    )
    for base, off, on, first in filter(None, results):
        assert torch.equal(base, off)
        assert torch.equal(base, first)
        assert not torch.equal(base, on)
    stored = load_adapter(tmp_path / "adapter")
    assert set(stored.adapter.lora.target_parameters) == set(PARAMETERS)
    policy = load_policy(tmp_path / "base")
    start = dict(load_policy(directory(family)).canonical_weights())
    assert all(torch.equal(weight, start[name]) for name, weight in policy.canonical_weights())
    policy.attach(adapter)
    weights = dict(policy.adapter_weights())
    assert weights.keys() == stored.weights.keys()
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(stored.weights[name])
    merged = policy.merged_weights()
    for name, weight in load_policy(tmp_path / "all").canonical_weights():
        expected_weight = merged[name].to("cpu", torch.float32, copy=True)
        torch.testing.assert_close(weight, expected_weight, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_tp2_saved_goes_on_at_ep2_and_is_exported(directory, expected, tmp_path, family):
    def case(division, **more):
        options = DIVISIONS[division]
        return {"shape": directory(family), "kind": "grpo", "options": options, **more}

    saved, exported = str(tmp_path / "saved"), tmp_path / "exported"
    cases = [
        case("tp2", steps=2, saved_to=saved),
        case("ep2", first=2, steps=1, loaded_from=saved, exported_to=str(exported)),
    ]
    results = run_cases(cases)
    check_alike(results[-1], [0, 1], expected(family, "grpo"), "grpo", first=2)
    sent = assembled(results[-1])
    for name, weight in load_policy(exported).canonical_weights():
        assert torch.equal(weight, sent[name]), name
    assert read_json(exported / "config.json")["model_type"] == family
    start = load_file(f"{directory(family)}/model.safetensors")
    written = load_file(exported / "model.safetensors")
    assert written.keys() == start.keys()
    for name in (name for name in start if name.endswith("e_score_correction_bias")):
        assert torch.equal(written[name], start[name])
