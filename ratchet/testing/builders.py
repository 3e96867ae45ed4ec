"""Build trajectories and groups for tests, in one line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ratchet.types import Group, Message, Outcome, Owner, Scored, Task, Trajectory, Turn, Use


def make_trajectory(
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    reward: float | None = None,
    outcome: Outcome | None = None,
    attempt: int = 0,
    use: Use = "train",
    temperature: float = 1.0,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
) -> Trajectory:
    """Return a trajectory of a prompt and one policy turn.

    `reward` is short for `outcome=Scored(reward)`.
    """
    n, m = len(prompt), len(completion)
    owner = np.asarray([Owner.PROMPT] * n + [Owner.POLICY] * m, dtype=np.int8)
    return Trajectory(
        tokens=np.asarray([*prompt, *completion], dtype=np.int64),
        owner=owner,
        trainable=owner == Owner.POLICY,
        rollout_logprobs=np.asarray(
            [0.0] * n + ([-1.0] * m if logprobs is None else list(logprobs)), dtype=np.float32
        ),
        versions=np.asarray([-1] * n + [version] * m, dtype=np.int32),
        attempt=attempt,
        use=use,
        temperature=temperature,
        turns=(Turn(n, n + m),),
        messages=(Message("user", "?"), Message("assistant", "!")),
        outcome=Scored(reward) if outcome is None and reward is not None else outcome,
    )


def make_group(name: str, trajectories: Sequence[Trajectory], *, tag: str = "") -> Group:
    return Group(name, Task(name, (Message("user", "?"),), tag=tag), tuple(trajectories))
