"""A Megatron Core learner of families that the built-in decoder does not run computes what
transformers computes in one process."""

from functools import cache

import pytest
import torch
from learners.megatron_cases import alone
from learners.ranks import run_ranks
from learners.spread_cases import VOCAB, assembled
from learners.test_megatron import KINDS, SEQUENCE, STEPS, by_case, check_alike
from models.conftest import reference as reference
from models.convert.cases import BASE, MODELS
from models.convert.conftest import save_reference
from safetensors.torch import load_file

from ratchet.models.load import load_policy
from ratchet.models.weights.hf_weights import read_json

pytestmark = [pytest.mark.slow, pytest.mark.needs("megatron")]

DIVISIONS = {
    "tp2": SEQUENCE,
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
    "pp2": {"pipeline_parallel": 2, "recompute": "full"},
}
FAMILIES = ("qwen2_moe", "qwen2_moe-dense-first", "glm4_moe", "glm4_moe-plain-heads")


@pytest.fixture(scope="module")
def directory(reference, tmp_path_factory):
    @cache
    def write(name):
        family, fields = MODELS[name]
        made = tmp_path_factory.mktemp(name)
        save_reference(reference(family, shape={**BASE, "vocab_size": VOCAB}, **fields), made)
        return str(made)

    return write


@pytest.fixture(scope="module")
def computed(directory):
    """By (family, division, kind): what each of two ranks found."""
    names = [(f, d, k) for f in FAMILIES for d in DIVISIONS for k in KINDS]
    cases = [
        {"shape": directory(family), "kind": kind, "options": DIVISIONS[division]}
        for family, division, kind in names
    ]
    results = by_case(run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=900))
    return dict(zip(names, results, strict=False))


@pytest.fixture(scope="module")
def expected(directory):
    return cache(lambda family, kind: alone(directory(family), kind, STEPS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_transformers_does(computed, expected, family, division, kind):
    assert (family, division, kind) in computed, f"an earlier case failed: {list(computed)[-1]}"
    answers = [1] if division == "pp2" else [0, 1]
    check_alike(computed[family, division, kind], answers, expected(family, kind), kind)


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe"])
def test_what_tp2_saved_goes_on_at_ep2_and_is_exported(directory, expected, tmp_path, family):
    def case(division, **more):
        options = DIVISIONS[division]
        return {"shape": directory(family), "kind": "grpo", "options": options, **more}

    saved, exported = str(tmp_path / "saved"), tmp_path / "exported"
    cases = [
        case("tp2", steps=2, saved_to=saved),
        case("ep2", first=2, steps=1, loaded_from=saved, exported_to=str(exported)),
    ]
    results = by_case(run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=600))
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
