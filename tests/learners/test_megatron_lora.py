"""An adapter on Megatron's layers: what one process makes of it, whatever divides the base below
it."""

from functools import cache

import pytest
import torch
from learners.megatron_cases import SEED, SHAPES, alone
from learners.ranks import run_ranks
from learners.spread_cases import assembled
from learners.test_megatron import SEQUENCE, by_case, check_alike, world

from ratchet.commands.convert.dcp import DcpFiles
from ratchet.config.lora import LoRAConfig
from ratchet.models.load import init_policy, load_policy
from ratchet.models.lora.decoder import Adapter, merge_lazily
from ratchet.models.lora.files import load_adapter
from ratchet.models.weights.weight_layout import PEFT_PREFIX

pytestmark = [pytest.mark.slow, pytest.mark.needs("megatron")]

STEPS = 3
EVERY = Adapter(LoRAConfig(rank=2, alpha=4.0), seed=5)
SOME = Adapter(
    LoRAConfig(
        rank=3, alpha=4.0, target_modules=("q_proj", "v_proj", "o_proj", "up_proj"), rslora=True
    ),
    seed=5,
)
ATTENTION = Adapter(
    LoRAConfig(rank=3, alpha=4.0, target_modules=("q_proj", "k_proj", "o_proj")), seed=5
)
MLPS = Adapter(LoRAConfig(rank=2, alpha=4.0, target_modules=("gate_proj", "down_proj")), seed=5)
CASES = {
    "dp2": ("tied", {"data_parallel": 2, "overlap_gradients": True}, EVERY),
    "tp2": ("tied", {"tensor_parallel": 2}, EVERY),
    "tp2 sequence": ("untied", {**SEQUENCE, "recompute": "full"}, SOME),
    "pp2": ("tied", {"pipeline_parallel": 2, "recompute": "full"}, SOME),
    "pp2 interleaved": ("untied", {"pipeline_parallel": 2, "pipeline_chunks": 2}, EVERY),
    "experts pp2": ("sparse", {"pipeline_parallel": 2}, MLPS),
    "cp2": ("tied", {"context_parallel": 2}, SOME),
    "sparse tp2": ("sparse", SEQUENCE, ATTENTION),
    "experts ep2": ("sparse", {"data_parallel": 2, "expert_parallel": 2}, EVERY),
    "experts tp2": ("sparse", {**SEQUENCE, "recompute": "full"}, EVERY),
    "experts ep2 of dp4": ("sparse", {"data_parallel": 4, "expert_parallel": 2}, EVERY),
    "tp2 x pp2": ("tied", {**SEQUENCE, "pipeline_parallel": 2}, EVERY),
    "tp2 x dp2": ("untied", {"tensor_parallel": 2, "data_parallel": 2}, SOME),
}
# A kind each, in turn: test_megatron.py has every division with both.
KINDS = dict(zip(CASES, ("grpo", "sft") * len(CASES), strict=False))
# of B's entries: they begin at 0, and AdamW steps by lr g / (|g| + eps), where g may be all
# rounding
ROUNDING = 2e-6


@cache
def computed(size):
    """By name: what each of so many ranks found."""
    names = [name for name, (_, options, _) in CASES.items() if world(options) == size]
    cases = [
        {"shape": CASES[n][0], "kind": KINDS[n], "options": CASES[n][1], "adapter": CASES[n][2]}
        for n in names
    ]
    return dict(
        zip(
            names,
            by_case(run_ranks(size, "learners.megatron_cases:run", cases, timeout_s=900)),
            strict=False,
        )
    )


@cache
def expected(shape, kind, adapter):
    return alone(shape, kind, STEPS, adapter)


