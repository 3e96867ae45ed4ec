"""A learner in other processes is a learner like any other: roles, checkpoints that other numbers
of ranks read, exports."""

import asyncio
from pathlib import Path

import pytest
import torch
from learners.ranks import RANK_MODULES
from learners.spread_cases import SHAPE, SPARSE, VOCAB, groups
from transformers import AutoConfig, AutoModelForCausalLM

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.scoring import fill_columns
from ratchet.checkpoint.serialization import defer_writes
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import OptimizerConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.packing import pack
from ratchet.errors import CheckpointError
from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.local import LocalExecutor
from ratchet.executors.placement import ResourceRequest
from ratchet.learners.config import DTensorConfig, LocalConfig
from ratchet.models.load import init_policy, load_policy
from ratchet.models.model_source import ModelSource
from ratchet.training.roles import make_roles

pytestmark = pytest.mark.slow

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, warmup_steps=1, schedule="linear", ema_decay=0.9)


@pytest.fixture(scope="module")
def executor():
    made = LocalExecutor(LocalClusterConfig(), threads=2, device="cpu", preload=RANK_MODULES)
    yield made
    made.close()


class Ranks:
    """Groups of processes with a model each, ended with the test."""

    def __init__(self, executor):
        self.executor, self.groups = executor, []

    def __call__(self, origin, **options):
        world = (
            torch.tensor([v for k, v in options.items() if k != "sequence_parallel"]).prod().item()
        )
        role = f"learner{len(self.groups)}"
        self.executor.plan([ResourceRequest(role, world)])
        group = self.executor.group(role)
        self.groups.append(group)
        group.build_now(
            "ratchet.learners.distributed.worker:LearnerRank",
            {"learner": {"kind": "dtensor", **options}, "origin": origin, "double": True},
        )
        return group


@pytest.fixture
def ranks(executor):
    made = Ranks(executor)
    yield made
    for group in made.groups:
        group.close()


def roles_of(model, algorithm, group=None, **options):
    section = (
        DTensorConfig(micro_batch_tokens=40, **options)
        if group
        else LocalConfig(micro_batch_tokens=40)
    )
    spec = resolve("algorithm", algorithm)
    tokenizer = character_tokenizer("abcdefghijklmnopqrs")
    made = build(spec)
    return made, make_roles(
        model,
        tokenizer,
        made,
        section=section,
        optimizer=OPTIMIZER,
        steps=9,
        ranks=group,
        algorithm_section=spec,
    )


async def train(algorithm, roles, steps):
    """The numbers of each step."""
    state, numbers = AlgoState(), []
    for step in steps:
        batch = algorithm.advantage(await fill_columns(pack(groups(step)), algorithm, roles), state)
        for mini in algorithm.split(batch):
            weighed = algorithm.weigh(mini, state)
            for role in algorithm.roles_to_update(state):
                numbers.append(dict(await roles[role].update(weighed, algorithm.losses[role])))
    return numbers


def weights_of(learner):
    found = {}
    for shard in learner.weights():
        whole = found.setdefault(
            shard.name, torch.full(shard.shape, torch.nan, dtype=shard.tensor.dtype)
        )
        whole[
            tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.tensor.shape, strict=True))
        ] = shard.tensor
    return found


def alike(found, expected, rtol=1e-6):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def numbers_alike(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-8)


PPO = {"kind": "ppo", "minibatches": 2, "kl": {"coef": 0.1}}


