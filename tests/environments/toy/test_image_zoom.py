"""Tools that answer with images: a picture whose details are seen after zooming into a cell."""

import asyncio
import json
import random
from itertools import islice

import numpy as np
import pytest
from pictures import model_directory, picture, processor
from PIL import Image
from pydantic import ValidationError

from ratchet.config.loader import load_config
from ratchet.config.resolve import build, resolve
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.formats.media import MediaLimits, decode_image, embed, fetch
from ratchet.data.packing import pack
from ratchet.environments.tool_use.base import Toolbox, read_answer
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.testing import check_environment
from ratchet.testing.fakes import FakeGenerator
from ratchet.testing.tiny_vlm import TEMPLATE
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run
from ratchet.types import Group, Message, Owner, Part, Sampling, ToolCall

CALLS = """\
    {%- for call in message.tool_calls or [] -%}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- "<|im_end|>"""
TOOL_TEMPLATE = TEMPLATE.replace('    {{- "<|im_end|>', CALLS)


def made(**settings):
    return build(resolve("environment", {"kind": "image_zoom", **settings}))


def tasks(environment, count=20, split="train"):
    return list(islice(environment.tasks(split, seed=0), count))


def pixels(part):
    source = fetch(part.value, where="", limits=MediaLimits())
    return np.asarray(decode_image(source, where="", limits=MediaLimits()))


