"""Environments of Gymnasium, gem, ROLL's style and verifiers, against the real packages."""

import asyncio
import copy
import logging
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from ratchet.environments.adapters.gem import GemConfig, GemEnvironment
from ratchet.environments.adapters.gymnasium import GymnasiumConfig, GymnasiumEnvironment
from ratchet.environments.adapters.verifiers import VerifiersConfig, VerifiersEnvironment
from ratchet.errors import ConfigError, DataError
from ratchet.testing import check_environment
from ratchet.types import Message, ToolCall
from ratchet.utils.user_code import UserCodeFailed

LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "actions": ("left", "down", "right", "up"),
}


async def episode(environment, task, says):
    """The text of the first message, and the steps."""
    first = await environment.reset(task)
    return first[-1].text, [await environment.step(Message("assistant", text)) for text in says]


def play(environment, says, *, split="test", position=0):
    task = next(environment.tasks(split, seed=0, start=position))
    return asyncio.run(episode(environment, task, says))


def texts(steps):
    return [step.messages[0].text if step.messages else None for step in steps]


# --- Gymnasium


def echo_environment():
    """A Gymnasium environment of text: says a word by the seed, and pays for it repeated twice.
    "stuck" is cut off."""
    import gymnasium

    letters = frozenset("abcdefghijklmnopqrstuvwxyz ")

    class Echo(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(40, charset=letters)
        action_space = gymnasium.spaces.Text(10, charset=letters)
        threads = set()  # noqa: RUF012

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.word = "".join(self.np_random.choice(["a", "b", "c"], 3))
            self.right = 0
            self.threads.add(threading.get_ident())
            return f"say {self.word}", {}

        def step(self, action):
            self.right += action == self.word
            return (
                f"heard {action}",
                0.5 * (action == self.word),
                self.right == 2,
                action == "stuck",
                {},
            )

    if "Echo-v0" not in gymnasium.registry:
        gymnasium.register("Echo-v0", entry_point=Echo)
    return Echo


@pytest.mark.slow
@pytest.mark.needs("gymnasium")
def test_frozen_lake_of_gymnasium_by_words():
    lake = GymnasiumEnvironment(GymnasiumConfig(**LAKE))
    check_environment(lake, n=20)
    first, steps = play(
        lake, ["go down", "Down!", "right", "hm", "down, no: right", "down", "right"]
    )
    assert first == "0"
    assert texts(steps) == ["4", "8", "9", "There is no such action.\n9", "10", "14", None]
    assert [step.state_key for step in steps] == ["0", "4", "8", "9", "9", "10", "14"]
    assert [step.metrics["illegal_moves"] for step in steps] == [0, 0, 0, 1, 0, 0, 0]
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 0, 1]
    assert [step.done for step in steps] == [False] * 6 + [True]


@pytest.mark.needs("gymnasium")
def test_what_is_shown_is_a_template_and_actions_may_be_numbers():
    settings = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False, "render_mode": "ansi"}}
    lake = GymnasiumEnvironment(
        GymnasiumConfig(**settings, prompt="Walk to G.\n{screen}", reply="Cell {observation}.")
    )
    first, steps = play(lake, ["1", "my choice is 2"])
    assert first.startswith("Walk to G.\n")
    assert first.replace("\x1b[41m", "").replace("\x1b[0m", "").split() == [
        "Walk",
        "to",
        "G.",
        "SFFF",
        "FHFH",
        "FFFH",
        "HFFG",
    ]
    assert texts(steps) == ["Cell 4.", None]  # a hole
    assert steps[-1].done
    assert steps[-1].reward == 0.0


@pytest.mark.slow
@pytest.mark.needs("gymnasium")
def test_an_environment_of_text_is_played_in_threads_by_independent_copies():
    kind = echo_environment()
    echo = GymnasiumEnvironment(GymnasiumConfig(id="Echo-v0", test_tasks=5))
    check_environment(echo, n=5)
    words = [play(copy.copy(echo), [], position=i)[0] for i in range(5)]
    assert len(set(words)) > 1

    async def at_once():
        tasks = list(echo.tasks("test", seed=0))
        return await asyncio.gather(
            *(
                episode(copy.copy(echo), task, [word.split()[1]] * 2)
                for task, word in zip(tasks, words, strict=True)
            )
        )

    for word, (first, steps) in zip(words, asyncio.run(at_once()), strict=True):
        assert first == word
        assert [step.reward for step in steps] == [0.5, 0.5]
        assert steps[-1].done
    assert threading.get_ident() not in kind.threads
    _, steps = play(echo, ["123", "stuck"])
    assert steps[0].metrics == {"illegal_moves": 1.0, "environment_truncated": 0.0}
    assert steps[1].metrics == {"illegal_moves": 0.0, "environment_truncated": 1.0}
    assert steps[1].done


