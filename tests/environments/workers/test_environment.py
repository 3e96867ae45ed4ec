"""Attempts that are played in worker processes: real ones, that really die."""

import asyncio
import copy
import os
import select
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.data.codec import TYPE_KEY, from_plain
from ratchet.environments.build import build_environment
from ratchet.environments.workers.pool import compute_backoff_s
from ratchet.environments.workers.process import EnvironmentProcessLost, EnvironmentRaised
from ratchet.environments.workers.protocol import pack
from ratchet.errors import DataError
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.protocols import Step
from ratchet.rewards.deadline import Deadline
from ratchet.testing import check_environment
from ratchet.testing.fakes import FakeGenerator, TextOnlyMixin
from ratchet.types import Failed, Message, Part, Sampling, Scored, Task, ToolCall
from ratchet.utils import credentials

TROUBLE = "environments.troublesome:Troublesome"
TESTS = str(Path(__file__).resolve().parents[2])


def made(worker=TROUBLE, processes=1, threads=2, **keys):
    section = {"kind": worker, **keys} if isinstance(worker, str) else worker
    return build(
        resolve(
            "environment",
            {"kind": "workers", "worker": section, "processes": processes, "threads": threads},
        )
    )


def copies(environment, count):
    return [copy.copy(environment) for _ in range(count)]


async def tell(environment, text):
    step = await environment.step(Message("assistant", text))
    return step.messages[0].text if step.messages else ""


async def where(environment):
    return await tell(environment, "where")


async def pid_of(environment):
    return int((await where(environment)).split()[0])


def begun(environment, text):
    return asyncio.ensure_future(tell(environment, text))


class Watched:
    """A process, to see it end, even as a child of nobody's."""

    def __init__(self, pid):
        self.pid, self.descriptor = pid, os.pidfd_open(pid)

    def lives(self, wait_s=0.0):
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return not poll.poll(1000 * wait_s)

    def ends(self):
        return not self.lives(wait_s=60.0)


# --- the same episodes


GAMES = {
    "sokoban": st.sampled_from(["up", "down", "left", "I go right", "jump", ""]),
    "sliding_puzzle": st.sampled_from(["u", "down", "left", "r", "?"]),
    "frozen_lake": st.sampled_from(["up", "d", "left", "right", "fly"]),
    "number_guessing": st.integers(-1, 40).map(str) | st.just("none"),
}


@pytest.fixture(scope="module")
def games():
    return {kind: made({"kind": kind}) for kind in GAMES}


async def episode(environment, task, says):
    seen = [tuple(await environment.reset(task))]
    for text in says:
        seen.append(await environment.step(Message("assistant", text)))
        if seen[-1].done:
            break
    return seen


@pytest.mark.medium
@pytest.mark.parametrize("kind", GAMES)
@hypothesis_settings(max_examples=25)
@given(data=st.data())
def test_the_same_answers_give_the_same_episode_as_without_workers(games, kind, data):
    index, says = data.draw(st.integers(0, 30)), data.draw(st.lists(GAMES[kind], max_size=40))
    split = data.draw(st.sampled_from(["train", "test"]))
    task = next(games[kind].tasks(split, seed=3, start=index))
    here = build(resolve("environment", {"kind": kind}))
    assert asyncio.run(episode(games[kind], task, says)) == asyncio.run(episode(here, task, says))


def test_attempts_at_once_do_not_share_their_state(games):
    async def both():
        one, other = copies(games["number_guessing"], 2)
        tasks = list(islice(one.tasks("train", seed=0), 2))
        here = [await episode(build(one.config.worker), task, ["5"] * 3) for task in tasks]
        at_once = await asyncio.gather(
            *(episode(e, t, ["5"] * 3) for e, t in zip((one, other), tasks, strict=True))
        )
        assert list(at_once) == here

    asyncio.run(both())


@pytest.mark.parametrize("kind", ["sokoban", "number_guessing"])
def test_the_kit(games, kind):
    check_environment(games[kind], n=10)


# --- who plays where


