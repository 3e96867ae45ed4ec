"""Checks of a recipe's judges and of the rewards that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches

from ratchet.config.base import Section
from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.config.sections import list_judged


def judge_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield a conflict for each judge that no reward of the recipe names."""
    rewards = [
        reward
        for stage in config.stages
        for _, sections in _list_rewards(stage)
        for reward in sections
    ]
    # A reward class of the user's own may take any judge (`Reward.use_judges`).
    if any(":" in reward.kind_name for reward in rewards):
        return
    used = {reward.judge for reward in list_judged(rewards)}
    # A misspelt name is an error of the reward (`_check_judged`), and may mean this judge.
    if used - {judge.name for judge in config.judges}:
        return
    for index, judge in enumerate(config.judges):
        if judge.name not in used:
            yield Conflict(
                (("judges", index, "name"),),
                f"judge {judge.name} judges nothing, as no reward names it: set judge: "
                f"{judge.name} in a reward, or remove it from judges",
            )


def _list_rewards(stage: StageConfig) -> Iterator[tuple[str, tuple[Section, ...]]]:
    """Yield each key of a stage that holds rewards, and its rewards."""
    yield "rewards", stage.rewards
    yield "eval_rewards", stage.eval_rewards
    yield "sentinels.second_opinion", stage.sentinels.second_opinion


def _check_judged(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that the recipe has the judges that its rewards name, of the kinds that they need."""
    kinds = {judge.name: judge.kind_name for judge in config.judges}
    for key, sections in _list_rewards(stage):
        for index, section in enumerate(sections):
            for reward in list_judged(section):
                name = str(reward.judge)
                below = ("judge",) if section is reward else ()
                place = ((*key.split("."), index, *below),)
                if name not in kinds:
                    yield Conflict(place, _explain_unknown(name, list(kinds)))
                elif ":" not in kinds[name] and kinds[name] != reward.judge_kind:
                    yield Conflict(
                        place,
                        f"reward {reward.kind_name} needs a judge of kind {reward.judge_kind}, "
                        f"and {name} is a {kinds[name]}: name another judge, or set its kind",
                    )


def _explain_unknown(name: str, names: list[str]) -> str:
    if not names:
        return (
            f"judge={name}, but the recipe has no judges: add judges: [{{name: {name}, path: ...}}]"
        )
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"judge={name} is none of the recipe's judges: {hint}there are {', '.join(names)}"


def _check_judged_in_workers(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Refuse judges where worker processes judge the attempts, which can't reach them."""
    if not stage.is_played_by_workers:
        return
    for reward in list_judged(stage.rewards):
        yield clash(
            "generator.worker_runs=groups judges attempts in worker processes, which can't reach "
            f"judge {reward.judge} of the run: set generator.worker_runs=completions",
            "generator.worker_runs",
            "rewards",
        )


JUDGE_CHECKS: tuple[Callable[[StageConfig, RunConfig], Iterator[Conflict]], ...] = (
    _check_judged,
    _check_judged_in_workers,
)
