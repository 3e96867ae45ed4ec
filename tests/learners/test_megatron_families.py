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


def adapter_of(family):
    return Adapter(LoRAConfig(rank=2, alpha=4.0, target_modules=ADAPTED[family]), seed=5)


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
    divisions = ("tp2", "ep2", "pp2", "tp2", "ep2")
    names = list(zip(ADAPTED, divisions, ("grpo", "sft") * 3, strict=False))
    cases = [
        {"shape": directory(f), "kind": k, "options": DIVISIONS[d], "adapter": adapter_of(f)}
        for f, d, k in names
    ]
    for (family, division, kind), found in zip(names, run_cases(cases), strict=False):
        answers = [1] if division == "pp2" else [0, 1]
        wanted = expected(family, kind, adapter_of(family))
        check_alike(found, answers, wanted, kind, least=ROUNDING)


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


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_an_adapter_that_tp2_saved_goes_on_at_pp2_and_is_merged(
    directory, expected, tmp_path, family
):
    adapter = adapter_of(family)

    def case(division, **more):
        options = DIVISIONS[division]
        return {
            "shape": directory(family),
            "kind": "grpo",
            "options": options,
            "adapter": adapter,
            **more,
        }

    saved, exported = str(tmp_path / "saved"), tmp_path / "exported"
    cases = [
        case("tp2", steps=2, saved_to=saved),
        case("pp2", first=2, steps=1, loaded_from=saved, exported_to=str(exported)),
    ]
    results = run_cases(cases)
    wanted = expected(family, "grpo", adapter)
    check_alike(results[-1], [1], wanted, "grpo", first=2, least=ROUNDING)
    assert all(".lora_" in name for name in DcpFiles(Path(saved) / "megatron").tensors)
    sent = assembled(results[-1])
    low_rank = {name: weight for name, weight in sent.items() if ".lora_" in name}
    base = {name: weight for name, weight in sent.items() if name not in low_rank}
    merged = merge_lazily(base, low_rank, adapter.lora.scale)
    for name, weight in load_policy(exported).canonical_weights():
        assert torch.equal(weight, merged[name].to("cpu", torch.float32, copy=True)), name
