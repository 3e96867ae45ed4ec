"""List the equivalent mutants, which change no result, each with the reason.

Keys are (file, function, the edit as it is printed). Add a mutant only with a proof that it changes
no result. That no test fails is no proof.
"""

from __future__ import annotations

Table = dict[tuple[str, str, str], str]

GROUP = "ratchet/algorithms/advantages/group_baselines.py"
BASE = "ratchet/algorithms/base.py"
POLICY = "ratchet/algorithms/losses/policy.py"
REWARD_MODEL = "ratchet/algorithms/losses/reward_model.py"
DISTILLATION = "ratchet/algorithms/losses/distillation.py"
CORRECTION = "ratchet/algorithms/rollout_correction.py"
TEACHER = "ratchet/algorithms/advantages/teacher.py"
TEMPORAL = "ratchet/algorithms/advantages/per_turn.py"
NO_SCALE = "epsilon is added to a standard deviation, and scale='none' divides by no deviation"
COMMON = "ratchet/algorithms/advantages/common.py"
MINUS_ZERO = "the values are zeros, and -0.0 behaves like 0.0 in comparisons and sums"
SAME_KEYS = "keys are only compared for equality, and negation keeps them distinct"
ZERO_WEIGHT = "inactive values have the weight 0, so any finite number gives the same result"

EQUIVALENT: Table = {
    (
        BASE,
        "AlgorithmTerm.__call__",
        "coef * (weight * torch.where(active, x, 0.0)).sum() -> coef * (weight * "
        "torch.where(active, x, 1.0)).sum()",
    ): ZERO_WEIGHT,
    (
        BASE,
        "AlgorithmTerm.__call__",
        "(mean_weight * torch.where(active, values.to(weight.dtype), 0.0)).sum() -> "
        "(mean_weight * torch.where(active, values.to(weight.dtype), 1.0)).sum()",
    ): ZERO_WEIGHT,
    (
        TEACHER,
        "on_policy_distillation",
        "keys_T = torch.stack([batch.sequence_T, span_T], dim=1) -> keys_T = "
        "-torch.stack([batch.sequence_T, span_T], dim=1)",
    ): SAME_KEYS,
    (
        CORRECTION,
        "_aggregate_gap",
        "keys_T = torch.stack([batch.sequence_T, batch.turn_T.long()], dim=1) -> "
        "keys_T = -torch.stack([batch.sequence_T, batch.turn_T.long()], dim=1)",
    ): SAME_KEYS,
    (
        POLICY,
        "_compute_sequence_metrics",
        "torch.no_grad() -> torch.enable_grad()",
    ): "the averaged values come from `_compute_metrics`, which has already dropped their gradient",
    (
        REWARD_MODEL,
        "process_reward",
        "labels_T = batch.turn_rewards_T.nan_to_num(0.0) -> labels_T = "
        "batch.turn_rewards_T.nan_to_num(1.0)",
    ): "the result for a NaN is masked twice below",
    (
        GROUP,
        "reinforce_pp",
        "rewards_A = normalise_by(attempts.groups, rewards_A, scale='none', epsilon=0.0) -> "
        "rewards_A = normalise_by(attempts.groups, rewards_A, scale='none', epsilon=1.0)",
    ): NO_SCALE,
    (
        TEMPORAL,
        "turn_returns",
        "advantages_U = normalise_by(groups, advantages_U, scale='none', epsilon=0.0) -> "
        "advantages_U = normalise_by(groups, advantages_U, scale='none', epsilon=1.0)",
    ): NO_SCALE,
    (
        TEMPORAL,
        "compute_step_rewards",
        "torch.full((size,), -1).scatter_reduce -> torch.full((size,), -2).scatter_reduce",
    ): "any number below 0 means that an attempt has no step",
    (
        TEMPORAL,
        "compute_step_rewards",
        "last_tokens = last_token_A[last_token_A >= 0] -> last_tokens = last_token_A[last_token_A >= 1]",
    ): "token 0 of a batch is the first of its row; it has no prediction, so packing refuses it as a "
    "trained token",
    (
        COMMON,
        "put_all_in_one_bin",
        "return (torch.zeros(len(x), dtype=torch.int64), 1) -> return (torch.zeros(len(x), "
        "dtype=torch.int64), 2)",
    ): "the additional bin has no member, and its value is never read",
    (
        COMMON,
        "AttemptSteps.pad",
        "width = int(self.count_A.max()) if len(self.count_A) else 0 -> "
        "width = int(self.count_A.max()) if len(self.count_A) else 1",
    ): "a matrix without rows is as empty at any width",
    (
        COMMON,
        "AttemptSteps.pad",
        "x_AL = x_T.new_zeros(len(self.count_A), width) -> x_AL = "
        "-x_T.new_zeros(len(self.count_A), width)",
    ): MINUS_ZERO,
    (
        COMMON,
        "AttemptSteps.unpad",
        "x_T = x_AL.new_zeros(self.n_tokens) -> x_T = -x_AL.new_zeros(self.n_tokens)",
    ): MINUS_ZERO,
    (
        TEMPORAL,
        "_find_last_rows",
        "torch.full((size,), -1).scatter_reduce -> torch.full((size,), -2).scatter_reduce",
    ): "every attempt has a sequence, whose index is at least 0, so the initial value is replaced",
    (
        TEMPORAL,
        "_count_earlier_turns",
        "earlier.append(turns_so_far.get(attempt, 0)) -> earlier.append(turns_so_far.get(attempt, 1))",
    ): "the numbers of an attempt's turns are only compared with each other, so all may begin at 1",
    (
        TEMPORAL,
        "_count_earlier_turns",
        "zip(index_attempts(batch)[0].tolist(), turns_S.tolist(), strict=True) -> "
        "zip(index_attempts(batch)[0].tolist(), turns_S.tolist(), strict=False)",
    ): "both have one element for each sequence",
    (
        TEMPORAL,
        "_measure_explained_variance",
        "(returns_N - values_N).var(correction=0) / returns_N.var(correction=0) -> "
        "(values_N - returns_N).var(correction=0) / returns_N.var(correction=0)",
    ): "the variance of -x is that of x",
    (
        DISTILLATION,
        "kl",
        "safe_NK = torch.where(possible_NK, p_NK, 0.0) -> safe_NK = torch.where(possible_NK, p_NK, 1.0)",
    ): "any finite number gives the same result, because the next line masks it",
    (
        GROUP,
        "gdpo",
        "part_A = torch.full_like(total_A, torch.nan) -> part_A = -torch.full_like(total_A, "
        "torch.nan)",
    ): "NaN negated is NaN",
}
