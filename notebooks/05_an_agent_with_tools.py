# %% [markdown]
# # 5. An agent with tools
#
# The model may call a calculator; what that answers stands in the conversation and never trains. Whole dialogues show first how a call looks; then right
# answers alone are rewarded, calls and all. A minute is enough to learn to call; the right numbers take the steps of `ratchet/recipes/tool_use.yaml`, which reaches
# 96 % of held-out products.

# %%
import asyncio
import os
import tempfile
from pathlib import Path

import yaml

from ratchet.config.resolve import build, resolve
from ratchet.observe.records.reader import Record
from ratchet.training.start import start_run
from ratchet.types import Owner

os.chdir(tempfile.mkdtemp())  # the run goes into ./runs

# %% [markdown]
# A tool is a typed function with a docstring, or a class; `calculator` is built in. The problems come from any environment of one turn.

# %%
SECTION = {
    "kind": "tool_use",
    "problems": {"kind": "arithmetic", "digits": 2, "operators": ["*"]},
    "tools": [{"kind": "calculator"}],
    "max_calling_turns": 2,
}
environment = build(resolve("environment", SECTION))
task = next(iter(environment.tasks("train", seed=0)))
print(task.messages[-1].text)
for message in environment.demonstration(task):
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    print(f"  {message.role}: {message.text or calls}")

# %% [markdown]
# Played by hand: a call is answered by the tool, and the episode goes on; an answer ends it.


# %%
async def play_demonstration():
    call, _, answer = environment.demonstration(task)
    await environment.reset(task)
    return await environment.step(call), await environment.step(answer)


after_call, after_answer = asyncio.run(play_demonstration())
print(after_call.messages[0].text, after_call.done, after_answer.done)

# %% [markdown]
# ## Train
#
# The recipe with a smaller model and fewer steps. The chat template writes a call in the form of Llama's, which is short:
# `[calculator(expression="12*34")]`.

# %%
TEMPLATE = """\
{%- for m in messages -%}
{{- "<" + m.role + ">" + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- "[" + call.function.name + "(" -}}
{%- for key, value in call.function.arguments.items() -%}
{{- ("" if loop.first else ", ") + key + "=" + value | tojson -}}
{%- endfor -%}
{{- ")]" -}}
{%- endfor -%}
{%- if m.role == "assistant" -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<assistant>" -}}{%- endif -%}"""
RECIPE = {
    "name": "agent",
    "threads": 1,
    "model": {"preset": "tiny"},
    "tokenizer": {"kind": "characters", "tool_format": "llama", "template": TEMPLATE},
    "environment": SECTION,
    "sampling": {"temperature": 0.4, "max_new_tokens": 40},
    "evaluation": {"tasks": 64},
    "logging": {"progress": "off", "tensorboard": False},
    "stages": [
        {
            "name": "sft",
            "algorithm": {"kind": "sft", "train": "all"},
            "steps": 60,
            "batch_size": 64,
            "optimizer": {"lr": 4e-3, "warmup_steps": 10},
        },
        {
            "name": "grpo",
            "algorithm": {"kind": "grpo", "group_size": 8, "weighting": "token_mean"},
            "steps": 10,
            "batch_size": 16,
            "optimizer": {"lr": 5e-4, "warmup_steps": 5},
        },
    ],
}
recipe = Path("agent.yaml")
recipe.write_text(yaml.safe_dump(RECIPE))
assert start_run(recipe, [], None, command=f"ratchet train {recipe}") == 0

# %% [markdown]
# ## What it did
#
# The record has every conversation, with the origin of each token.

# %%
record = Record(Path("runs/agent/steps"))
attempts = [row for group in record.groups(70) for row in group.trajectories]
attempt = max(attempts, key=lambda row: sum(message.role == "tool" for message in row.messages))
for message in attempt.messages:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    print(f"  {message.role}: {message.text or calls}")
share = sum(any(m.role == "tool" for m in row.messages) for row in attempts) / len(attempts)
print(f"{share:.0%} of the attempts call the calculator")
tokens = {owner.name: int((attempt.owner == owner).sum()) for owner in Owner}
print(tokens)

# %%
assert share > 0.5
assert [message.role for message in attempt.messages][:3] == ["user", "assistant", "tool"]
assert tokens["ENVIRONMENT"] > 0
assert not attempt.trainable[attempt.owner == Owner.ENVIRONMENT].any()
