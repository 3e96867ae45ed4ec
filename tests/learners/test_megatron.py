"""A learner by Megatron Core computes what one process computes: losses, gradients, weights,
columns. Its checkpoints go on with any other number of ranks."""

from functools import cache

import pytest
import torch
from learners.megatron_cases import SHAPES, alone, weighed
from learners.ranks import run_ranks
from learners.spread_cases import assembled, columns_of

from ratchet.commands.convert.megatron_format import MegatronFiles
from ratchet.models.convert.dimensions import Dimensions

pytestmark = [pytest.mark.slow, pytest.mark.needs("megatron")]

STEPS = 3
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
CASES = {
    "dp2": ("tied", {"data_parallel": 2, "distributed_optimizer": False}),
    "dp2 distributed optimizer": ("untied", {"data_parallel": 2, "overlap_gradients": True}),
    "tp2": ("tied", {"tensor_parallel": 2}),
    "tp2 sequence": ("untied", {**SEQUENCE, "recompute": "full"}),
    "biases tp2": ("biased", {"tensor_parallel": 2}),
    "biases tp2 sequence": ("biased", SEQUENCE),
    "pp2": ("tied", {"pipeline_parallel": 2, "recompute": "attention"}),
    "pp2 interleaved": (
        "untied",
        {"pipeline_parallel": 2, "pipeline_chunks": 2, "overlap_gradients": True},
    ),
    "pp2 unequal": ("tied", {"pipeline_parallel": 2, "last_stage_layers": 1}),
    "pp2 interleaved, five layers": (
        "five",
        {"pipeline_parallel": 2, "pipeline_chunks": 2, "first_stage_layers": 3},
    ),
    "pp4 unequal middle": ("five", {"pipeline_parallel": 4, "stage_layers": (1, 2, 1, 1)}),
    "cp2": ("tied", {"context_parallel": 2}),
    "ep2": ("sparse", {"data_parallel": 2, "expert_parallel": 2}),
    "ep2 whole optimizer": (
        "sparse",
        {"data_parallel": 2, "expert_parallel": 2, "distributed_optimizer": False},
    ),
    "sparse tp2": ("sparse", SEQUENCE),
    "tp2 x pp2": ("tied", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2 x dp2": ("untied", {**SEQUENCE, "data_parallel": 2}),
    "cp2 x tp2": ("tied", {**SEQUENCE, "context_parallel": 2}),
    "pp2 x ep2": (
        "sparse",
        {"pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": 2, "recompute": "full"},
    ),
    "ep2 of dp4": ("sparse", {"data_parallel": 4, "expert_parallel": 2}),
}
KINDS = ("grpo", "sft")
SAVED = {"tensor_parallel": 2}
UNEQUAL = {"pipeline_parallel": 2, "first_stage_layers": 1}
EXPERTS = {"data_parallel": 2, "expert_parallel": 2}
READERS = {
    "tp2": SAVED,
    "pp2": {"pipeline_parallel": 2},
    "pp2 unequal": UNEQUAL,
    "dp2": {"data_parallel": 2},
}


def world(options):
    return (
        torch.tensor(
            [options.get(f"{key}_parallel", 1) for key in ("data", "tensor", "pipeline", "context")]
        )
        .prod()
        .item()
    )


@cache
def computed(size):
    """By (name, kind): what each of so many ranks found."""
    names = [
        (name, kind)
        for name, (_, options) in CASES.items()
        if world(options) == size
        for kind in KINDS
    ]
    cases = [
        {"shape": CASES[name][0], "kind": kind, "options": CASES[name][1]} for name, kind in names
    ]
    return dict(
        zip(
            names,
            by_case(run_ranks(size, "learners.megatron_cases:run", cases, timeout_s=900)),
            strict=False,
        )
    )


def by_case(results):
    return [list(found) for found in zip(*results, strict=True)]


@cache
def expected(shape, kind):
    return alone(shape, kind, STEPS)


def check_alike(found, answers, expected, kind, *, first=0, rtol=1e-5, least=0.0):
    """answers: ranks that know the numbers of a step. least: how far apart any two entries of a
    weight may be."""
    metrics, weights, columns = expected
    assert not [text for text in found if isinstance(text, str)], "\n".join(
        text for text in found if isinstance(text, str)
    )
    for rank in answers:
        for mine, wanted in zip(found[rank][0], metrics[first:], strict=True):
            assert mine.keys() == wanted.keys()
            for key, value in wanted.items():
                assert mine[key] == pytest.approx(value, rel=rtol, abs=rtol / 10), key
    whole = assembled(found)
    assert whole.keys() == weights.keys()
    for name, tensor in weights.items():
        atol = max(least, rtol * float(tensor.abs().max()))
        torch.testing.assert_close(whole[name], tensor, rtol=rtol, atol=atol, msg=name)
    scored = columns_of(found, weighed(kind, 0)[0])
    for name, column in columns.items():
        torch.testing.assert_close(
            scored[name], column, rtol=rtol, atol=rtol * float(column.abs().max()), msg=name
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_does(name, kind):
    shape, options = CASES[name]
    size = world(options)
    found = computed(size)
    assert (name, kind) in found, f"a case before this one failed: {list(found)[-1]}"
    last = range(size - size // options.get("pipeline_parallel", 1), size)
    check_alike(found[name, kind], last, expected(shape, kind), kind)


@pytest.mark.parametrize(
    "options", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}], ids=str
)
def test_a_critic_is_a_head_on_the_last_stage(options):
    (found,) = by_case(
        run_ranks(
            2,
            "learners.megatron_cases:run",
            [{"shape": "untied", "kind": "ppo", "options": options}],
            timeout_s=600,
        )
    )
    check_alike(found, [1], expected("untied", "ppo"), "ppo")


def test_no_rank_ever_holds_the_whole_model(tmp_path):
    """What it allocates at once is at most its buffer of gradients, about a fourth of the model;
    and its peak is a fourth of that of one process: with the model gathered it would be a third."""
    held, options = "learners.megatron_cases:held", {**SEQUENCE, "pipeline_parallel": 2}
    ((_, alone, _, _),) = run_ranks(1, held, str(tmp_path / "alone"), {}, timeout_s=600)
    for largest, peak, own, whole in run_ranks(
        4, held, str(tmp_path / "ranks"), options, timeout_s=600
    ):
        assert largest <= 1.05 * own
        assert peak < 0.28 * alone
        assert peak + whole > 0.3 * alone
        assert own < 0.3 * whole


def test_a_closed_learner_leaves_neither_groups_nor_their_threads():
    ranks = run_ranks(2, "learners.megatron_cases:closes", {"data_parallel": 2}, timeout_s=600)
    for before, during, *after in ranks:
        assert all(more > few for more, few in zip(during, before, strict=True))
        assert after == [before, during, before]


def test_routes_are_replayed_and_losses_of_routers_reach_them():
    options = {
        "ep2": {"data_parallel": 2, "expert_parallel": 2},
        "pp2": {"pipeline_parallel": 2, "recompute": "full"},
        "tp2": SEQUENCE,
        "cp2": {"context_parallel": 2},
    }
    cases = [{"shape": "sparse", "kind": "routed", "options": o} for o in options.values()]
    cases.append({"shape": "sparse", "kind": "balanced", "options": options["ep2"]})
    results = by_case(run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=900))
    for found, case in zip(results, cases, strict=False):
        check_alike(found, [1], expected("sparse", case["kind"]), case["kind"])
    assert len(results) == len(cases)


