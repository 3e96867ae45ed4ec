"""Given text as groups: tokens and columns of each row, order of groups, refusals, and what a
resumed source draws again."""

import asyncio
import itertools
import json
from itertools import islice
from typing import Any

import numpy as np
import pytest

from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.data.packing import pack
from ratchet.errors import ConfigError, DataError
from ratchet.experience.sources.offline import (
    LabelledSource,
    PairSource,
    SteppedSource,
    SupervisedSource,
    TextRenderer,
)
from ratchet.experience.sources.tasks import TaskStream
from ratchet.testing.fakes import FakeEnvironment
from ratchet.types import Comparison, LabelledAnswer, Message, Owner, Scored, Task, Turn

TOKENIZER = character_tokenizer()
RENDERER = Renderer(TOKENIZER, "turns")
SYSTEM = Message("system", "s")


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> tuple[Message, ...]:
    return (Message("assistant", text),)


class Given(FakeEnvironment):
    """Task i asks "i?"; everything that is given for it names i."""

    rewards: tuple[float, float] | None = None

    def tasks(self, split, *, seed, start=0):
        return (Task(f"t{i}", (SYSTEM, user(f"{i}?")), answer=i) for i in range(start, 10**6))

    def demonstration(self, task):
        return (*said(f"no {task.answer}"), user("sure?"), *said(f"yes {task.answer}"))

    def comparison(self, task):
        return Comparison(
            said(f"good {task.answer}"), said(f"bad {task.answer}"), rewards=self.rewards
        )

    def labelled_answer(self, task):
        return LabelledAnswer(said(f"judged {task.answer}"), reward=task.answer - 1.0)

    def steps(self, task):
        return [(f"first {task.answer}\n", 1.0), (f"then {task.answer}\n", 0.25)]


def writer(**settings) -> TextRenderer:
    return TextRenderer(RENDERER, **{"max_context": 64, **settings})


def pairs(environment=None, **settings) -> PairSource:
    return PairSource(TaskStream(environment or Given(), seed=0), "p", writer(**settings))


def labelled(uses_mismatched_pairs=True, **settings) -> LabelledSource:
    return LabelledSource(
        TaskStream(Given(), seed=0),
        "k",
        writer(**settings),
        uses_mismatched_pairs=uses_mismatched_pairs,
    )


def stepped(**settings) -> SteppedSource:
    return SteppedSource(TaskStream(Given(), seed=0), "s", writer(**settings))


def rows(train="all", **settings) -> SupervisedSource:
    return SupervisedSource(TaskStream(Given(), seed=0), "r", writer(**settings), train=train)


SOURCES: dict[str, Any] = {"pairs": pairs, "labelled": labelled, "steps": stepped, "rows": rows}


def draw(source, n):
    return asyncio.run(source.draw(n, version=3))


def shown(trajectory) -> str:
    """All of its text, with the special tokens."""
    return TOKENIZER.decode(trajectory.tokens.tolist(), skip_special=False)


def trained(trajectory) -> str:
    return TOKENIZER.decode(trajectory.tokens[trajectory.trainable].tolist(), skip_special=False)


def assert_columns_of_given_text(trajectory):
    """Nobody sampled it: the answer stands for the policy's, and neither logprobs nor versions are
    known."""
    n = len(trajectory.tokens)
    assert np.array_equal(trajectory.owner == Owner.POLICY, trajectory.trainable)
    assert np.array_equal(trajectory.owner == Owner.PROMPT, ~trajectory.trainable)
    assert np.array_equal(trajectory.rollout_logprobs, np.zeros(n, np.float32))
    assert np.array_equal(trajectory.versions, np.full(n, -1, np.int32))
    assert trajectory.log_kept_mass is None
    assert not trajectory.trainable[0]


# --- pairs


def test_a_pair_is_a_group_of_two_with_the_chosen_answer_first():
    first, second = draw(pairs(), 2)
    assert (first.id, first.task.id, second.id, second.task.id) == ("p/0", "t0", "p/1", "t1")
    chosen, rejected = second.trajectories
    assert shown(chosen) == "<system>s<user>1?<assistant>good 1<eos>"
    assert shown(rejected) == "<system>s<user>1?<assistant>bad 1<eos>"
    assert (trained(chosen), trained(rejected)) == ("good 1<eos>", "bad 1<eos>")
    assert (chosen.attempt, rejected.attempt) == (0, 1)
    for trajectory in (chosen, rejected):
        assert_columns_of_given_text(trajectory)
        assert trajectory.use == "train"
        assert trajectory.outcome is None
        assert trajectory.messages[:2] == second.task.messages


