import asyncio
import random
import subprocess
import sys
from itertools import islice

import pytest

from ratchet.environments.single_turn import Problem, Procedural, Rows, is_held_out
from ratchet.errors import DataError
from ratchet.testing import check_environment
from ratchet.types import Message, Task


class Doubling(Procedural):
    name = "doubling"

    def __init__(self, size: int) -> None:
        self.size = size

    def sample(self, rng: random.Random) -> Problem:
        n = rng.randrange(self.size)
        return Problem(f"2*{n}=", str(2 * n))


class Numbered(Rows):
    name = "numbered"

    def __init__(self, n_train: int, n_test: int = 1) -> None:
        self.sizes = {"train": n_train, "test": n_test}

    def rows(self, split):
        return [
            Task(f"numbered/{split}/{i}", (Message("user", f"{split} {i}"),), str(i))
            for i in range(self.sizes[split])
        ]


def prompts(tasks):
    return [task.messages[0].text for task in tasks]


def test_both_bases_keep_the_contract_of_environments():
    check_environment(Doubling(100_000))
    check_environment(Numbered(30, 7))


def test_a_train_task_is_a_function_of_seed_and_position():
    environment = Doubling(100_000)
    far = next(environment.tasks("train", seed=3, start=10**9))
    assert far.id == "doubling/train/1000000000"
    assert far == next(Doubling(100_000).tasks("train", seed=3, start=10**9))
    assert far.messages != next(environment.tasks("train", seed=4, start=10**9)).messages


def test_tasks_are_the_same_in_another_process_and_version():
    """Pins the derivation: a resumed run must meet the tasks that the first one would have met."""
    tasks = list(islice(Doubling(1000).tasks("train", seed=0), 4))
    assert prompts(tasks) == ["2*839=", "2*778=", "2*770=", "2*546="]
    assert prompts(islice(Doubling(1000).tasks("test", seed=0), 4)) == [
        "2*737=",
        "2*275=",
        "2*49=",
        "2*982=",
    ]


def test_train_and_test_partition_the_prompts_by_their_hash():
    space = {f"2*{n}=" for n in range(300)}
    test = prompts(Doubling(300).tasks("test", seed=0))
    train = set(prompts(islice(Doubling(300).tasks("train", seed=0), 5000)))
    assert len(test) == len(set(test)), "a test prompt repeats"
    assert set(test) == {p for p in space if is_held_out(p)}, (
        "the test split ends with its space, and not before"
    )
    assert train == {p for p in space if not is_held_out(p)}


def test_one_prompt_in_ten_is_held_out():
    share = sum(is_held_out(f"prompt {i}") for i in range(20_000)) / 20_000
    assert abs(share - 0.1) < 0.01  # 4.7 standard deviations


def test_a_space_without_training_prompts_is_an_error_and_not_a_hang():
    environment = Doubling(1)
    environment.sample = lambda rng: Problem(
        next(p for p in map(str, range(1000)) if is_held_out(p)), ""
    )
    with pytest.raises(
        DataError, match="environment 'doubling' found no training prompt in 10000 draws"
    ):
        next(environment.tasks("train", seed=0))
    assert len(list(environment.tasks("test", seed=0))) == 1


def test_draws_without_a_problem_are_tried_again():
    environment = Doubling(100_000)
    sample = environment.sample
    environment.sample = lambda rng: sample(rng) if rng.random() < 0.3 else None
    check_environment(environment, n=50)


def test_rows_are_shuffled_anew_in_each_pass_and_keep_their_ids():
    environment = Numbered(8)
    ids = [task.id for task in islice(environment.tasks("train", seed=0), 24)]
    passes = ids[:8], ids[8:16], ids[16:]
    assert all(sorted(p) == sorted(passes[0]) for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    assert [task.id for task in islice(environment.tasks("train", seed=0, start=19), 5)] == ids[19:]


@pytest.mark.fault("D2")
def test_an_empty_split_is_refused_at_once():
    with pytest.raises(DataError, match="environment 'numbered' has no rows for its train split"):
        Numbered(0).tasks("train", seed=0)


def test_an_episode_is_one_answer_long():
    environment = Doubling(10)
    task = next(environment.tasks("train", seed=0))
    assert asyncio.run(environment.reset(task)) == task.messages
    step = asyncio.run(environment.step(Message("assistant", "hm")))
    assert (step.done, step.messages, step.reward) == (True, (), None)


@pytest.mark.medium
def test_environments_and_rewards_import_no_torch():
    modules = ["toy.arithmetic", "toy.sorting", "toy.countdown", "datasets.gsm8k", "build"]
    imports = (
        "".join(f"import ratchet.environments.{m}\n" for m in modules)
        + "import ratchet.rewards.weighted_sum, sys\n"
    )
    check = "heavy = {'torch', 'transformers'} & set(sys.modules)\nassert not heavy, heavy"
    subprocess.run([sys.executable, "-c", imports + check], check=True)
