# %% [markdown]
# # 1. Train in two minutes
#
# A decoder of random weights learns to sort four digits: first from demonstrations, then from nothing but right or wrong. All of it runs
# on one core of a laptop, in well under a minute.

# %%
import asyncio

import ratchet as rt

tokenizer = rt.character_tokenizer("0123456789=")
model = rt.init_policy(rt.get_preset("tiny", tokenizer.vocab_size), seed=0)
policy = rt.Policy.create(model, tokenizer)

# %% [markdown]
# An environment serves tasks and says how an attempt went on. This one asks to sort digits, and brings demonstrations.

# %%
environment = rt.Sorting(rt.SortingConfig(digits=4))
task = next(iter(environment.tasks("train", seed=0)))
print(task.messages[0].text, "->", task.answer)

# %% [markdown]
# A reward is any function of an attempt and its task.


# %%
def exact(trajectory, task):
    return float(trajectory.messages[-1].text == task.answer)


setup = rt.EnvSetup(environment, reward=rt.as_reward(exact))
sampling = rt.Sampling(temperature=0.6, max_new_tokens=5)

# %% [markdown]
# ## Demonstrations
#
# Supervised fine-tuning brings right answers within reach: where every attempt is wrong, a reward has nothing to say.

# %%
spec = rt.StageSpec("sft", 40, 64, sampling, rt.OptimizerConfig(lr=3e-3))
supervised = rt.make_run(policy, setup, rt.build(rt.SFTConfig()), spec)
asyncio.run(rt.train(supervised))
accuracy_sft = supervised.progress.accuracy
print(f"after demonstrations: {accuracy_sft:.0%} of held-out problems")

# %% [markdown]
# ## Reward
#
# GRPO samples eight answers to each prompt and makes those likelier that are better than the others.

# %%
spec = rt.StageSpec("grpo", 40, 128, sampling, rt.OptimizerConfig(lr=5e-4))
reinforced = rt.make_run(policy, setup, rt.build(rt.GRPOConfig(group_size=8)), spec)
asyncio.run(rt.train(reinforced))
accuracy_grpo = reinforced.progress.accuracy
print(f"after reward: {accuracy_grpo:.0%} of held-out problems")

# %%
assert accuracy_sft > 0.4
assert accuracy_grpo > accuracy_sft + 0.05