def test_rewards_of_a_pair_stand_beside_their_answers():
    environment = Given()
    environment.rewards = (0.75, -1.0)
    (group,) = draw(pairs(environment), 1)
    assert [t.outcome for t in group.trajectories] == [Scored(0.75), Scored(-1.0)]
    assert pack([group]).rewards_S.tolist() == [0.75, -1.0]


def test_only_the_last_message_of_an_answer_of_several_trains():
    class Conversations(Given):
        def comparison(self, task):
            return Comparison((*said("no"), user("sure?"), *said("yes")), said("well"))

    ((chosen, rejected),) = (group.trajectories for group in draw(pairs(Conversations()), 1))
    assert shown(chosen) == "<system>s<user>0?<assistant>no<eos><user>sure?<assistant>yes<eos>"
    assert (trained(chosen), trained(rejected)) == ("yes<eos>", "well<eos>")


# --- labelled answers


def test_a_labelled_answer_is_followed_by_the_next_tasks_answer_to_its_own_prompt():
    groups = draw(labelled(), 3)
    assert [group.id for group in groups] == ["k/0", "k/1", "k/2"]
    for index, group in enumerate(groups):
        own, reference = group.trajectories
        other = (index + 1) % 3
        assert shown(own) == f"<system>s<user>{index}?<assistant>judged {index}<eos>"
        assert shown(reference) == f"<system>s<user>{index}?<assistant>judged {other}<eos>"
        assert (own.use, own.attempt, own.outcome) == ("train", 0, Scored(index - 1.0))
        assert (reference.use, reference.attempt, reference.outcome) == ("reference", 1, None)
        assert trained(reference) == f"judged {other}<eos>"
        assert_columns_of_given_text(own)
        assert_columns_of_given_text(reference)


def test_reference_rows_are_predicted_and_never_train():
    batch = pack(draw(labelled(), 2))
    assert batch.train_S.tolist() == [True, False, True, False]
    assert batch.reference_S.tolist() == [False, True, False, True]
    by_row = [
        column.split(batch.lengths_S.tolist()) for column in (batch.trainable_T, batch.predicted_T)
    ]
    assert [row.any().item() for row in by_row[0]] == [True, False, True, False]
    assert all(row.any() for row in by_row[1])


def test_without_reference_rows_a_labelled_answer_stands_alone_and_one_task_is_enough():
    (group,) = draw(labelled(uses_mismatched_pairs=False), 1)
    (trajectory,) = group.trajectories
    assert trained(trajectory) == "judged 0<eos>"
    assert trajectory.reward == -1.0


def test_one_task_alone_has_no_other_answer_to_refer_to():
    with pytest.raises(DataError, match=r"a draw has only one prompt. Raise batch_size"):
        draw(labelled(), 1)


# --- answers in steps


def test_each_step_is_a_turn_with_its_label():
    groups = draw(stepped(), 2)
    ((trajectory,),) = (group.trajectories for group in groups[1:])
    assert groups[1].id == "s/1"
    assert shown(trajectory) == "<system>s<user>1?<assistant>first 1\nthen 1\n"
    assert trained(trajectory) == "first 1\nthen 1\n"
    start = len(RENDERER.prompt(groups[1].task.messages))
    assert trajectory.turns == (Turn(start, start + 8, 1.0), Turn(start + 8, start + 15, 0.25))
    assert trajectory.outcome is None
    assert_columns_of_given_text(trajectory)
    batch = pack(groups)
    ends = batch.turn_rewards_T[batch.turn_rewards_T.isfinite() & (batch.turn_rewards_T != 0)]
    assert set(ends.tolist()) == {1.0, 0.25}


# --- supervised rows


@pytest.mark.parametrize(
    ("train", "expected"), [("all", "no 0<eos>yes 0<eos>"), ("last", "yes 0<eos>")]
)
def test_a_demonstration_trains_in_every_turn_or_in_the_last(train, expected):
    ((trajectory,),) = (group.trajectories for group in draw(rows(train), 1))
    assert (
        shown(trajectory) == "<system>s<user>0?<assistant>no 0<eos><user>sure?<assistant>yes 0<eos>"
    )
    assert trained(trajectory) == expected
    assert trajectory.outcome is None
    assert_columns_of_given_text(trajectory)


# --- all of them


