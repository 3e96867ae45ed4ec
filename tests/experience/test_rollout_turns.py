"""Single turns and rewards by the rollout functions, with scripted generators; and the signatures
of all of them."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch
from experience.counting import (
    EOS,
    TOKENIZER,
    AsyncAlone,
    Batched,
    BatchedAsync,
    Counting,
    batch_of,
    by_seed,
    flat,
    ids,
)

from ratchet.errors import ConfigError, DataError
from ratchet.experience.nemo_rl import BatchedDataDict, DatumSpec, EnvironmentReturn, rollouts
from ratchet.experience.nemo_rl.rollouts import (
    async_generate_response_for_sample_turn,
    calculate_rewards,
    generate_responses,
    generate_responses_async,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
)
from ratchet.testing.fakes import FakeGenerator

BOTH = [run_multi_turn_rollout, run_async_multi_turn_rollout]


# --- single turns


def turn_of(batch):
    prompts = [torch.cat([entry["token_ids"] for entry in log]) for log in batch["message_log"]]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    inputs = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    return BatchedDataDict({"input_ids": inputs, "input_lengths": lengths}), lengths


@pytest.mark.parametrize("shape", [FakeGenerator, Batched, BatchedAsync, AsyncAlone])
def test_single_turns_agree_and_append_in_place(shape):
    found = []
    for generate in (
        generate_responses,
        lambda *args: asyncio.run(generate_responses_async(*args)),
    ):
        batch = batch_of({}, {}, {}, stop=["x"])
        batch["message_log"][1][0]["token_ids"] = torch.tensor(ids("longer"))
        data, lengths = turn_of(batch)
        answered, generated, metrics = generate(shape(by_seed), data, batch, TOKENIZER, lengths)
        assert answered is batch
        assert data["stop_strings"] == [["x"]] * 3
        assert metrics["total_generated_tokens"] == sum(len(new) for new in generated)
        assert metrics["mean_generation_length"] == pytest.approx(
            metrics["total_generated_tokens"] / 3
        )
        assert metrics["truncation_rate"] == pytest.approx(batch["truncated"].float().mean().item())
        for log, new in zip(batch["message_log"], generated, strict=True):
            assert log[-1]["role"] == "assistant"
            assert log[-1]["token_ids"].tolist() == new.tolist()
            assert len(log[-1]["generation_logprobs"]) == len(new)
        found.append((flat(batch), flat(generated), metrics))
    assert found[0] == found[1]


def test_logprobs_are_left_out_where_nobody_wants_or_has_them():
    class Silent(Batched):
        def generate(self, data, greedy=False):
            output = super().generate(data, greedy)
            del output["logprobs"], output["truncated"]
            return output

    for policy, wanted in ((FakeGenerator(by_seed), False), (Silent(by_seed), True)):
        batch = batch_of({})
        generate_responses(policy, *turn_of(batch)[:1], batch, TOKENIZER, turn_of(batch)[1], wanted)
        assert set(batch["message_log"][0][-1]) == {"role", "content", "token_ids"}


def test_one_samples_turn():
    log = batch_of({})["message_log"][0]
    policy = FakeGenerator(lambda tokens, sampling: ids("abcdef"))
    turn = async_generate_response_for_sample_turn(policy, log, ["!"], TOKENIZER, max_seq_len=6)
    grown, generated, lengths, metrics = asyncio.run(turn)
    assert grown is log
    assert (generated.tolist(), lengths.tolist(), metrics["truncation_rate"]) == (
        ids("abcd"),
        [2],
        1.0,
    )
    assert policy.requests[0][1].stop == ("!",)
    with pytest.raises(DataError, match="no room for an answer"):
        asyncio.run(
            async_generate_response_for_sample_turn(policy, log, None, TOKENIZER, max_seq_len=6)
        )


# --- environments


def answered(*infos):
    batch = batch_of(*infos)
    for log in batch["message_log"]:
        log.append({"role": "assistant", "content": "ab", "token_ids": torch.tensor(ids("ab"))})
    return batch


def test_rewards_come_in_the_order_of_the_rows():
    environments = {"count": Counting(), "other": Counting()}
    infos = [{"turns": 1}, {"turns": 2, "task": "other"}, {"turns": 3, "turn": 2}]
    returned = calculate_rewards(answered(*infos), environments)
    assert isinstance(returned.rewards, torch.Tensor)
    assert returned.rewards.tolist() == [0.5] * 3
    assert returned.terminateds.tolist() == [True, False, True]
    assert [observation["content"] for observation in returned.observations] == [
        "<1>",
        "<1>",
        "<3>",
    ]
    assert returned.next_stop_strings == [["s1"], ["s1"], None]
    assert [state["turn"] for state in returned.metadata] == [1, 1, 3]
    assert returned.answers == [None] * 3
    assert (environments["count"].calls, environments["other"].calls) == ([2], [1])
    mixed = calculate_rewards(
        answered({"turns": 1}, {"turns": 1, "task": "other"}),
        {**environments, "other": Counting(parts=True)},
    )
    assert isinstance(mixed.rewards, dict)
    assert {name: values.tolist() for name, values in mixed.rewards.items()} == {
        "reward": [0.5, 0.0],
        "reward/low": pytest.approx([0.0, 0.1]),
        "reward/high": pytest.approx([0.0, 0.4]),
    }


class Wrong(Counting):
    """Gives what a test changes of a right return."""

    def __init__(self, **fields):
        super().__init__()
        self.fields = fields

    def step(self, message_log_batch, metadata):
        return super().step(message_log_batch, metadata)._replace(**self.fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": torch.zeros(2)}, r"rewards of shape \(2,\) for 1 conversations"),
        ({"rewards": torch.zeros(1, 1)}, r"rewards of shape \(1, 1\)"),
        ({"rewards": {"low": torch.zeros(3)}}, r"rewards low of shape \(3,\)"),
        ({"observations": []}, r"observations of shape \(0,\)"),
        ({"observations": ["again"]}, "must have a role and content"),
        (
            {"observations": [{"role": "assistant", "content": "me"}]},
            "an observation with the role 'assistant'",
        ),
        ({"next_stop_strings": ["abc"]}, "must be a list of strings"),
        ({"terminateds": torch.zeros(4, dtype=torch.bool)}, r"terminateds of shape \(4,\)"),
    ],
)
def test_a_wrong_return_is_named_and_fails_its_row_only(fields, message):
    with pytest.raises(DataError, match=message):
        calculate_rewards(answered({"turns": 1}), {"count": Wrong(**fields)})
    environments = {"count": Wrong(**fields), "other": Counting()}
    for rollout in BOTH:
        start = batch_of({"turns": 1}, {"turns": 1, "task": "other"})
        batch, metrics = rollout(
            FakeGenerator(lambda *_: [*ids("a"), EOS]), start, TOKENIZER, environments, 64
        )
        assert metrics["failed_rate"] == 0.5
        assert batch["total_reward"].tolist()[1] == 0.5


BATCHED = (
    "policy_generation, input_batch, tokenizer, task_to_env, max_seq_len, "
    "max_rollout_turns=999999, greedy=False"
)
ONE_TURN = (
    "policy_generation, generation_input_data, batch, tokenizer, input_lengths, "
    "include_logprobs=True, greedy=False"
)
SIGNATURES = {
    "generate_responses": ONE_TURN,
    "generate_responses_async": ONE_TURN,
    "calculate_rewards": "batch, task_to_env",
    "run_multi_turn_rollout": BATCHED,
    "run_async_multi_turn_rollout": BATCHED,
    "async_generate_response_for_sample_turn": "policy_generation, sample_message_log, "
    "sample_stop_strings, tokenizer, "
    "max_seq_len, greedy=False",
    "run_sample_multi_turn_rollout": "sample_idx, initial_sample_state, policy_generation, "
    "tokenizer, task_to_env, "
    "max_seq_len, max_rollout_turns=999999, greedy=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_interface_is_the_agreed_one(name):
    parameters = inspect.signature(getattr(rollouts, name)).parameters.values()
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == SIGNATURES[name]
    assert {name, "TokenizerType"} <= set(rollouts.__all__)


def test_one_sample_is_drawn_as_row_0_of_a_batch():
    async def alone(log):
        return await async_generate_response_for_sample_turn(
            FakeGenerator(by_seed), log, ["x"], TOKENIZER, max_seq_len=4098
        )

    batch, log = batch_of({}, stop=["x"]), batch_of({})["message_log"][0]
    data, lengths = turn_of(batch)
    answered, (generated,), metrics = generate_responses(
        FakeGenerator(by_seed), data, batch, TOKENIZER, lengths
    )
    grown, same, own_lengths, own_metrics = asyncio.run(alone(log))
    assert flat(grown) == flat(answered["message_log"][0])
    assert (same.tolist(), own_lengths.tolist(), own_metrics) == (
        generated.tolist(),
        lengths.tolist(),
        metrics,
    )


def test_what_rows_and_returns_hold_is_agreed():
    keys = {
        "message_log",
        "length",
        "extra_env_info",
        "loss_multiplier",
        "idx",
        "task_name",
        "stop_strings",
    }
    assert set(DatumSpec.__annotations__) == keys
    fields = ("observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers")
    assert EnvironmentReturn._fields == fields
    methods = (
        "from_batches",
        "slice",
        "select_indices",
        "repeat_interleave",
        "reorder_data",
        "shard_by_batch_size",
        "chunk",
        "get_batch",
        "get_dict",
        "make_microbatch_iterator",
        "truncate_tensors",
        "to",
        "size",
    )
    assert all(hasattr(BatchedDataDict, name) for name in methods)


@pytest.mark.parametrize("shape", [FakeGenerator, Batched, BatchedAsync, AsyncAlone])
def test_a_turn_of_one_log_works_for_every_generator(shape):
    (log,) = batch_of({})["message_log"]
    call = async_generate_response_for_sample_turn(shape(by_seed), log, None, TOKENIZER, 64)
    answered, generated, _, _ = asyncio.run(call)
    assert answered[-1]["token_ids"].tolist() == generated.tolist()
    assert len(generated) > 0


def test_a_generator_without_either_method_is_refused():
    data, lengths = turn_of(batch_of({}))
    with pytest.raises(
        ConfigError, match="policy_generation=object has neither `generate` nor `generate_async`"
    ):
        generate_responses(object(), data, batch_of({}), TOKENIZER, lengths)
    with pytest.raises(ConfigError, match="neither"):
        run_multi_turn_rollout(
            object(), batch_of({}), TOKENIZER, {"count": Counting()}, max_seq_len=30
        )