@pytest.mark.parametrize(
    ("shape", "distributed"),
    [("tied", True), ("sparse", True), ("untied", False), ("biased", True)],
)
def test_a_checkpoint_of_tp2_goes_on_with_any_division(shape, distributed, tmp_path):
    written = str(tmp_path)
    sequence = {"sequence_parallel": True} if shape == "sparse" else {}

    def case(division, **more):
        options = {
            **division,
            **(sequence if "tensor_parallel" in division else {}),
            "distributed_optimizer": distributed,
        }
        return {"shape": shape, "kind": "grpo", "options": options, **more}

    first = case(SAVED, steps=2, saved_to=written)
    others = [
        case(division, first=2, steps=1, loaded_from=written) for division in READERS.values()
    ]
    if shape == "sparse":  # experts divided, and whole again
        divided = str(tmp_path / "divided")
        others += [case(EXPERTS, steps=2, saved_to=divided)]
        others += [case(READERS["pp2"], first=2, steps=1, loaded_from=divided)]
        others += [case(EXPERTS, first=2, steps=1, loaded_from=written)]
    cases = [first, *others]
    results = by_case(run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=900))
    for found, asked in zip(results, cases, strict=True):
        if "loaded_from" in asked:
            check_alike(found, [1], expected(shape, "grpo"), "grpo", first=2)


