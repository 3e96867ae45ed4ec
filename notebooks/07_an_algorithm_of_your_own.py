# %% [markdown]
# # 7. An algorithm of your own, held to the kit
#
# An algorithm is an advantage estimator, a loss and a weighting. Any of them may be a function of yours. The kit then holds the whole to the
# invariances that the built-in ones keep: micro-batches change nothing, masked tokens change nothing, failures are no rewards, and so on.

# %%
import asyncio
from dataclasses import replace

import torch

import ratchet as rt
from ratchet.testing import check_algorithm

# %% [markdown]
# ## An estimator
#
# All of the advantage goes to the best attempts of each group, less the share of them, so that a group's advantages sum to 0.
# Suffixes say the shape: S sequences, T tokens.


# %%
def best_of_group(batch, state, *, scale: float = 1.0):
    counted_S = batch.train_S & batch.scored_S
    rewards_S = torch.where(counted_S, batch.rewards_S, -torch.inf)

    def by_group(values_S, reduce, start):
        totals_G = torch.full((batch.n_groups,), start, dtype=torch.float64)
        return totals_G.scatter_reduce(0, batch.group_S, values_S, reduce)[batch.group_S]

    is_best_S = ((rewards_S == by_group(rewards_S, "amax", -torch.inf)) & counted_S).double()
    share_S = by_group(is_best_S, "sum", 0.0) / by_group(counted_S.double(), "sum", 0.0).clamp(1)
    advantages_S = torch.where(counted_S, scale * (is_best_S - share_S), 0.0)
    return batch.fill_tokens(
        advantages=torch.where(batch.trainable_T, advantages_S[batch.sequence_T], 0.0)
    )


# %% [markdown]
# The rest is GRPO's: its clipped loss, and each answer weighing the same. (In a recipe: `algorithm: {kind: grpo, advantage: {kind: "mine:best_of_group"}}`.)

# %%
grpo = rt.build(rt.GRPOConfig(group_size=8))
mine = replace(grpo, name="best_of_group", advantage=best_of_group)
check_algorithm(mine)

# %% [markdown]
# ## What the kit would have said
#
# The slip that is made most often: a mean over whatever is in the batch. Then an attempt's advantage depends on the other prompts beside it, and equal
# rewards have advantages that are not 0.


# %%
def best_of_batch(batch, state):
    counted_S = batch.train_S & batch.scored_S
    rewards_S = torch.where(counted_S, batch.rewards_S, 0.0)
    advantages_S = torch.where(counted_S, rewards_S - rewards_S.sum() / batch.n_groups, 0.0)
    return batch.fill_tokens(
        advantages=torch.where(batch.trainable_T, advantages_S[batch.sequence_T], 0.0)
    )


try:
    check_algorithm(replace(grpo, name="best_of_batch", advantage=best_of_batch))
except AssertionError as error:
    findings = str(error)
print(findings)

# %% [markdown]
# ## Does it learn?

# %%
tokenizer = rt.character_tokenizer("0123456789=")
model = rt.init_policy(rt.get_preset("tiny", tokenizer.vocab_size), seed=0)
policy = rt.Policy.create(model, tokenizer)


def exact(trajectory, task):
    return float(trajectory.messages[-1].text == task.answer)


setup = rt.EnvSetup(rt.Sorting(rt.SortingConfig(digits=4)), reward=rt.as_reward(exact))
sampling = rt.Sampling(temperature=0.6, max_new_tokens=5)
adamw = rt.OptimizerConfig
stages = [
    (rt.build(rt.SFTConfig()), rt.StageSpec("sft", 30, 64, sampling, adamw(lr=3e-3))),
    (mine, rt.StageSpec("mine", 30, 64, sampling, adamw(lr=5e-4))),
]
accuracies = []
for algorithm, spec in stages:
    run = rt.make_run(policy, setup, algorithm, spec)
    asyncio.run(rt.train(run))
    accuracies.append(run.progress.accuracy)
    print(f"{run.name}: {accuracies[-1]:.0%} of held-out problems")

# %%
assert "equal_rewards" in findings
assert accuracies[1] > accuracies[0]