@pytest.mark.medium
def test_processes_start_when_they_are_needed_and_new_attempts_go_where_the_fewest_play():
    async def play():
        environment = made(processes=2, threads=2)
        task = environment.local.task()
        players = copies(environment, 4)
        places = []
        for player in players:
            await player.reset(task)
            places.append(tuple((await where(player)).split()))
        first, second = places[0][0], places[1][0]
        assert [place[0] for place in places] == [first, second, first, second]
        assert len(set(places)) == 4, "each has a thread of its own"
        await players[1].close()
        await players[3].step(Message("assistant", "end"))
        for player in copies(environment, 2):
            await player.reset(task)
            assert str(await pid_of(player)) == second
            players.append(player)

    asyncio.run(play())


@pytest.mark.medium
def test_one_attempt_needs_one_process_and_an_instance_keeps_its_place_and_begins_anew():
    async def play():
        environment = made(processes=3)
        task = environment.local.task()
        places, counts = set(), []
        for _ in range(3):
            await environment.reset(task)
            counts.append(await tell(environment, "count"))
            places.add(await where(environment))
        assert len(places) == 1
        assert counts == ["1"] * 3

    asyncio.run(play())


@pytest.mark.medium
def test_attempts_that_block_do_so_side_by_side():
    async def play():
        one, other = copies(made(threads=2), 2)
        for player in (one, other):
            await player.reset(one.local.task())
        await asyncio.wait_for(asyncio.gather(tell(one, "meet"), tell(other, "meet")), 60)

    asyncio.run(play())


@pytest.mark.medium
def test_more_attempts_than_threads_share_them():
    async def play():
        environment = made(threads=2)
        players = copies(environment, 5)
        waiting = []
        for player in players:
            await player.reset(environment.local.task())
        for player in players[:4]:
            waiting.append(begun(player, "await"))
        assert await tell(players[4], "say on") == "on"
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await players[0].reset(environment.local.task())
        assert await pid_of(players[0]) == await pid_of(players[4]), (
            "a call that ends when it is cancelled does no harm"
        )

    asyncio.run(play())


@pytest.mark.medium
def test_a_worker_is_light_and_does_not_write_to_the_drivers_output():
    async def play():
        environment = made()
        await environment.reset(environment.local.task())
        return [await tell(environment, f"look {name}") for name in ("torch", "threads", "stdout")]

    assert asyncio.run(play()) == ["False", "1", "True"]


@pytest.mark.medium
def test_a_part_of_a_mixture_can_be_played_by_workers():
    own = {"kind": "workers", "worker": {"kind": "number_guessing"}, "processes": 1, "tag": "far"}
    mixed = build(
        resolve("environment", {"kind": "mixture", "parts": [{"kind": "number_guessing"}, own]})
    )

    async def play():
        near, far = islice(mixed.tasks("train", seed=0), 2)
        assert (near.tag, far.tag) == ("number_guessing", "far")
        assert near.meta == far.meta
        assert await episode(mixed, near, ["5"] * 9) == await episode(mixed, far, ["5"] * 9)
        await mixed.close()

    asyncio.run(play())


# --- what goes wrong


@pytest.mark.medium
@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            "raise boom",
            r'(?s)in worker process \d+:.*troublesome\.py", line \d+, in do_raise.*ValueError: '
            r"boom",
        ),
        ("raise exit", "SystemExit: exit"),
        ("raise cancel", "CancelledError: cancel"),
        ("return object", "<object object at .* can't be sent"),
    ],
)
def test_what_it_raises_arrives_with_its_traceback_and_costs_no_other_attempt(says, message):
    async def play():
        one, other = copies(made(), 2)
        for player in (one, other):
            await player.reset(one.local.task())
        with pytest.raises(EnvironmentRaised, match=message):
            await tell(one, says)
        assert await tell(other, "say on") == "on"
        await one.reset(one.local.task())
        assert await pid_of(one) == await pid_of(other)

    asyncio.run(play())


