# %% [markdown]
# # 8. Evaluation with honest intervals
#
# A number without an interval says little: 72 % of 100 questions may be 63 or 80 % of the next 100. These are the estimators of `ratchet eval`; here they
# are held to simulation, so that you need not take their word for it.

# %%
import numpy as np

from ratchet.evals.statistics import bootstrap_interval, compare_pairs, estimate_pass_at_k

rng = np.random.default_rng(0)

# %% [markdown]
# ## An interval that keeps its word
#
# A model answers each of 100 questions with a chance of its own. The interval is for the mean over questions like these; over many repetitions 95 % of the
# intervals should hold the true mean.

# %%
chances = rng.beta(2, 1, size=(400, 100))  # 400 repetitions of 100 questions
answers = rng.random(chances.shape) < chances
intervals = [bootstrap_interval(row) for row in answers]
coverage = np.mean([low <= 2 / 3 <= high for low, high in intervals])
print(f"the first: {answers[0].mean():.0%}, {intervals[0][0]:.0%} to {intervals[0][1]:.0%}")
print(f"the true mean lies in {coverage:.1%} of the intervals")

# %% [markdown]
# All right, or all wrong, is no certainty: of 30 questions that were all answered, the lower bound is not 100 %.

# %%
low, high = bootstrap_interval(np.ones(30))
print(f"30 of 30: {low:.0%} to {high:.0%}")

# %% [markdown]
# ## pass@k
#
# The chance that one of k attempts is right, from n attempts of which c were: unbiased, for all k at once. Taking the best of the first k is not wrong, but
# throws attempts away; 1 - (1 - c/n)^k is wrong.

# %%
n, chance = 8, 0.2
counts = rng.binomial(n, chance, size=20_000)
estimates = np.stack([estimate_pass_at_k(n, c) for c in range(n + 1)])[counts].mean(0)
naive = (1 - (1 - counts / n) ** 4).mean()
true = 1 - (1 - chance) ** 4
print(f"pass@4: true {true:.3f}, estimated {estimates[3]:.3f}, by 1 - (1 - c/n)^4 {naive:.3f}")

# %% [markdown]
# ## Is B better than A?
#
# Compare question by question: both models find the same ones hard, and that cancels. The p-value is exact, and assumes no distribution.

# %%
difficulty = rng.uniform(0, 1, size=200)
a = (rng.random(200) < 1 - difficulty).astype(float)
b = (rng.random(200) < np.clip(1.15 - difficulty, 0, 1)).astype(float)
test = compare_pairs(b, a)
print(
    f"B - A = {test.difference:+.3f}, {test.low:+.3f} to {test.high:+.3f}, p = {test.p_value:.4f}"
)

# %% [markdown]
# And where there is no difference, it seldom claims one: at most 5 % of the time.

# %%
alarms = 0
for _ in range(300):
    chance_by_question = rng.uniform(0, 1, size=40)
    one, two = (rng.random((2, 40)) < chance_by_question).astype(float)
    alarms += compare_pairs(one, two).p_value <= 0.05
print(f"false alarms: {alarms / 300:.1%}")

# %%
assert 0.91 < coverage < 0.98
assert 0.85 < low < 0.95
assert high == 1.0
assert abs(estimates[3] - true) < 0.01
assert abs(naive - true) > 0.02
assert test.p_value < 0.05
assert alarms / 300 < 0.08