def check_adapted(found, options, shape, kind, adapter, *, first=0):
    size = world(options)
    last = range(size - size // options.get("pipeline_parallel", 1), size)
    wanted = expected(shape, kind, adapter)
    check_alike(found, last, wanted, kind, first=first, least=ROUNDING)
    mine, theirs = (together(weights, adapter) for weights in (assembled(found), wanted[1]))
    for name, weight in theirs.items():
        torch.testing.assert_close(
            mine[name], weight, rtol=1e-5, atol=1e-5 * float(weight.abs().max()), msg=name
        )
    base = dict(init_policy(SHAPES[shape], seed=SEED).canonical_weights())
    assert all(torch.equal(wanted[1][name], weight) for name, weight in base.items())
    assert any(not torch.equal(theirs[name], weight) for name, weight in base.items())


def together(weights, adapter):
    low_rank = {name: weight for name, weight in weights.items() if name.startswith(PEFT_PREFIX)}
    base = {name: weight for name, weight in weights.items() if name not in low_rank}
    whole = merge_lazily(base, low_rank, adapter.lora.scale)
    return {name: weight.to("cpu", torch.float32, copy=True) for name, weight in whole.items()}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_ranks_train_the_adapter_that_one_process_does(name, kind):
    shape, options, adapter = CASES[name]
    found = computed(world(options))
    assert name in found, f"a case before this one failed: {list(found)[-1]}"
    check_adapted(found[name], options, shape, kind, adapter)


def test_a_layer_that_is_computed_again_drops_the_same():
    dropping = Adapter(LoRAConfig(rank=2, alpha=4.0, dropout=0.3), seed=5)
    options = [{**SEQUENCE, "recompute": again} for again in ("none", "full")]
    cases = [
        {"shape": "tied", "kind": "grpo", "options": own, "adapter": dropping} for own in options
    ]
    # A layer has the same masks in any stage.
    stages = [{"pipeline_parallel": 2, "pipeline_chunks": n} for n in (1, 2)]
    cases += [{**cases[0], "shape": "untied", "options": own} for own in stages]
    kept, again, halves, quarters = (
        found[0][0]
        for found in by_case(run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=600))
    )
    assert kept == again
    assert [step["grad_norm"] for step in halves] == pytest.approx(
        [step["grad_norm"] for step in quarters], rel=1e-4
    )
    assert kept[0]["grad_norm"] != pytest.approx(
        expected("tied", "grpo", EVERY)[0][0]["grad_norm"], rel=1e-3
    )


def test_a_critic_has_an_adapter_and_a_head():
    options = {"tensor_parallel": 2, "pipeline_parallel": 2}
    case = {"shape": "untied", "kind": "ppo", "options": options, "adapter": EVERY}
    (found,) = by_case(run_ranks(4, "learners.megatron_cases:run", [case], timeout_s=600))
    check_adapted(found, options, "untied", "ppo", EVERY)


@pytest.mark.parametrize(
    ("shape", "distributed"), [("tied", True), ("tied", False), ("sparse", True)]
)
def test_a_checkpoint_of_tp2_goes_on_with_any_division(shape, distributed, tmp_path):
    """It holds the adapter alone, and another base is refused."""

    def case(options, **more):
        own = {**options, "distributed_optimizer": distributed}
        return {"shape": shape, "kind": "grpo", "options": own, "adapter": EVERY, **more}

    readers = [SEQUENCE, {"pipeline_parallel": 2}, {"data_parallel": 2}]
    written = str(tmp_path / "own")
    cases = [case(SEQUENCE, steps=2, saved_to=written)]
    cases += [case(options, first=2, steps=1, loaded_from=written) for options in readers]
    cases.append({**case(readers[0], loaded_from=written), "shape": "untied"})
    results = by_case(run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=900))
    for found, options in zip(results[1:], readers, strict=False):
        check_adapted(found, options, shape, "grpo", EVERY, first=2)
    assert len(results) == len(cases)
    assert all("was saved with another base model" in text for text in results[-1])
    assert all(".lora_" in name for name in DcpFiles(tmp_path / "own" / "megatron").tensors), (
        "the base was saved too"
    )


def test_the_reference_is_the_base_and_the_export_is_pefts(tmp_path):
    """At TP2 x PP2: adapter off, columns are the base's, bit for bit; what is exported has the
    base, the adapter, or both."""
    options = {**SEQUENCE, "pipeline_parallel": 2}
    found = run_ranks(
        4, "learners.megatron_cases:apart", "untied", options, SOME, str(tmp_path), timeout_s=600
    )
    for base, off, on, again in (columns for columns in found if columns is not None):
        assert torch.equal(base, off)
        assert torch.equal(base, again), "the first step's adapter changes something"
        assert not torch.allclose(base, on, rtol=0.1)
    assert any(columns is not None for columns in found)
    exported = load_policy(tmp_path / "base")
    merged_in_one = dict(load_policy(tmp_path / "all").canonical_weights())
    fresh = dict(init_policy(SHAPES["untied"], seed=SEED).canonical_weights())
    assert all(torch.equal(weight, fresh[name]) for name, weight in exported.canonical_weights())
    stored = load_adapter(tmp_path / "adapter")
    assert set(stored.target_modules) == set(SOME.lora.target_modules)
    for name, weight in together(
        {**dict(exported.canonical_weights()), **stored.weights}, SOME
    ).items():
        assert torch.equal(weight, merged_in_one[name]), name