@pytest.mark.medium
def test_a_process_that_it_forks_answers_nothing():
    async def play():
        (player,) = copies(made(), 1)
        await player.reset(player.local.task())
        pid = await pid_of(player)
        return pid, [await tell(player, "fork") for _ in range(3)], await pid_of(player)

    pid, answers, last_pid = asyncio.run(play())
    assert answers == [f"{pid} parent"] * 3
    assert last_pid == pid


@pytest.mark.medium
def test_what_is_no_step_is_judged_by_the_driver():
    async def play():
        environment = made()
        await environment.reset(environment.local.task())
        return await environment.step(Message("assistant", "return none"))

    assert asyncio.run(play()) is None


@pytest.mark.medium
@pytest.mark.fault("P21")
def test_a_process_that_dies_takes_its_own_attempts_along_and_no_others():
    async def play():
        one, other, with_one, with_other = players = copies(made(processes=2), 4)
        for player in players:
            await player.reset(one.local.task())
        lost, kept = await pid_of(one), await pid_of(other)
        waits = begun(with_one, "await")
        died = rf"worker process {lost} died \(SIGKILL, sent by .*memory ran out\)"
        with pytest.raises(EnvironmentProcessLost, match=died):
            await tell(one, "die kill")
        with pytest.raises(EnvironmentProcessLost, match=died):
            await waits
        with pytest.raises(EnvironmentProcessLost, match=died):
            await tell(with_one, "say later")
        assert [await pid_of(player) for player in (other, with_other)] == [kept, kept]
        for player in (one, with_one):
            await player.close()
        await one.reset(one.local.task())
        assert await pid_of(one) not in (lost, kept)

    asyncio.run(play())


@pytest.mark.medium
def test_a_task_of_the_environments_own_that_exits_ends_the_process():
    async def play():
        environment = made()
        await environment.reset(environment.local.task())
        with pytest.raises(EnvironmentProcessLost, match=r"died \(exit status 1\)"):
            await tell(environment, "leave")

    asyncio.run(play())


@pytest.mark.medium
@pytest.mark.fault("P2")
def test_a_process_killed_from_outside_between_two_turns():
    async def play():
        environment = made()
        await environment.reset(environment.local.task())
        pid = await pid_of(environment)
        watched = Watched(pid)
        os.kill(pid, signal.SIGKILL)
        assert watched.ends()
        with pytest.raises(
            EnvironmentProcessLost,
            match=rf"{pid} died \(SIGKILL, sent by another process, or by the kernel because "
            r"memory ran out\)",
        ):
            await tell(environment, "say on")

    asyncio.run(play())


@pytest.mark.medium
def test_an_environment_that_can_not_be_made_there_says_why():
    async def play():
        environment = made(broken=True)
        for _ in range(2):
            with pytest.raises(
                EnvironmentProcessLost,
                match=r"(?s)could not be created in a worker process.*OSError: no licence",
            ):
                await environment.reset(environment.local.task())
        await environment.close()

    asyncio.run(play())


@pytest.mark.slow
@pytest.mark.fault("R12")
def test_a_thread_that_hangs_in_a_cancelled_call_retires_its_process_when_the_others_there_have_ended():
    async def play():
        hangs, plays_on, beside = copies(made(threads=2), 3)
        task = hangs.local.task()
        for player in (hangs, plays_on, beside):  # the third shares the first one's thread
            await player.reset(task)
        old = await pid_of(plays_on)
        watched = Watched(old)
        call = begun(hangs, "hang")
        lost = begun(beside, "say never")
        watch = copy.copy(hangs)
        await watch.reset(task)  # beside `plays_on`
        await tell(watch, "until")
        call.cancel()
        with pytest.raises(
            EnvironmentProcessLost,
            match="is given up: another call, which was cancelled, hangs in its thread 0",
        ):
            await lost
        newcomer = copy.copy(hangs)
        await newcomer.reset(task)
        assert await pid_of(newcomer) != old
        assert await pid_of(plays_on) == old
        await asyncio.gather(hangs.close(), beside.close())
        assert watched.lives()
        await tell(plays_on, "end")
        assert watched.ends()
        assert await tell(newcomer, "say on") == "on"

    asyncio.run(play())