def write_zoom(row, column):
    call = {"name": "zoom", "arguments": {"row": row, "column": column}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.medium
@pytest.mark.parametrize("actions", ["text", "tools"])
def test_the_kit(actions):
    environment = made(actions=actions)
    check_environment(
        environment, reward=compose_rewards((resolve("rewards", {"kind": "exact_match"}),)), n=4
    )


@pytest.mark.medium
def test_the_overview_hides_the_digit_that_a_zoom_shows():
    environment = made()
    problem = environment.sample(random.Random(0))
    squares = [[colour, row, column, 9 - n] for colour, row, column, n in problem.meta["squares"]]
    other = problem._replace(meta={**problem.meta, "squares": squares})
    assert environment.messages(problem) == environment.messages(other)
    shown: dict[tuple[str, str], set[bytes]] = {}
    for task in tasks(environment, 200):
        colour, _, _, digit = task.meta["squares"][0]
        assert (f" {colour} " in task.messages[0].text, task.answer) == (True, str(digit))
        overview = pixels(task.messages[0].content[0])
        assert overview.shape == (48, 48, 3)
        _, reply, answer = environment.demonstration(task)
        crop = pixels(reply.content[0])
        assert crop.shape == (64, 64, 3)
        assert answer.text == task.answer
        shown.setdefault((colour, task.answer), set()).add(crop.tobytes())
    assert all(len(crops) == 1 for crops in shown.values()), "a zoom shows colour and digit alone"
    assert len({crop for crops in shown.values() for crop in crops}) == len(shown)


@pytest.mark.parametrize("actions", ["text", "tools"])
def test_a_zoom_s_image_reaches_the_next_turn_of_a_vision_model(actions):
    environment = made(actions=actions, max_zooms=2)
    (task,) = tasks(environment, 1)
    renderer = Renderer(
        load_tokenizer(model_directory()),
        TOOL_TEMPLATE,
        processor=processor(),
        tool_format="hermes",
    )
    zoom = write_zoom if actions == "tools" else lambda row, column: f"zoom {row} {column}"
    said = [zoom(1, 1), zoom(9, 1), str(task.answer)]
    turns = iter(said)
    generator = FakeGenerator(
        lambda *_: [*renderer.tokenizer.encode(next(turns)), *renderer.stop_ids[:1]]
    )
    player = EpisodePlayer(generator, renderer, max_context=2048)
    sampling = Sampling(max_new_tokens=256, stop_ids=renderer.stop_ids)
    (row,) = asyncio.run(player.play(task, environment, sampling, attempt=0))
    assert row.outcome is None
    assert (row.metrics["zooms"], row.metrics["zoom_errors"]) == (2, 1)
    replies = [message for message in row.messages if message.role in ("user", "tool")][1:]
    assert [len(reply.media) for reply in replies] == [1, 0]
    assert [message.tool_call_id for message in replies] == (
        ["call_0", "call_1"] if actions == "tools" else [None, None]
    )
    assert "there is no cell 9 1" in replies[1].text
    assert [len(media) for media in generator.media] == [1, 2, 2]
    tools = environment.tools(task) or None
    whole = renderer.prompt(row.messages[:-1], tools)
    assert whole == row.tokens[: len(whole)].tolist()
    assert row.media == renderer.media(row.tokens, row.messages)
    crop = row.media[1]
    span = slice(crop.start, crop.start + crop.medium.span)
    assert set(row.owner[span].tolist()) == {Owner.ENVIRONMENT}
    (packed,) = pack([Group("g", task, (row,))]).media_S
    assert [(one.start, one.medium.key) for one in packed] == [
        (one.start, one.medium.key) for one in row.media
    ]


def test_zooms_are_limited_and_anything_else_is_an_answer():
    environment = made(max_zooms=1)
    (task,) = tasks(environment, 1)
    asyncio.run(environment.reset(task))
    first = asyncio.run(environment.step(Message("assistant", " zoom 1 1\n")))
    second = asyncio.run(environment.step(Message("assistant", "zoom 1 2")))
    assert (first.done, second.done) == (False, True)
    with pytest.raises(ValidationError, match="don't fit into grid=2: set squares to 4"):
        made(grid=2, squares=5)


def test_tools_of_one_s_own_answer_with_images():
    drawn = Image.new("RGB", (16, 16), (255, 0, 0))

    class Drawing:
        name, description, parameters = "draw", "Draws.", {"type": "object", "properties": {}}

        def call(self):
            return ["red: " + "x" * 9, drawn, picture(1)]

    toolbox = Toolbox([Drawing()], max_chars=6)
    ((message,), n_errors) = asyncio.run(toolbox.run_calls([ToolCall("1", "draw", {})]))
    cut = Part("text", "red: x\n[cut after 6 characters]")
    assert (message.content, n_errors) == ((cut, embed(drawn), picture(1)), 0)
    assert read_answer([1, "a"]) == "[1, 'a']"
    assert read_answer(picture(1)) == (picture(1),)


@pytest.mark.slow
def test_learner_and_sampler_agree_on_turns_with_images(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "threads": 1,
                "device": "cpu",
                "model": {"path": str(model_directory()), "train_encoders": True},
                "generator": {"kind": "hf"},
                "environment": {"kind": "image_zoom"},
                "rewards": [{"kind": "environments.toy.test_image_zoom:judge"}],
                "sampling": {"max_new_tokens": 12},
                "evaluation": {"tasks": 0},
                "stages": [
                    {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 40, "batch_size": 8},
                    {
                        "name": "grpo",
                        "algorithm": {"kind": "grpo", "group_size": 4},
                        "steps": 2,
                        "batch_size": 4,
                    },
                ],
                "optimizer": {"lr": 5e-3, "warmup_steps": 0},
            }
        )
    )
    config = load_config(recipe)
    policy = build_policy(config)
    asyncio.run(train(build_run(config, 0, policy)))
    seen = []
    run = build_run(config, 1, policy, observers=[lambda step, metrics: seen.append(metrics)])
    asyncio.run(train(run))
    assert any(metrics["rollout/attempt/zooms"] > 0 for metrics in seen)
    assert all(metrics["policy/policy_gradient/sampler_gap"] < 1e-4 for metrics in seen)
    assert any(metrics["policy/grad_norm"] > 0 for metrics in seen)


def judge(trajectory, task):
    return int(trajectory.tokens[trajectory.owner == Owner.POLICY].sum()) % 5 / 4