def test_a_critic_and_a_reference_live_on_the_same_ranks_and_checkpoints_are_read_by_any_number_of_them(
    ranks, tmp_path
):
    model = init_policy(SHAPE, seed=3, dtype=torch.float64)
    algorithm, local = roles_of(init_policy(SHAPE, seed=3, dtype=torch.float64), PPO)
    expected = asyncio.run(train(algorithm, local, range(3)))

    group = ranks(ModelSource(shape=SHAPE, seed=3), dp_shard=2)
    _, there = roles_of(model, PPO, group, dp_shard=2)
    numbers_alike(
        asyncio.run(train(algorithm, there, range(2))), expected[: len(expected) // 3 * 2]
    )
    for name, role in there.items():
        role.save(tmp_path / name)
    for options in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        _, again = roles_of(
            model, PPO, ranks(ModelSource(shape=SHAPE, seed=4), **options), **options
        )
        for name, role in again.items():
            role.load(tmp_path / name)
        numbers_alike(
            asyncio.run(train(algorithm, again, range(2, 3))), expected[len(expected) // 3 * 2 :]
        )
        alike(weights_of(again["policy"]), weights_of(local["policy"]))
    again["critic"].export(tmp_path / "model")
    exported = load_policy(tmp_path / "model", dtype=torch.float64)
    alike(dict(exported.canonical_weights()), weights_of(local["critic"]))
    for name, role in {"there": again["critic"], "here": local["critic"]}.items():
        role.export(tmp_path / name, averaged=True)
    there, here = (
        dict(load_policy(tmp_path / n, dtype=torch.float64).canonical_weights())
        for n in ("there", "here")
    )
    alike(there, here)
    assert not torch.equal(
        here["model.embed_tokens.weight"], weights_of(local["critic"])["model.embed_tokens.weight"]
    )
    assert (tmp_path / "model" / "score.safetensors").exists()
    assert not (tmp_path / "model" / ".blocks").exists()


@pytest.mark.fault("P10")
def test_ranks_write_the_state_that_was_copied_while_training_goes_on(ranks, tmp_path):
    origin = ModelSource(shape=SHAPE, seed=3)
    model = init_policy(SHAPE, seed=3, dtype=torch.float64)
    algorithm, roles = roles_of(model, {"kind": "sft"}, ranks(origin, dp_shard=2), dp_shard=2)
    asyncio.run(train(algorithm, roles, range(1)))
    policy = roles["policy"]

    def copy_then_train(step):
        with defer_writes() as writes:
            policy.save(Path("later"))
        asyncio.run(train(algorithm, roles, range(step, step + 1)))
        return writes[0]

    # A place that can't be written to is told once both ranks have tried, and they go on.
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"rank \d can't write to .*file/later"):
        copy_then_train(1)(tmp_path / "file")
    policy.save(tmp_path / "at_once")
    copy_then_train(2)(tmp_path)
    policy.save(tmp_path / "trained")
    before, later, after = (read_files(tmp_path / n) for n in ("at_once", "later", "trained"))
    assert len(before) == 4
    assert later == before
    assert after["rank-0.safetensors"] != before["rank-0.safetensors"]


def read_files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.fault("C4")
def test_a_batch_smaller_than_the_ranks_is_filled_up(ranks):
    algorithm, local = roles_of(init_policy(SHAPE, seed=3, dtype=torch.float64), {"kind": "sft"})
    _, there = roles_of(
        init_policy(SHAPE, seed=3, dtype=torch.float64),
        {"kind": "sft"},
        ranks(ModelSource(shape=SHAPE, seed=3), dp_shard=3),
        dp_shard=3,
    )
    one = pack(groups(0)[1:2]).take([1])
    weighed = algorithm.weigh(algorithm.advantage(one, AlgoState()), AlgoState())
    for batch in (weighed, weighed.take([])):
        found, expected = (
            asyncio.run(roles["policy"].update(batch, algorithm.losses["policy"]))
            for roles in (there, local)
        )
        assert found == pytest.approx(dict(expected), rel=1e-5)
    scored, expected = (
        asyncio.run(roles["policy"].score(one, ["logprobs"])) for roles in (there, local)
    )
    torch.testing.assert_close(scored["logprobs"], expected["logprobs"], rtol=1e-6, atol=1e-9)


@pytest.mark.fault("C4")
@pytest.mark.parametrize("count", [1, 4, 7])
def test_groups_that_neither_mini_batches_nor_ranks_divide_are_all_trained_on_once(ranks, count):
    """Three attempts each, in three mini-batches, some of them empty, on two ranks: as in one
    process that takes all."""
    spec = {"kind": "grpo", "minibatches": 3}
    algorithm, local = roles_of(init_policy(SHAPE, seed=3, dtype=torch.float64), spec)
    origin = ModelSource(shape=SHAPE, seed=3)
    _, there = roles_of(
        init_policy(SHAPE, seed=3, dtype=torch.float64), spec, ranks(origin, dp_shard=2), dp_shard=2
    )
    batch = pack(groups(0, n=count))
    parts = list(algorithm.split(batch))
    assert sum(part.n_sequences for part in parts) == batch.n_sequences == 3 * count
    sizes = [part.n_groups for part in parts]
    assert (sum(sizes), len(sizes)) == (count, 3)
    assert max(sizes) - min(sizes) <= 1
    found, expected = (asyncio.run(trained_on(algorithm, roles, batch)) for roles in (there, local))
    numbers_alike(found, expected)
    alike(weights_of(there["policy"]), weights_of(local["policy"]))


async def trained_on(algorithm, roles, batch):
    state, numbers = AlgoState(), []
    filled = algorithm.advantage(await fill_columns(batch, algorithm, roles), state)
    for mini in algorithm.split(filled):
        numbers.append(
            dict(
                await roles["policy"].update(
                    algorithm.weigh(mini, state), algorithm.losses["policy"]
                )
            )
        )
    return numbers


OF_TRANSFORMERS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


def save_of_transformers(directory, kind, **shape):
    """A directory that our decoder can't run."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, pad_token_id=0, **shape
    )
    AutoModelForCausalLM.from_config(config).double().save_pretrained(directory)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ours", {"dp_shard": 2}),
        ("experts", {"dp_shard": 2}),
        ("gpt2", {"dp_shard": 2}),
        ("gemma2", {"tensor_parallel": 2}),
        ("gemma2", {"pipeline_parallel": 2}),
    ],
)
def test_a_model_of_a_directory_is_read_into_its_ranks(ranks, tmp_path, kind, options):
    # With PPO the ranks copy the policy, as its reference and its critic.
    spec = PPO if kind == "gemma2" else {"kind": "sft"}
    if kind == "gpt2":
        save_of_transformers(
            tmp_path / "model", kind, n_embd=16, n_layer=2, n_head=2, n_positions=64
        )
    elif kind == "gemma2":
        save_of_transformers(tmp_path / "model", kind, **OF_TRANSFORMERS)
    else:
        init_policy(SPARSE if kind == "experts" else SHAPE, seed=5, dtype=torch.float64).save(
            tmp_path / "model"
        )
    model = load_policy(tmp_path / "model", dtype=torch.float64)
    algorithm, local = roles_of(model, spec)
    expected = asyncio.run(train(algorithm, local, range(2)))
    group = ranks(ModelSource(path=str(tmp_path / "model")), **options)
    _, there = roles_of(
        load_policy(tmp_path / "model", dtype=torch.float64), spec, group, **options
    )
    numbers_alike(asyncio.run(train(algorithm, there, range(2))), expected)
    alike(weights_of(there["policy"]), weights_of(local["policy"]))
    there["policy"].export(tmp_path / "trained")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32).eval()
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        ours = model.logits(model.hidden(tokens[0], tokens[0], [7]))
        torch.testing.assert_close(read(tokens).logits[0].double(), ours, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_a_model_that_transformers_runs_is_read_at_another_division(
    ranks, tmp_path
):
    save_of_transformers(tmp_path / "model", "gemma2", **OF_TRANSFORMERS)
    origin, model = (
        ModelSource(path=str(tmp_path / "model")),
        load_policy(tmp_path / "model", dtype=torch.float64),
    )
    algorithm, before = roles_of(model, {"kind": "sft"}, ranks(origin, dp_shard=2), dp_shard=2)
    asyncio.run(train(algorithm, before, range(1)))
    before["policy"].save(tmp_path / "saved")
    expected = asyncio.run(train(algorithm, before, range(1, 2)))
    for options in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        _, after = roles_of(model, {"kind": "sft"}, ranks(origin, **options), **options)
        after["policy"].load(tmp_path / "saved")
        numbers_alike(asyncio.run(train(algorithm, after, range(1, 2))), expected)
        alike(weights_of(after["policy"]), weights_of(before["policy"]), rtol=1e-5)