@pytest.mark.medium
@pytest.mark.fault("R12")
def test_a_process_in_which_attempts_leave_files_open_is_replaced_when_they_are_over(
    monkeypatch, caplog
):
    monkeypatch.setattr("ratchet.environments.workers.process.MAX_LEAKED", 20)

    async def play():
        leaks, plays_on = copies(made(threads=2), 2)
        task = leaks.local.task()
        for player in (leaks, plays_on):
            await player.reset(task)
        old = await pid_of(leaks)
        watched = Watched(old)
        for count in (0, 15, 15):  # what is there after the first is not a leak
            await leaks.reset(task)
            assert await pid_of(leaks) == old
            await tell(leaks, f"leak {count}")
        assert await pid_of(plays_on) == old, "its attempt goes on there"
        await leaks.reset(task)
        assert await pid_of(leaks) != old
        await tell(plays_on, "end")
        assert watched.ends()

    asyncio.run(play())
    assert "is replaced: since its first attempt it has" in caplog.text
    assert "30 more file descriptors" in caplog.text


@pytest.mark.slow
@pytest.mark.fault("P16")
def test_the_next_process_waits_where_one_after_the_other_dies(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "ratchet.environments.workers.pool.compute_backoff_s",
        lambda deaths: asked.append(deaths) or 0.0,
    )

    async def play():
        environment = made(broken=True)
        for _ in range(3):
            with pytest.raises(EnvironmentProcessLost):
                await environment.reset(environment.local.task())
        works = made()
        for _ in range(2):
            await works.reset(works.local.task())
            with pytest.raises(EnvironmentProcessLost):
                await tell(works, "die exit")

    asyncio.run(play())
    assert asked == [0, 1, 2, 0, 1], "an answer ends the row"


def test_how_long_it_waits():
    assert [compute_backoff_s(deaths) for deaths in (0, 3, 4, 5, 40)] == [0.0, 0.0, 0.2, 0.4, 30.0]


@pytest.mark.slow
@pytest.mark.fault("R2")
def test_a_hanging_process_in_which_nobody_plays_is_killed_at_once():
    async def play():
        hangs, watch = copies(made(threads=2), 2)
        for player in (hangs, watch):
            await player.reset(hangs.local.task())
        watched = Watched(await pid_of(hangs))
        call = begun(hangs, "hang")
        await tell(watch, "until")
        call.cancel()
        assert await asyncio.to_thread(watched.ends)
        await watch.reset(hangs.local.task())
        assert await tell(watch, "say on") == "on"

    asyncio.run(play())


@pytest.mark.slow
def test_a_new_attempt_waits_for_a_hanging_thread_only_until_it_is_given_up():
    async def play():
        hangs, new = copies(made(threads=1), 2)
        await hangs.reset(hangs.local.task())
        old = await pid_of(hangs)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tell(hangs, "hog"), 0.5)
        await new.reset(hangs.local.task())
        assert await pid_of(new) != old

    asyncio.run(play())


# --- in a rollout


class Codes(TextOnlyMixin):
    """Renders a text as the codes of its characters; 0 ends a turn."""

    def prompt(self, messages, tools=None):
        return [ord(c) for m in messages for c in m.text]

    def parse(self, tokens, stop):
        return Message("assistant", "".join(chr(t) for t in tokens if t))


def rolled_out(environment, says, *, retries=0, timeout_s=None):
    generator = FakeGenerator(lambda tokens, sampling: [*map(ord, says), 0])
    player = EpisodePlayer(generator, Codes(), max_context=64, timeout_s=timeout_s)
    manager = RolloutManager(player, lambda: copy.copy(environment), None, retries=retries)

    async def play():
        task = next(environment.tasks("train", seed=0))
        group = await manager.group(
            task, Sampling(max_new_tokens=20, stop_ids=(0,)), group_id="g", attempts=1
        )
        await manager.close()
        return group.trajectories[0]

    return asyncio.run(play())