@pytest.mark.parametrize("kind", SOURCES)
def test_every_row_counts_as_sampled_under_the_writers_temperature(kind):
    for group in draw(SOURCES[kind](temperature=0.5), 2):
        assert {trajectory.temperature for trajectory in group.trajectories} == {0.5}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_row_longer_than_the_context_is_refused_by_the_name_of_its_task(kind):
    longest = max(len(t) for group in draw(SOURCES[kind](), 2) for t in group.trajectories)
    draw(SOURCES[kind](max_context=longest), 2)
    said = rf"task t\d: {longest} tokens, but the model holds {longest - 1}: shorten or drop it"
    with pytest.raises(DataError, match=said):
        draw(SOURCES[kind](max_context=longest - 1), 2)


def test_rows_longer_than_the_context_are_left_out_and_counted_where_the_data_ask_for_it(caplog):
    class Drops(Given):
        def tasks(self, split, *, seed, start=0):
            for i in itertools.count(start):  # every third is far too long
                yield Task(f"t{i % 6}", said("8" * (99 if i % 3 == 1 else 1)), answer=i % 6)

        def drops_too_long_rows(self, task):
            return True

    source = pairs(Drops(), max_context=40)
    assert [group.id for group in draw(source, 5)] == ["p/0", "p/2", "p/3", "p/5", "p/6"]
    logged = [record.getMessage() for record in caplog.records]
    assert [text.partition(";")[0] for text in logged] == [
        "too_long=drop: 1 row left out so far",
        "too_long=drop: 2 rows left out so far",
    ]
    assert "tokens, but the model holds 40" in logged[0]
    # A resumed run draws the same rows.
    state = asyncio.run(source.snapshot())
    resumed = pairs(Drops(), max_context=40)
    asyncio.run(resumed.restore(state))
    assert [group.id for group in draw(resumed, 6)] == ["p/0", "p/2", "p/3", "p/5", "p/6", "p/8"]


def test_data_of_long_rows_alone_are_an_error(monkeypatch):
    monkeypatch.setattr("ratchet.experience.sources.long_rows.MAX_DROPPED", 5)
    environment = Given()
    environment.drops_too_long_rows = lambda task: True
    with pytest.raises(DataError, match="the last 5 rows are too long; task t"):
        draw(pairs(environment, max_context=2), 1)


@pytest.mark.parametrize(
    ("source", "method"),
    [
        (PairSource, "comparison"),
        (lambda *a: LabelledSource(*a, uses_mismatched_pairs=True), "labelled_answer"),
        (SteppedSource, "steps"),
    ],
)
def test_an_environment_without_what_is_learned_from_is_refused_before_anything_is_drawn(
    source, method
):
    stream = TaskStream(FakeEnvironment(), seed=0)
    with pytest.raises(
        ConfigError,
        match=rf"^environment FakeEnvironment has no {method}\(task\), which this algorithm",
    ):
        source(stream, "x", writer())


@pytest.mark.parametrize("kind", SOURCES)
def test_a_resumed_source_draws_what_was_pending_again_and_then_goes_on(kind):
    source = SOURCES[kind]()
    name = source.name
    first, second = draw(source, 2), draw(source, 3)
    source.ack([group.id for group in [*first, second[1]]], step=1)
    state = json.loads(json.dumps(asyncio.run(source.snapshot())))
    assert state == {"position": 5, "pending": [2, 4], "ledger": 0}

    resumed = SOURCES[kind]()
    asyncio.run(resumed.restore(state))
    assert asyncio.run(resumed.snapshot()) == state
    again = draw(resumed, 3)
    assert [group.id for group in again] == [f"{name}/2", f"{name}/4", f"{name}/5"]
    before = {group.id: group for group in second}
    for group in again[:2]:
        assert shown(group.trajectories[0]) == shown(before[group.id].trajectories[0])
    resumed.ack([group.id for group in again], step=2)
    assert asyncio.run(resumed.snapshot()) == {"position": 6, "pending": [], "ledger": 0}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_refused_group_comes_again_before_anything_new(kind):
    source = SOURCES[kind]()
    drawn = draw(source, 3)
    source.nack([drawn[1].id], "worker lost")
    assert asyncio.run(source.snapshot()) == {"position": 3, "pending": [0, 1, 2], "ledger": 0}
    assert [group.task.id for group in draw(source, 2)] == ["t1", "t3"]


def test_groups_come_in_the_order_of_the_stream():
    source = pairs()
    ids = [group.task.id for n in (1, 3, 2) for group in draw(source, n)]
    assert ids == [task.id for task in islice(Given().tasks("train", seed=0), 6)]