def test_a_learner_that_leaves_its_device_between_steps_computes_the_same(tmp_path):
    """It is saved while it is offloaded, and goes on from there."""

    def case(name, **more):
        shape, options = CASES[name]
        return {"shape": shape, "kind": "grpo", "options": options, "takes_turns": True, **more}

    saved = "dp2 distributed optimizer"
    cases = [
        *(case(name) for name in ("dp2", "pp2 interleaved", "ep2")),
        case("dp2", options={**CASES["dp2"][1], "weights": "bfloat16"}),
        case(saved, steps=2, saved_to=str(tmp_path)),
        case(saved, first=2, steps=1, loaded_from=str(tmp_path)),
    ]
    wholes = [{**case, "takes_turns": False} for case in cases]
    results = by_case(run_ranks(2, "learners.megatron_cases:run", [*cases, *wholes], timeout_s=900))
    assert len(results) == 2 * len(cases)
    for found, whole in zip(results[: len(cases)], results[len(cases) :], strict=True):
        assert [rank[0] for rank in found] == [rank[0] for rank in whole]
        mine, wanted = assembled(found), assembled(whole)
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    check_alike(results[len(cases) - 1], [1], expected("untied", "grpo"), "grpo", first=2)


def test_experts_that_ranks_on_cpus_cannot_divide_are_refused():
    options = {**SEQUENCE, "data_parallel": 2, "expert_parallel": 2}
    case = {"shape": "sparse", "kind": "sft", "options": options}
    for (found,) in run_ranks(4, "learners.megatron_cases:run", [case]):
        assert "ModelError: learner.tensor_parallel=2 with learner.expert_parallel=2 needs" in found


def test_weights_of_unequal_stages_are_saved_bit_for_bit(tmp_path):
    """What ranks of 3 and 2 layers save is what they send, to the converter as to ranks of 1 and 4
    or 4 and 1 layers, and two of those train on."""
    interleaved = CASES["pp2 interleaved, five layers"][1]

    def case(options, **more):
        return {"shape": "five", "kind": "grpo", "options": options, **more}

    cases = [
        case(interleaved, steps=2, saved_to=str(tmp_path)),
        case(UNEQUAL, steps=0, loaded_from=str(tmp_path)),
        case(
            {"pipeline_parallel": 2, "first_stage_layers": 4, "last_stage_layers": 1},
            first=2,
            steps=1,
            loaded_from=str(tmp_path),
        ),
    ]
    results = by_case(run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=600))
    check_alike(results[-1], [1], expected("five", "grpo"), "grpo", first=2)
    layers = [
        [
            len({name.split(".")[2] for name, *_ in blocks if ".layers." in name})
            for _, blocks, *_ in found
        ]
        for found in results
    ]
    assert layers == [[3, 2], [1, 4], [4, 1]]
    sent, read = map(assembled, results[:2])
    files = MegatronFiles(tmp_path / "megatron", Dimensions.from_config(SHAPES["five"]))
    assert files.shapes.keys() == sent.keys() == read.keys()
    for name, tensor in sent.items():
        assert torch.equal(read[name], tensor), name
        assert torch.equal(files.block(name, (0,) * tensor.dim(), tensor.shape), tensor), name