@pytest.mark.needs("gymnasium")
@pytest.mark.parametrize(
    ("words", "says", "expected"),
    [
        ((), ["-1", "I choose −1.", "option-1", "0", "1", "-2"], [-1, -1, 1, 0, 1, None]),
        (
            ("turn left", "turn left twice", "-->"),
            ["Turn  left!", "turn left twice", "now -->", "turn lefty", "left"],
            [-1, 0, 1, None, None],
        ),
    ],
)
def test_an_action_may_be_negative_or_several_words(words, says, expected):
    import gymnasium

    class Dial(gymnasium.Env):
        observation_space = gymnasium.spaces.Discrete(1)
        action_space = gymnasium.spaces.Discrete(3, start=-1)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 0, {}

        def step(self, action):
            return 0, float(action), False, False, {}

    if "Dial-v0" not in gymnasium.registry:
        gymnasium.register("Dial-v0", entry_point=Dial)
    dial = GymnasiumEnvironment(GymnasiumConfig(id="Dial-v0", actions=words))
    steps = play(dial, says)[1]
    assert [None if step.metrics["illegal_moves"] else step.reward for step in steps] == expected


@pytest.mark.needs("gymnasium")
def test_an_episode_that_never_ends_ends_at_max_turns():
    lake = GymnasiumEnvironment(GymnasiumConfig(**LAKE, max_turns=3))
    assert [step.done for step in play(lake, ["left"] * 3)[1]] == [False, False, True]


@pytest.mark.needs("gymnasium")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "FrozenLake-v99"}, "FrozenLake-v99"),
        ({"id": "CartPole-v1"}, "its observations are Box"),
        (
            {"id": "FrozenLake-v1", "actions": ("left", "right")},
            "names 2 actions, but the actions of FrozenLake-v1 are",
        ),
        ({"id": "FrozenLake-v1", "prompt": "{screen}"}, "render_mode: ansi"),
        ({"id": "FrozenLake-v1", "kwargs": {"depth": 3}}, "depth"),
        ({"id": "nowhere_at_all:Maze-v0"}, "nowhere_at_all"),
    ],
)
def test_a_gymnasium_environment_that_is_no_text_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GymnasiumEnvironment(GymnasiumConfig(**settings))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (GymnasiumConfig, {"id": "x", "prompt": "go"}, "prompt has neither {observation} nor"),
        (GymnasiumConfig, {"id": "x", "actions": ("up", "Up")}, "repeat a word"),
        (GymnasiumConfig, {"id": "x", "actions": ("up", "down ")}, "'down ': write a word"),
        (GemConfig, {}, "set either id"),
        (GemConfig, {"id": "a", "path": "b:C"}, "set either id"),
        (GemConfig, {"path": "b.C"}, "String should match"),
    ],
)
def test_impossible_settings_are_refused(section, values, message):
    with pytest.raises(ValidationError, match=message):
        section(**values)


# --- gem, and what is written in its style


def test_a_class_in_the_style_of_roll_by_its_path(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    environment = GemEnvironment(
        GemConfig(path="doubling:Doubling", kwargs={"rounds": 3}, test_tasks=7)
    )
    check_environment(environment, n=7)
    first, steps = play(environment, ["x", "late"])
    assert first.startswith("Double what you are given.\nNumber: ")
    assert first.endswith("\nAnswer?")
    assert texts(steps)[0].startswith("Number: ")
    assert texts(steps)[0].endswith("\nAnswer?")
    assert steps[0].metrics == {"action_is_valid": 0.0, "environment_truncated": 0.0}
    assert steps[1].metrics == {"action_is_valid": 0.0, "environment_truncated": 1.0}
    assert steps[1].done
    number = int(first.split()[-2])
    assert play(environment, [str(2 * number)])[1][0].reward == 1.0


def test_an_environment_that_seeds_the_process_disturbs_nobody_and_is_disturbed_by_nobody(
    monkeypatch,
):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    environment = GemEnvironment(GemConfig(path="doubling:Doubling", kwargs={"rounds": 4}))
    alone = play(environment, ["1"] * 4)
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)

    async def interleaved():
        one, two = (next(environment.tasks("test", seed=0, start=i)) for i in (0, 1))
        return await asyncio.gather(
            *(episode(copy.copy(environment), task, ["1"] * 4) for task in (one, two, one))
        )

    first, other, again = asyncio.run(interleaved())
    assert first == again == alone
    assert other != alone
    assert (random.random(), np.random.random()) == expected


