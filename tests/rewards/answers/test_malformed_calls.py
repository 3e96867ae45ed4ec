"""Tool calls that can't be read: counted in the metrics, and penalised where a recipe says so."""

import asyncio
import copy
from dataclasses import replace

import pytest

from ratchet.config.resolve import resolve
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.rollout.metrics import measure_groups
from ratchet.protocols import Step
from ratchet.testing import answered
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator
from ratchet.training.stage_from_config import build_reward
from ratchet.types import Failed, Message, Sampling, Scored, Task, Truncated

TASK = Task("t/0", (Message("user", "?"),), answer="7")
TEMPLATE = (
    "{%- for m in messages -%}{{- '<' + m.role + '>' + (m.content or '') -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '<tool_call>\\n' + (c.function | tojson) + "
    "'\\n</tool_call>' -}}{%- endfor -%}"
    "{%- if m.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
)
RENDERER = Renderer(byte_tokenizer(), TEMPLATE)
TOOLS = (
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    },
)
BROKEN = '<tool_call>\n{"name": add}\n</tool_call>'
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


class Adder(FakeEnvironment):
    """Answers until the policy says a number."""

    def tools(self, task):
        return TOOLS

    async def step(self, message):
        return (
            Step(done=True)
            if message.text.isdigit()
            else Step((Message("user", "go on"),), metrics={"asked": 1.0})
        )


def penalised(weight):
    kinds = [{"kind": "exact_match"}, {"kind": "malformed_tool_calls", "weight": weight}]
    return build_reward([resolve("rewards", kind) for kind in kinds])


def play(*lines, attempts=1, max_turns=8):
    """Every attempt says `lines` in turn."""
    says = lambda tokens, sampling: [*RENDERER.tokenizer.encode(next(script)), RENDERER.stop_ids[0]]  # noqa: E731
    script = iter(lines * attempts)
    player = EpisodePlayer(FakeGenerator(says), RENDERER, max_context=4096, max_turns=max_turns)
    manager = RolloutManager(player, lambda: copy.copy(Adder()), penalised(0.25))
    sampling = Sampling(max_new_tokens=128, stop_ids=RENDERER.stop_ids)

    async def scene():
        rows = [
            await manager.group(TASK, sampling, group_id=f"g{i}", attempts=1)
            for i in range(attempts)
        ]
        await manager.close()
        return rows

    return asyncio.run(scene())


def test_each_costs_its_weight_and_is_in_the_metrics():
    groups = play(BROKEN, CALL, BROKEN + BROKEN, "7", attempts=2)
    parts = {"exact_match": 1.0, "malformed_tool_calls": -3.0}
    assert [group.trajectories[0].outcome for group in groups] == [
        Scored(1.0 - 0.25 * 3, parts)
    ] * 2
    turns = groups[0].trajectories[0].turns
    assert [turn.malformed_call for turn in turns] == [True, False, True, False]
    numbers = measure_groups(groups)
    assert numbers["attempt/malformed_tool_calls"] == 3.0
    assert numbers["reward/malformed_tool_calls"] == -3.0
    assert (numbers["attempt/turns"], numbers["attempt/asked"], numbers["attempt/retries"]) == (
        4.0,
        3.0,
        0.0,
    )


def test_calls_that_can_be_read_cost_nothing():
    (group,) = play(CALL, "7")
    assert group.trajectories[0].reward == 1.0
    assert measure_groups([group])["attempt/malformed_tool_calls"] == 0.0


def test_turns_with_malformed_thinking_are_marked():
    """What a call holds is not thinking, and a thought may end with a call."""
    thinks = f"<think>add</think>{CALL}"
    (group,) = play(thinks, f"</think>{CALL}", f"<think>{CALL}", "<think>", "7")
    marks = [turn.malformed_thinking for turn in group.trajectories[0].turns]
    assert marks == [False, True, True, True, False]


def test_an_attempt_that_is_cut_off_pays_for_what_it_said():
    (group,) = play(BROKEN, BROKEN, max_turns=2)
    assert group.trajectories[0].outcome == Truncated(
        -0.5, {"exact_match": 0.0, "malformed_tool_calls": -2.0}
    )
    assert measure_groups([group])["attempt/turn_limit"] == 1.0


def test_where_nobody_counted_it_is_said():
    reward = build_reward([resolve("rewards", {"kind": "malformed_tool_calls"})])
    text = answered(TASK, BROKEN)
    (outcome,) = asyncio.run(reward.score([text], TASK))
    assert isinstance(outcome, Failed)
    assert "its tool calls were not counted" in outcome.detail
    (outcome,) = asyncio.run(reward.score([replace(text, metrics={"turns": 1.0})], TASK))
    assert outcome.reward == 0.0, "no tools were offered"


def test_it_has_no_keys_but_its_weight():
    with pytest.raises(ValueError, match="per_call"):
        resolve("rewards", {"kind": "malformed_tool_calls", "per_call": 1})