@pytest.mark.medium
def test_a_death_is_a_failure_of_the_infrastructure_that_is_played_again(tmp_path):
    environment = made(marker=str(tmp_path / "died"))
    played = rolled_out(environment, "end", retries=1)
    assert played.outcome == Scored(1.0)
    assert played.metrics["retries"] == 1
    (tmp_path / "died").unlink()
    failed = rolled_out(environment, "end").outcome
    assert isinstance(failed, Failed)
    assert failed.kind == "environment"
    assert (
        "died (SIGKILL, sent by another process, or by the kernel because memory ran out)"
        in failed.detail
    )


@pytest.mark.medium
def test_the_record_of_a_failed_attempt_holds_the_traceback_of_the_worker():
    failed = rolled_out(made(), "raise boom").outcome
    assert isinstance(failed, Failed)
    assert "in do_raise" in failed.detail
    assert "ValueError: boom" in failed.detail


@pytest.mark.slow
@pytest.mark.fault("R2")
def test_a_deadline_reaches_an_environment_that_blocks():
    failed = rolled_out(made(), "hang", timeout_s=3.0).outcome
    assert isinstance(failed, Failed)
    assert failed.kind == "timeout"


# --- the end


@pytest.mark.medium
@pytest.mark.fault("R12")
def test_processes_end_with_the_last_instance():
    async def play():
        environment = made(processes=2)
        players = copies(environment, 2)
        for player in players:
            await player.reset(environment.local.task())
        return players, [Watched(await pid_of(player)) for player in players]

    players, watched = asyncio.run(play())
    players.pop()
    assert all(process.lives() for process in watched)
    players.clear()
    assert all(process.ends() for process in watched)


