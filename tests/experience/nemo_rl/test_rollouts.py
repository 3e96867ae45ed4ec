"""Whole episodes by the rollout functions, with scripted generators: the synchronous against the
asynchronous, and by hand."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path

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
    causes,
    flat,
    ids,
    mixed,
)
from transformers import PreTrainedTokenizerFast

from ratchet.errors import DataError
from ratchet.experience.nemo_rl import BatchedDataDict, WithSampling, collate, make_datum
from ratchet.experience.nemo_rl.generation import UnbatchedGenerator
from ratchet.experience.nemo_rl.metrics import compute_percentile
from ratchet.experience.nemo_rl.rollouts import (
    calculate_rewards,
    generate_responses,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from ratchet.experience.nemo_rl.tokens import get_log_renderer
from ratchet.testing.fakes import FakeGenerator
from ratchet.types import Message, Sampling

EOS_TEXT = TOKENIZER.special_tokens["eos_token"]
BOTH = [run_multi_turn_rollout, run_async_multi_turn_rollout]


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [FakeGenerator, Batched, BatchedAsync, AsyncAlone])
def test_sync_and_async_agree_on_everything(shape, seed):
    found = []
    for rollout in BOTH:
        policy = (
            WithSampling(shape(by_seed), Sampling(seed=seed))
            if shape is FakeGenerator
            else shape(by_seed)
        )
        environments = {"count": Counting(), "other": Counting(parts=True)}
        batch, metrics = rollout(
            policy, mixed(), TOKENIZER, environments, max_seq_len=30, max_rollout_turns=4
        )
        found.append((flat(causes(batch)), flat(metrics)))
    assert found[0] == found[1]


def test_the_rules_by_hand():
    """Every answer is "ab" and EOS: 3 tokens behind a prompt of 2; every observation has 3
    tokens."""
    for rollout in BOTH:
        environment = Counting()
        infos = [{"turns": 1}, {"turns": 2}, {"turns": 9}, {"turns": 3, "fault": "raises", "at": 2}]
        policy = FakeGenerator(lambda tokens, sampling: [*ids("ab"), EOS])
        start = batch_of(*infos)
        batch, metrics = rollout(
            policy, start, TOKENIZER, {"count": environment}, max_seq_len=40, max_rollout_turns=3
        )
        assert batch["total_reward"].tolist()[:3] == [0.5, 1.0, 1.5]
        assert math.isnan(batch["total_reward"][3]), "a failure is not a reward"
        assert batch["loss_multiplier"].tolist() == [1, 1, 1, 0]
        assert batch["truncated"].tolist() == [False] * 4
        assert [error is None for error in batch["failed"]] == [True, True, True, False]
        assert "ValueError: the maze is on fire" in batch["failed"][3]
        assert [state["turn"] for state in batch["extra_env_info"]] == [1, 2, 3, 1], (
            "as the last step left it"
        )
        assert [state.get("turn") for state in start["extra_env_info"]] == [None] * 4, (
            "the input stays as it was"
        )
        assert [len(log) for log in start["message_log"]] == [1] * 4
        # Rows 0 to 3 have 1, 2, 3 and 2 turns; they read 0, 1, 3 and 1 observations.
        assert metrics["total_turns"] == 8
        assert metrics["avg_turns_per_sample"] == 2.0
        assert metrics["max_turns_per_sample"] == 3
        assert metrics["natural_termination_rate"] == 0.5
        assert metrics["max_turns_reached_rate"] == 0.25
        assert metrics["truncation_rate"] == 0.0
        assert metrics["failed_rate"] == 0.25
        assert metrics["mean_gen_tokens_per_sample"] == 8 * 3 / 4
        assert metrics["max_gen_tokens_per_sample"] == 9
        assert metrics["mean_env_tokens_per_sample"] == 5 * 3 / 4
        assert metrics["mean_total_tokens_per_sample"] == (24 + 15) / 4
        assert (
            metrics["mean_total_reward"],
            metrics["max_total_reward"],
            metrics["min_total_reward"],
        ) == (1.0, 1.5, 0.5)
        assert metrics["histogram/input_tokens_length"] == [2, 2, 8, 2, 8, 14, 2]
        assert (metrics["count/rows"], metrics["count/best"]) == (4, 1.5)


@pytest.mark.parametrize("rollout", BOTH)
def test_stop_iteration_of_an_environment_fails_its_row_and_hangs_nothing(rollout):
    policy = FakeGenerator(lambda tokens, sampling: [*ids("ab"), EOS])
    start = batch_of({"turns": 1}, {"turns": 1, "fault": "exhausted", "at": 1})
    batch, _ = rollout(policy, start, TOKENIZER, {"count": Counting()}, 40, max_rollout_turns=3)
    assert batch["failed"][0] is None
    assert "StopIteration" in batch["failed"][1]
    assert math.isnan(batch["total_reward"][1])


class OfWorkers(BatchedAsync):
    """Rows are answered by two workers in turns."""

    n_calls = 0

    async def generate_async(self, data, greedy=False):
        async for row, output in super().generate_async(data, greedy):
            output["gen_leader_worker_idx"] = [[OfWorkers.n_calls % 2]]
            OfWorkers.n_calls += 1
            yield row, output


def test_tokens_are_counted_by_the_worker_that_drew_them():
    policy = OfWorkers(lambda tokens, sampling: [*ids("ab"), EOS])
    _, metrics = run_async_multi_turn_rollout(
        policy, batch_of({"turns": 1}, {"turns": 2}), TOKENIZER, {"count": Counting()}, 40
    )
    assert sorted(metrics["per_worker_token_counts"].values()) == [3, 6]
    (datum,) = batch_of({"turns": 3})["message_log"]
    state = {"message_log": datum, "extra_env_info": {"turns": 3}, "task_name": "count"}
    _, sample = asyncio.run(
        run_sample_multi_turn_rollout(0, state, policy, TOKENIZER, {"count": Counting()}, 40)
    )
    assert sum(sample["per_worker_token_counts"].values()) == 9
    assert len(sample["per_worker_token_counts"]) == 2


class Pushed(BatchedAsync):
    """A generator that gets new weights while it generates."""

    version = 0

    async def generate_async(self, data, greedy=False):
        self.version += 1
        async for row in super().generate_async(data, greedy):
            yield row


def test_tokens_have_the_version_of_before_a_push_meanwhile():
    generator = UnbatchedGenerator(Pushed(lambda *_: [*ids("ab"), EOS]), pad_id=0)
    drawn = [asyncio.run(generator.generate(ids("q"), Sampling())) for _ in range(2)]
    assert [completion.versions.tolist() for completion in drawn] == [[0, 0, 0], [1, 1, 1]]


def test_percentiles_are_values_that_occurred():
    assert compute_percentile([3, 1, 2], 50) == 2
    assert compute_percentile([1, 2, 3, 4], 50) == 3
    assert compute_percentile(list(range(1, 101)), 95) == 96
    assert compute_percentile([], 50) == 0
    assert compute_percentile([7], 99) == 7


@pytest.mark.parametrize("rollout", BOTH)
def test_a_log_holds_every_token_with_who_wrote_it(rollout):
    policy = FakeGenerator(by_seed)
    batch, _ = rollout(
        policy, batch_of({"turns": 3}), TOKENIZER, {"count": Counting()}, max_seq_len=64
    )
    (log,) = batch["message_log"]
    assert [entry["role"] for entry in log] == ["user", *["assistant", "environment"] * 3]
    assert [entry["content"] for entry in log[2::2]] == ["<1>", "<2>", "<3>"]
    assert [len(entry["token_ids"]) for entry in log[2::2]] == [3, 3, 0], (
        "what ended it was read by nobody"
    )
    assert all(entry["token_ids"].dtype == torch.int64 for entry in log)
    assert all(
        entry["generation_logprobs"].tolist() == [-1.0] * len(entry["token_ids"])
        for entry in log[1::2]
    )
    for turn, (prompt, _) in enumerate(policy.requests):
        before = torch.cat([entry["token_ids"] for entry in log[: 1 + 2 * turn]])
        assert prompt == before.tolist(), "each prompt extends the log so far"
        assert (
            TOKENIZER.decode(log[1 + 2 * turn]["token_ids"].tolist())
            == log[1 + 2 * turn]["content"]
        )


@pytest.mark.parametrize("rollout", BOTH)
def test_token_budgets(rollout):
    def play(script, max_seq_len):
        generator = FakeGenerator(script)
        return generator, *rollout(
            generator, batch_of({"turns": 9}), TOKENIZER, {"count": Counting()}, max_seq_len
        )

    # 2 + 3 + 3 = 8 tokens and room for one more: the second answer is cut, and its environment
    # never asked.
    generator, batch, metrics = play(lambda tokens, sampling: [*ids("ab"), EOS], 9)
    assert generator.requests[-1][1].max_new_tokens == 1
    assert batch["truncated"].tolist() == [True]
    assert batch["total_reward"].tolist() == [0.5]
    assert [len(entry["token_ids"]) for entry in batch["message_log"][0]] == [2, 3, 3, 1]
    assert (metrics["truncation_rate"], metrics["total_turns"]) == (1.0, 2)
    # An observation beyond the budget is cut to it, and nobody answers.
    _, batch, metrics = play(lambda tokens, sampling: [*ids("ab"), EOS], 6)
    assert [len(entry["token_ids"]) for entry in batch["message_log"][0]] == [2, 3, 1]
    assert (metrics["truncation_rate"], metrics["mean_env_tokens_per_sample"]) == (1.0, 1.0)


def test_in_step_an_environment_and_a_batched_generator_are_asked_once_a_turn():
    environment, policy = Counting(), Batched(lambda tokens, sampling: [*ids("ab"), EOS])
    infos = [{"turns": 1}, {"turns": 3}, {"turns": 2}]
    batch, _ = run_multi_turn_rollout(
        policy, batch_of(*infos), TOKENIZER, {"count": environment}, max_seq_len=64
    )
    assert environment.calls == policy.sizes == [3, 2, 1]
    assert batch["message_log"][0][1]["generation_logprobs"].tolist() == [-2.0] * 3


def test_stop_strings_hold_until_the_environment_changes_them():
    for rollout in BOTH:
        policy = WithSampling(FakeGenerator(by_seed), Sampling(stop=("own",), temperature=0.5))
        batch, _ = rollout(
            policy, batch_of({"turns": 3}, stop=["first"]), TOKENIZER, {"count": Counting()}, 64
        )
        stops = [sampling.stop for _, sampling in policy.generator.requests]
        assert stops == [("own", "first"), ("own", "s1"), ("own", "s1")]
        assert batch["stop_strings"] == [["s1"]]
        assert {sampling.temperature for _, sampling in policy.generator.requests} == {0.5}


def test_greedy_and_seeds():
    policy = FakeGenerator(by_seed)
    start = batch_of({"turns": 2}).repeat_interleave(4)
    run_multi_turn_rollout(policy, start, TOKENIZER, {"count": Counting()}, 64, greedy=True)
    assert {sampling.temperature for _, sampling in policy.requests} == {0.0}
    seeds = [sampling.seed for _, sampling in policy.requests]
    assert len(set(seeds)) == len(seeds), (
        "repetitions of a prompt draw on their own, and so does each turn"
    )
    policy.requests.clear()
    policy.version = 1
    run_multi_turn_rollout(policy, start, TOKENIZER, {"count": Counting()}, 64)
    assert not {sampling.seed for _, sampling in policy.requests} & set(seeds), (
        "new weights draw anew"
    )


def test_one_sample():
    state = {
        "message_log": batch_of({})["message_log"][0],
        "extra_env_info": {"turns": 2},
        "task_name": "other",
        "idx": 7,
    }
    play = run_sample_multi_turn_rollout(
        3, state, FakeGenerator(by_seed), TOKENIZER, {"other": Counting(parts=True)}, 64
    )
    final, metrics = asyncio.run(play)
    assert final["idx"] == 3
    assert final["total_reward"].item() == 1.0
    assert (final["reward/low"].item(), final["reward/high"].item()) == pytest.approx((0.2, 0.8))
    assert (
        metrics["turn_count"],
        metrics["terminated"],
        metrics["truncated"],
        metrics["failed"],
    ) == (2, True, False, False)
    assert metrics["assistant_tokens"] == sum(metrics["turn_gen_tokens"])
    assert metrics["env_tokens"] == 3


def test_post_processing_changes_the_batch_and_never_its_rows():
    class Doubling(Counting):
        def global_post_process_and_metrics(self, batch):
            batch["total_reward"] = 2 * batch["total_reward"]
            return batch, {"rows": batch["idx"]}

    class Losing(Counting):
        def global_post_process_and_metrics(self, batch):
            return batch.slice(0, 0), {}

    start = lambda: batch_of({"turns": 1}, {"turns": 2, "task": "other"}, {"turns": 3})  # noqa: E731
    policy = FakeGenerator(lambda *_: [*ids("a"), EOS])
    for rollout in BOTH:
        batch, metrics = rollout(
            policy, start(), TOKENIZER, {"count": Doubling(), "other": Counting()}, 64
        )
        assert batch["total_reward"].tolist() == [1.0, 1.0, 3.0]
        assert batch["idx"] == [0, 1, 2]
        assert (metrics["count/rows"], metrics["other/rows"]) == ([0, 2], 1)
        with pytest.raises(DataError, match="got 2 rows and returned 0"):
            rollout(policy, start(), TOKENIZER, {"count": Losing(), "other": Counting()}, 64)


class Meeting(Counting):
    """Steps only while the other environments of the barrier step too."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier = barrier

    def step(self, message_log_batch, metadata):
        self.barrier.wait(timeout=60)
        return super().step(message_log_batch, metadata)