def test_stop_iteration_in_an_environments_thread_is_raised_and_hangs_nothing(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    environment = GemEnvironment(GemConfig(path="doubling:Exhausted"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        play(environment, ["1"])


def test_a_reward_that_is_text_is_no_number(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    environment = GemEnvironment(GemConfig(path="doubling:Textual"))
    with pytest.raises(
        DataError, match=r"step \(.*\) returned '0.0' as a reward, it must be a fin"
    ):
        play(environment, ["1"])


def test_what_can_be_no_metric_in_an_environments_info_is_left_out(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    steps = play(GemEnvironment(GemConfig(path="doubling:Chatty")), ["1"])[1]
    assert steps[0].metrics == {"hits": 2.0, "environment_truncated": 0.0}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("OldReset", r"OldReset: reset returned 'Nu'. It must return \(observation, info\)"),
        (
            "OldStep",
            r"OldStep: step returned .* \(observation, reward, terminated, truncated, info",
        ),
    ],
)
def test_the_old_interface_of_gym_is_named_in_the_error(monkeypatch, kind, message):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with pytest.raises(DataError, match=message):
        play(GemEnvironment(GemConfig(path=f"doubling:{kind}")), ["1"])


@pytest.mark.needs("gem")
def test_guess_the_number_of_gem_is_won_by_halving():
    level, handlers = logging.getLogger().level, list(logging.getLogger().handlers)
    game = GemEnvironment(GemConfig(id="game:GuessTheNumber-v0-easy"))
    assert (logging.getLogger().level, logging.getLogger().handlers) == (level, handlers)
    check_environment(game, n=10)

    async def halving(task):
        await game.reset(task)
        low, high, steps = 1, 10, []
        while not steps or not steps[-1].done:
            guess = (low + high) // 2
            steps.append(await game.step(Message("assistant", f"\\boxed{{{guess}}}")))
            if not steps[-1].done:
                low, high = (
                    (guess + 1, high)
                    if "higher" in steps[-1].messages[0].text
                    else (low, guess - 1)
                )
        return steps

    for task in game.tasks("test", seed=0, start=95):
        assert asyncio.run(halving(task))[-1].reward == 1.0


@pytest.mark.needs("gem")
def test_tools_of_gem_are_called_in_turns():
    config = GemConfig(
        id="game:GuessTheNumber-v0-easy", wrappers=("environments.gem_tools:with_halving",)
    )
    says = ["<half>8</half>", "<half>x</half>", "\\boxed{5}"]
    prompt, steps = play(GemEnvironment(config), says)
    assert "Write <half>N</half> to halve a number." in prompt
    assert texts(steps)[:2] == ["Half: 4", "no number"]
    assert [step.reward for step in steps[:2]] == [0.25, 0.25]
    assert [step.metrics["tool_use_counter"] for step in steps] == [1.0, 1.0, 0.0]
    assert [step.metrics["tool_success_counter"] for step in steps] == [1.0, 0.0, 0.0]


@pytest.mark.needs("gem")
def test_an_id_that_gem_has_not_is_refused():
    with pytest.raises(ConfigError, match="gem has no 'game:Chess'"):
        GemEnvironment(GemConfig(id="game:Chess"))


# --- verifiers


@pytest.fixture
def words(monkeypatch):
    """Makes environments of words_taskset.py."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return lambda **settings: VerifiersEnvironment(
        VerifiersConfig(taskset="words_taskset", **settings)
    )


@pytest.mark.medium
@pytest.mark.needs("verifiers")
def test_a_verifiers_taskset_in_one_turn(words):
    environment = words()
    check_environment(environment, n=20)
    task = next(environment.tasks("test", seed=0))
    word = task.messages[1].text.split()[1]
    assert [message.role for message in task.messages] == ["system", "user"]
    for answer, reward in ((word[::-1], 2.5), (word, 0.5), (word[::-1].upper(), 0.0)):
        _, (step,) = asyncio.run(episode(environment, task, [answer]))
        assert step.done
        assert step.reward == reward
        assert step.metrics["letters"] == 4
        assert step.metrics["backwards"] == 2.0 * (reward == 2.5)


@pytest.mark.medium
@pytest.mark.needs("verifiers")
def test_a_verifiers_environment_of_many_turns_goes_on_in_its_own_code(words):
    environment = words(options={"turns": True}, seat="speller")
    check_environment(environment, n=20)
    task = next(environment.tasks("test", seed=0))
    word = task.messages[1].text.split()[1]
    _, steps = asyncio.run(episode(environment, task, word[::-1]))
    assert texts(steps) == ["Letter 2?", "Letter 3?", "Letter 4?", None]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 2.5]


@pytest.mark.needs("verifiers")
@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"env": {"speller": {"max_turns": 2}}}])
def test_stop_functions_and_the_turn_limit_end_the_conversation_and_it_is_judged(words, limit):
    environment = words(options={"turns": True}, **limit)
    _, (shouted,) = play(environment, ["a!"])
    assert (shouted.done, shouted.reward, shouted.metrics["cut"]) == (True, 0.5, 1.0)
    _, steps = play(environment, ["a", "b"])
    assert [step.done for step in steps] == [False, True]
    assert steps[-1].metrics["cut"] == 1.0


@pytest.mark.needs("verifiers")
def test_an_environment_that_asks_on_after_the_end_fails_and_does_not_hang(words):
    environment = words(options={"turns": True}, max_turns=1)
    task = next(
        task for task in environment.tasks("train", seed=0) if "deaf" in task.messages[1].text
    )
    with pytest.raises(UserCodeFailed, match="the exchange is over"):
        asyncio.run(episode(environment, task, ["f"]))


@pytest.mark.needs("verifiers")
def test_what_a_verifiers_environment_raises_fails_the_attempt_and_the_next_one_plays(words):
    environment = words(options={"turns": True})
    with pytest.raises(UserCodeFailed, match="as asked"):
        play(environment, ["raise"])
    assert play(environment, ["a!"])[1][-1].done


@pytest.mark.slow
@pytest.mark.needs("verifiers")
def test_a_verifiers_task_with_tools_and_a_runtime(monkeypatch):
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)  # for its tool server
    environment = VerifiersEnvironment(VerifiersConfig(taskset="counting_taskset"))
    tasks = {task.messages[1].text: task for s in ("train", "test") for task in environment.rows(s)}

    async def count(goal, *numbers):
        await environment.reset(tasks[f"Count to {goal}."])
        assert environment.tools(None)[0]["function"]["name"] == "count_toolset_add"
        steps = []
        for index, number in enumerate(numbers):
            call = ToolCall(f"call_{index}", "count_toolset_add", {"number": number})
            steps.append(await environment.step(Message("assistant", tool_calls=(call,))))
        steps.append(await environment.step(Message("assistant", "Done.")))
        await environment.close()
        return [step.messages[0].text for step in steps[:-1]], steps[-1].reward

    answers, reward = asyncio.run(count(5, 2, 13, 3))
    assert answers == ["The count is 2.", "Error executing tool add: 13 is not added",
                       "The count is 5."]  # fmt: skip
    assert reward == 1.0
    with pytest.raises(UserCodeFailed, match="task setup: RuntimeError: no box"):
        asyncio.run(count(666))


@pytest.mark.needs("verifiers")
@pytest.mark.parametrize("turns", [False, True])
def test_a_rollout_of_verifiers_gives_the_same_steps(words, turns):
    says = ["a", "b", "c!", "d"]
    steps = []
    for needs_rollout in (False, True):
        environment = words(options={"turns": turns}, max_turns=3)
        environment._needs_rollout = needs_rollout
        task = next(environment.tasks("test", seed=0))
        steps.append(asyncio.run(episode(environment, task, says[: 3 if turns else 1])))
    assert steps[0] == steps[1]


@pytest.mark.needs("verifiers")
@pytest.mark.parametrize("needs_rollout", [False, True])
def test_a_count_of_tokens_fails_the_attempt_because_environments_see_none(
    words, monkeypatch, needs_rollout
):
    import verifiers.v1 as vf

    async def letters(self, trace: vf.Trace) -> float:
        return float(trace.num_output_tokens)

    environment = words()
    environment._needs_rollout = needs_rollout
    task_type = type(environment.inner_tasks["words_taskset/0"])
    monkeypatch.setattr(task_type, "letters", vf.metric(letters))
    with pytest.raises(UserCodeFailed, match="reads the number of tokens"):
        play(environment, ["a"])


@pytest.mark.needs("verifiers")
def test_functions_and_judges_that_take_a_runtime_get_one(words, monkeypatch):
    import verifiers.v1 as vf

    class Judge:
        reward_name, config = "judged", vf.JudgeConfig(weight=3.0)

        async def score(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
            return 1.0

    async def letters(self, trace: vf.Trace, runtime: vf.Runtime | None = None) -> float:
        return float(runtime is not None)

    task_type = type(words().inner_tasks["words_taskset/0"])
    with monkeypatch.context() as patch:
        patch.setattr(task_type, "letters", vf.metric(letters))
        assert play(words(), ["A"])[1][-1].metrics["letters"] == 1.0
    monkeypatch.setattr(task_type, "plugged_judges", lambda self: [Judge()])
    assert play(words(), ["A"])[1][-1].reward == 3.0


@pytest.mark.needs("verifiers")
def test_a_task_that_the_environment_makes_itself_is_played_with_its_tools_or_not_at_all(
    words, monkeypatch
):
    environment = words()

    class Tooled(type(environment.inner_tasks["words_taskset/0"])):
        @classmethod
        def toolsets(cls, config):
            return ["tools"]

    async def run(self, task, agents):
        await agents.speller.run(Tooled(task.data, task.config))

    monkeypatch.setattr(type(environment.inner), "run", run)
    with pytest.raises(UserCodeFailed, match="plays a Tooled with tools or a runtime"):
        play(environment, ["a"])


@pytest.mark.needs("verifiers")
def test_resources_that_an_environment_of_verifiers_starts_for_a_run_are_refused(
    words, monkeypatch
):
    async def start(self):
        self.index = {}

    monkeypatch.setattr(type(words().inner), "start", start)
    with pytest.raises(ConfigError, match="WordsEnv has `start` or `stop`"):
        words()


@pytest.mark.needs("verifiers")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"taskset": "no_such_taskset"}, "no_such_taskset"),
        (
            {"taskset": "words_taskset", "env": {"speller": {"max_output_tokens": 5}}},
            "speller.max_output_tokens=5 can't be held",
        ),
        ({"taskset": "words_taskset", "seat": "judge"}, "seat=judge: .* one of speller"),
        ({"taskset": "words_taskset", "options": {"colour": 1}}, "colour"),
        ({"taskset": "boxed_taskset"}, "needs a container"),
        ({"taskset": "endless_taskset"}, "is endless: set environment.tasks"),
    ],
)
def test_a_verifiers_taskset_that_cannot_be_played_is_refused(settings, message, words):
    with pytest.raises(ConfigError, match=message):
        VerifiersEnvironment(VerifiersConfig(**settings))


@pytest.mark.needs("verifiers")
def test_tool_servers_that_tasks_of_verifiers_share_are_refused(words, monkeypatch):
    environment = words()
    shared = staticmethod(lambda config: ["server"])
    monkeypatch.setattr(type(environment.inner.taskset), "toolsets", shared)
    with pytest.raises(ConfigError, match="shares tool servers among its tasks"):
        words()


@pytest.mark.needs("verifiers")
def test_other_seats_and_second_conversations_are_no_attempt_of_the_policy(words):
    environment = words(env={"id": "user-sim"}, seat="assistant")
    with pytest.raises(UserCodeFailed, match="seat 'user' needs another agent"):
        play(environment, [])
    several = words(env={"id": "best-of-n"})
    with pytest.raises(UserCodeFailed, match="requests a second conversation of the policy in one"):
        play(several, ["a"])
