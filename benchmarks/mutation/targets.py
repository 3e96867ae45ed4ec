"""Map each file of the maths to its tests. Paths are relative to the root of the repository."""

from __future__ import annotations

MATHS = "ratchet/algorithms"
TESTS = "tests/algorithms"
EVERYWHERE = ("mutants_found",)  # tests of every file

TARGETS: dict[str, tuple[str, ...]] = {
    "advantages/common.py": ("advantages", "group_advantages", "temporal", "compose"),
    "advantages/group_baselines.py": ("group_advantages", "advantages"),
    "advantages/per_turn.py": ("temporal",),
    "advantages/teacher.py": ("temporal", "compose"),
    "advantages/compose.py": ("compose",),
    "losses/common.py": ("losses", "value_loss"),
    "losses/policy.py": ("policy_losses", "losses"),
    "losses/preference.py": ("preference", "kto"),
    "losses/reward_model.py": ("reward_model",),
    "losses/distillation.py": ("distillation",),
    "losses/expert_balance.py": ("routers",),
    "kl.py": ("kl_penalty", "kl_in_reward"),
    "rollout_correction.py": ("rollout_correction",),
    "shaping.py": ("shaping",),
    "filters.py": ("filters",),
    "loss_aggregation.py": ("loss_aggregation",),
    "base.py": ("losses", "invariances", "preference"),
}

# Files in which only these functions are maths.
FUNCTIONS = {f"{MATHS}/base.py": ("AlgorithmTerm.__call__", "Algorithm.weigh")}


def targets() -> dict[str, list[str]]:
    return {
        f"{MATHS}/{file}": [f"{TESTS}/test_{name}.py" for name in (*names, *EVERYWHERE)]
        for file, names in TARGETS.items()
    }