def test_environments_of_different_tasks_step_concurrently():
    barrier = threading.Barrier(2)
    environments = {"count": Meeting(barrier), "other": Meeting(barrier)}
    batch = batch_of({"turns": 2}, {"turns": 2, "task": "other"}, {"turns": 2})
    policy = FakeGenerator(lambda *_: [*ids("a"), EOS])
    played, _ = run_multi_turn_rollout(policy, batch, TOKENIZER, environments, 64)
    assert played["total_reward"].tolist() == [1.0, 1.0, 1.0]
    assert calculate_rewards(batch, environments).rewards.tolist() == [0.5, 0.5, 0.5]
    assert environments["count"].calls == [2, 2, 2]


def test_raw_observations_continue_the_turn_with_their_own_tokens():
    class Raw(Counting):
        raw_observations = True

    policy = FakeGenerator(lambda *_: [*ids("a"), EOS])
    for rollout in BOTH:
        start = batch_of({"turns": 2})
        batch, _ = rollout(policy, start, TOKENIZER, {"count": Raw()}, 64)
        (log,) = batch["message_log"]
        prompt = log[0]["token_ids"].tolist()
        assert log[2]["token_ids"].tolist() == ids("<1>")
        assert policy.requests[-1][0] == [*prompt, *ids("a"), EOS, *ids("<1>")]
    end = [Message("user", EOS_TEXT)]
    assert get_log_renderer(TOKENIZER).encode_raw(ids("a"), end, allow_special=True) == [EOS]


