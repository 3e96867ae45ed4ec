# %% [markdown]
# # 2. Your own reward
#
# A reward is a function of an attempt and its task. Here it pays for every digit in its place, and extra if all are; the kit holds it to what every
# reward must do, and a model learns from it.

# %%
import asyncio

import ratchet as rt
from ratchet.rewards.base import answer_text
from ratchet.testing import answered, check_reward


def digits_in_place(trajectory, task):
    text, answer = answer_text(trajectory).strip(), str(task.answer)
    in_place = sum(ours == theirs for ours, theirs in zip(text, answer, strict=False))
    return {"in_place": in_place / len(answer), "all": float(text == answer)}


# %% [markdown]
# ## Does it keep the contract?
#
# `check_reward` tries a good answer, a bad one, and hostile ones: empty text, a hundred thousand characters, half a Unicode pair. An exception would
# fail the attempt, and never become a reward.

# %%
task = rt.Task("sorting/0", (rt.Message("user", "3120="),), answer="0123")
reward = rt.as_reward(digits_in_place)
check_reward(reward, task, good="0123", bad="9")

# %% [markdown]
# What a reward says of one answer, part by part:

# %%
(outcome,) = asyncio.run(reward.score([answered(task, "0132")], task))
print(outcome)
assert outcome.reward == 0.5

# %% [markdown]
# ## Train on it
#
# Four digits are sorted by a model that has seen some demonstrations. A run logs every part of the reward by its name.

# %%
tokenizer = rt.character_tokenizer("0123456789=")
model = rt.init_policy(rt.get_preset("tiny", tokenizer.vocab_size), seed=0)
policy = rt.Policy.create(model, tokenizer)
setup = rt.EnvSetup(rt.Sorting(rt.SortingConfig(digits=4)), reward=reward)
sampling = rt.Sampling(temperature=0.6, max_new_tokens=5)
adamw = rt.OptimizerConfig
stages = [
    (rt.SFTConfig(), rt.StageSpec("sft", 30, 64, sampling, adamw(lr=3e-3))),
    (rt.GRPOConfig(group_size=8), rt.StageSpec("grpo", 30, 64, sampling, adamw(lr=5e-4))),
]
rewards = []
for config, spec in stages:
    run = rt.make_run(policy, setup, rt.build(config), spec)
    asyncio.run(rt.train(run))
    rewards.append(run.progress.accuracy)
    print(f"{run.name}: mean held-out reward {rewards[-1]:.2f} of at most 2")

# %%
assert rewards[1] > rewards[0] + 0.1
