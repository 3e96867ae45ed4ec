"""Levels of reasoning effort: variables of the chat template that tasks set."""

import asyncio
import json

import pytest

from ratchet.config.resolve import build, resolve
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.task_variables import get_task_renderer
from ratchet.errors import DataError
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.sources.render_task import render_task
from ratchet.testing.fakes import FakeGenerator
from ratchet.types import Message, Sampling, Task

TEMPLATE = (
    "{%- if reasoning_effort is defined %}{{- 'effort ' + reasoning_effort + '.' -}}{%- endif %}"
    "{%- for message in messages -%}{{- message.content + '\n' -}}{%- endfor -%}"
)
RENDERER = Renderer(character_tokenizer(), TEMPLATE)


def read(tokens) -> str:
    return RENDERER.tokenizer.decode(list(tokens), skip_special=False)


def prompt(task: Task) -> str:
    return read(get_task_renderer(RENDERER, task).prompt(task.messages))


def take(environment, n, split="train"):
    tasks = build(resolve("environment", environment)).tasks(split, seed=0)
    return [next(tasks) for _ in range(n)]


def test_each_level_has_its_share_of_the_prompts() -> None:
    level = {"kind": "arithmetic", "digits": 1}
    parts = [
        {**level, "tag": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
        {**level, "tag": "high", "chat_template_kwargs": {"reasoning_effort": "high"}, "weight": 3},
        {**level, "tag": "none"},
    ]
    prompts = [prompt(task) for task in take({"kind": "mixture", "parts": parts}, 50)]
    assert sum(text.startswith("effort low.") for text in prompts) == 10
    assert sum(text.startswith("effort high.") for text in prompts) == 30


def test_a_column_sets_the_level_of_a_row_in_every_rendering(tmp_path) -> None:
    rows = [
        {"prompt": "1+1", "answer": "2", "effort": "low", "messages": None},
        {"prompt": "1+2", "answer": "3", "effort": None, "messages": None},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {
        "kind": "dataset",
        "train": [str(file)],
        "test_share": 0.0,
        "shuffle": False,
        "chat_template_columns": {"reasoning_effort": "effort"},
    }
    low, neutral = take(section, 2)
    assert (prompt(low), prompt(neutral)) == ("effort low.1+1\n", "1+2\n")
    environment = build(resolve("environment", section))
    (row,) = render_task(environment, low, RENDERER, "rows")
    assert read(row.tokens).startswith("effort low.1+1\n2")
    player = EpisodePlayer(FakeGenerator(lambda tokens, sampling: [1]), RENDERER, max_context=100)
    (trajectory,) = asyncio.run(
        player.play(low, environment, Sampling(max_new_tokens=4), attempt=0)
    )
    assert read(trajectory.tokens).startswith("effort low.1+1\n")
    part = {**section, "chat_template_kwargs": {"reasoning_effort": "high"}}
    tasks = take({"kind": "mixture", "parts": [part]}, 2)
    assert {prompt(task) for task in tasks} == {"effort low.1+1\n", "effort high.1+2\n"}
    with pytest.raises(DataError, match="names the column 'level'"):
        take({**section, "chat_template_columns": {"reasoning_effort": "level"}}, 1)


def test_a_variable_that_the_template_does_not_read_is_refused() -> None:
    task = Task("t", (Message("user", "1"),), meta={"template variables": {"thinking": True}})
    with pytest.raises(DataError, match=r"does not read 'thinking'; it reads .*reasoning_effort"):
        prompt(task)