def test_cut_answers_are_judged_where_the_environment_asks():
    class Judging(Counting):
        judges_cut_answers = True

    answers = iter([[*ids("ab"), EOS], ids("abcd"), [*ids("ab"), EOS], ids("abcd")])
    for rollout in BOTH:
        policy = FakeGenerator(lambda *_: next(answers))
        batch, metrics = rollout(
            policy, batch_of({"turns": 9}), TOKENIZER, {"count": Judging()}, 12
        )
        (log,) = batch["message_log"]
        assert batch["total_reward"].tolist() == [1.0]
        assert batch["truncated"].tolist() == [True]
        assert [entry["content"] for entry in log[1:]] == ["ab", "<1>", "abcd", "<2>"]
        assert batch["extra_env_info"][0]["turn"] == 2
        assert metrics["natural_termination_rate"] == 0


@pytest.mark.slow
def test_an_environment_may_be_a_ray_actor(ray_token, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", ray_token)
    import ray

    ray.shutdown()  # other tests keep theirs
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
    )
    try:
        actor = ray.remote(Counting).remote(parts=True)
        batch, metrics = run_multi_turn_rollout(
            FakeGenerator(by_seed), mixed(), TOKENIZER, {"count": actor, "other": actor}, 64, 4
        )
        expected, expected_metrics = run_multi_turn_rollout(
            FakeGenerator(by_seed),
            mixed(),
            TOKENIZER,
            dict.fromkeys(("count", "other"), Counting(parts=True)),
            64,
            4,
        )
        assert "the maze is on fire" in "".join(filter(None, batch["failed"]))
        del batch["failed"], expected["failed"]
        assert flat(batch) == flat(expected)
        assert flat(metrics) == flat(expected_metrics)
    finally:
        ray.shutdown()