DRIVER = f"""
import asyncio, copy, sys
sys.path.insert(0, {TESTS!r})
from ratchet.config.resolve import build, resolve
from ratchet.types import Message

of = {{"kind": {TROUBLE!r}}}
environment = build(resolve("environment", {{"kind": "workers", "worker": of, "processes": 2, "threads": 1}}))

async def play():
    players = [copy.copy(environment), copy.copy(environment)]
    for player in players:
        await player.reset(environment.local.task())
        print((await player.step(Message("assistant", "where"))).messages[0].text.split()[0], flush=True)
    calls = [asyncio.ensure_future(p.step(Message("assistant", t))) for p, t in zip(players, ["hog", "hang"])]
    await asyncio.to_thread(sys.stdin.readline)
    sys.exit(7)

asyncio.run(play())
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_no_process_outlives_the_driver(end):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", DRIVER], text=True, **pipes) as driver:
        watched = [Watched(int(driver.stdout.readline())) for _ in range(2)]
        assert all(process.lives() for process in watched)
        assert driver.stderr.readline() == "hogs\n", "what an environment prints goes there"
        if end == "kill":
            driver.kill()
        else:
            driver.stdin.write("\n")
            driver.stdin.flush()
        outlived = [process.pid for process in watched if not process.ends()]
        for pid in outlived:
            os.kill(pid, signal.SIGKILL)
        assert not outlived
        assert driver.communicate() == ("", "")
    assert driver.returncode == (-signal.SIGKILL if end == "kill" else 7)


# --- what it offers


def test_it_offers_what_the_environment_offers_and_nothing_else():
    for kind in ("sorting", "sokoban", "environments.troublesome:Offering"):
        inner = build_environment(resolve("environment", {"kind": kind}))
        wrapped = made({"kind": kind})
        for offer in ("has_tools", "has_pairs", "has_labelled_answers", "has_step_labels"):
            assert getattr(wrapped, offer) == getattr(inner, offer)
        assert wrapped.task_count() == inner.task_count()
    arithmetic = made({"kind": "arithmetic"})
    task = next(arithmetic.tasks("train", seed=0))
    assert arithmetic.demonstration(task) == arithmetic.local.demonstration(task)
    assert arithmetic.comparison(task) == arithmetic.local.comparison(task)
    assert arithmetic.labelled_answer(task) == arithmetic.local.labelled_answer(task)
    assert arithmetic.steps(task) == arithmetic.local.steps(task)


@pytest.mark.medium
def test_tools_and_stop_strings_are_those_of_the_instance_that_plays():
    async def play():
        environment = made("environments.troublesome:Offering")
        task = environment.local.task()
        environment.local.turns = 5
        assert environment.tools(task)[0]["function"]["name"] == "after_5"
        await environment.reset(task)
        assert environment.stop_strings == ("stop_0",)
        await tell(environment, "say on")
        assert environment.stop_strings == ("stop_1",)
        assert environment.tools(task)[0]["function"]["name"] == "after_0"
        assert environment.measure([]) == {"groups": 0.0}
        assert await environment.reward_cut_attempt([Message("user", "a")]) == 0.25
        assert environment.raw_observations
        await environment.close()
        assert environment.tools(task)[0]["function"]["name"] == "after_5"

    asyncio.run(play())


def test_its_section_is_judged_as_the_environments_own():
    def section(**keys):
        return resolve("environment", {"kind": "workers", **keys})

    assert section(worker={"kind": "arithmetic"}).default_reward == "exact_match"
    assert (
        section(worker={"kind": "arithmetic"}).data_kinds
        == resolve("environment", {"kind": "arithmetic"}).data_kinds
    )
    assert not section(worker={"kind": "preferences", "train": "t.jsonl"}).returns_rewards
    with pytest.raises(ValidationError, match="'workers' is unknown"):
        section(worker={"kind": "workers", "worker": {"kind": "sokoban"}})
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        section(worker={"kind": "sokoban"}, threads=0)


@pytest.mark.medium
def test_the_credentials_of_the_run_are_there_too(monkeypatch):
    monkeypatch.setattr(credentials, "_environment", {"KEY": "secret"})

    async def play():
        environment = made()
        await environment.reset(environment.local.task())
        return await tell(environment, "credential KEY")

    assert asyncio.run(play()) == "secret"


# --- what travels


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just(TYPE_KEY), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=12,
)


@pytest.mark.medium
@hypothesis_settings(max_examples=50)
@given(answer=VALUES, meta=st.dictionaries(st.text(), VALUES))
def test_a_task_arrives_as_it_was(answer, meta):
    call = ToolCall("c", "f", {"x": answer})
    messages = (
        Message("user", (Part("text", "é"), Part("image", "a.png"))),
        Message("assistant", "", (call,)),
    )
    task = Task("t", messages, answer=answer, seed=3, meta=meta)
    arrived = from_plain(pack(task).load_json())
    assert arrived == task
    assert repr(arrived) == repr(task), "a list is not a tuple"
    step = Step(messages, reward=0.5, done=True, state_key="k", metrics={"m": 1.0})
    assert from_plain(pack(step).load_json()) == step


def test_what_can_not_travel_is_refused_by_its_name():
    async def play():
        environment = made()
        with pytest.raises(
            DataError, match=r"\{1\} of type set can't be sent to or from a worker process"
        ):
            await environment.reset(environment.local.task(numbers={1}))

    asyncio.run(play())


@pytest.mark.medium
def test_a_program_that_a_worker_judges_pauses_the_drivers_deadline():
    async def main():
        environment = made()
        first, second = copies(environment, 2)
        await first.reset(first.local.task())
        await second.reset(first.local.task())
        async with Deadline(1000) as deadline:
            before = deadline._timeout.when()
            judging = asyncio.ensure_future(tell(first, "judge"))
            while deadline._timeout.when() is not None:
                await asyncio.sleep(0)
            await tell(second, "free")
            assert await judging == "1000"
            assert deadline._timeout.when() > before, "it goes on where it stood"
            judging = asyncio.ensure_future(tell(first, "judge"))
            await judging
            lost = asyncio.ensure_future(tell(first, "die kill"))
            with pytest.raises(EnvironmentProcessLost):
                await lost
            assert deadline._timeout.when() is not None
        await first.close()
        await second.close()

    asyncio.run(asyncio.wait_for(main(), 60))