def test_what_is_no_rows_fault_goes_up():
    def broken(tokens, sampling):
        raise RuntimeError("out of memory")

    for rollout in BOTH:
        for policy in (FakeGenerator(broken), Batched(broken)):
            with pytest.raises(RuntimeError, match="out of memory"):
                rollout(policy, mixed(), TOKENIZER, {"count": Counting(), "other": Counting()}, 64)
        with pytest.raises(
            DataError, match=r"No environment found for task type: other.*task_to_env has 'count'"
        ):
            rollout(FakeGenerator(by_seed), mixed(), TOKENIZER, {"count": Counting()}, 64)
        bare = BatchedDataDict(
            {"message_log": [[{"role": "user", "content": "hi"}]], "task_name": ["count"]}
        )
        with pytest.raises(DataError, match=r"message_log\[0\] has no tensor `token_ids`"):
            rollout(FakeGenerator(by_seed), bare, TOKENIZER, {"count": Counting()}, 64)


def test_a_running_event_loop_is_not_blocked():
    async def inside():
        run_multi_turn_rollout(FakeGenerator(by_seed), mixed(), TOKENIZER, {}, 64)

    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        asyncio.run(inside())


def test_a_tokenizer_of_transformers_serves_as_well():
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER._backend, **TOKENIZER.special_tokens
    )
    found = []
    for tokenizer in (TOKENIZER, theirs):
        policy = WithSampling(FakeGenerator(by_seed), Sampling(seed=1))
        datum = make_datum(
            [{"role": "user", "content": "hi"}],
            tokenizer,
            task_name="count",
            extra_env_info={"turns": 3},
        )
        batch, metrics = run_multi_turn_rollout(
            policy, collate([datum]), tokenizer, {"count": Counting()}, 64
        )
        found.append((flat(causes(batch)), flat(metrics)))
    assert found[0] == found[1]


class PythonTokenizer:
    """A tokenizer without a fast backend, as those that are written in Python."""

    eos_token_id, pad_token_id = 2, 0

    def batch_decode(self, sequences, *, skip_special_tokens=True):
        return [f"{len(tokens)} tokens" for tokens in sequences]


def test_answers_are_decoded_by_a_tokenizer_without_a_backend():
    batch = BatchedDataDict({"message_log": [[]], "stop_strings": [None]})
    data = BatchedDataDict({"input_ids": torch.tensor([[5]]), "input_lengths": torch.tensor([1])})
    policy = FakeGenerator(by_seed)
    batch, (tokens,), _ = generate_responses(
        policy, data, batch, PythonTokenizer(), torch.tensor([1])
    )
    assert batch["message_log"][0][0]["content"] == f"{len(tokens)} tokens"
