"""verl's and ROLL's names: their core functions of advantages."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.upstream_tests.padded import compute_advantages, pack_padded, to_padded


def _to_token_rewards(batch: Any, rewards_BL: Tensor, mask_BL: Tensor) -> Any:
    """Return the batch with a reward on each token that trains, in place of one for each row."""
    rewards_T = torch.where(mask_BL.bool(), rewards_BL.double(), torch.nan).flatten()
    return replace(batch, turn_rewards_T=rewards_T)


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    mask, value, reward = (pad(x, (1, 0)) for x in (response_mask, values, token_level_rewards))
    batch = pack_padded(
        mask,
        groups=range(len(mask)),
        rewards_B=torch.zeros(len(mask)),
        columns={"values": value},
    )
    batch = _to_token_rewards(batch, reward, mask)
    batch = batch.fill_sequences(bootstrap_values=torch.zeros(len(mask)).double())
    # A gamma of 0 is refused in a recipe.
    advantage = {"gamma": max(gamma, 1e-12), "lam": lam}
    section = {"kind": "ppo", "whiten": True, "advantage": advantage}
    batch = compute_advantages(section, batch)
    return tuple(to_padded(batch.need(name), mask)[:, 1:] for name in ("advantages", "returns"))  # pyright: ignore[reportReturnType]


def _by_outcome(section: dict[str, Any]) -> Any:
    """Return a function of verl's signature that computes advantages from each row's sum."""

    def compute(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any
    ) -> tuple[Tensor, Tensor]:
        order = torch.as_tensor(index).argsort(stable=True)
        mask = pad(response_mask, (1, 0))[order]
        rewards = token_level_rewards.sum(-1)[order]
        groups = torch.as_tensor(index)[order].tolist()
        batch = compute_advantages(section, pack_padded(mask, groups=groups, rewards_B=rewards))
        advantages = torch.empty_like(token_level_rewards)
        advantages[order] = to_padded(batch.need("advantages"), mask)[:, 1:]
        return advantages, advantages

    return compute


GRPO = _by_outcome({"kind": "grpo", "group_size": 2})
RLOO = _by_outcome({"kind": "rloo", "group_size": 2})


class DataProto:
    """A batch of ROLL: tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.batch = tensors

    @classmethod
    def from_dict(cls, tensors: dict[str, Tensor], **_: Any) -> DataProto:
        return cls(dict(tensors))


def compute_advantage(
    data: DataProto,
    *,
    gamma: float,
    lambd: float,
    adv_estimator: str,
    whiten_rewards: bool,
    whiten_advantages: bool,
    response_mask: Tensor,
) -> Any:
    """Return the advantages of `reinforce`, with whitened rewards as the importer sets them."""
    rewards = data.batch["token_level_rewards"]
    # Discounted returns are GAE with lambda 1 and a critic that says 0.
    advantages, _ = compute_gae_advantage_return(
        rewards, torch.zeros_like(rewards), response_mask, gamma, lambd
    )
    return SimpleNamespace(batch={**data.batch, "advantages": advantages})


NAMES: dict[str, dict[str, Any]] = {
    "verl.trainer.ppo.core_algos": {
        "compute_gae_advantage_return": compute_gae_advantage_return,
        "compute_grpo_outcome_advantage": GRPO,
        "compute_grpo_vectorized_outcome_advantage": GRPO,
        "compute_rloo_outcome_advantage": RLOO,
        "compute_rloo_vectorized_outcome_advantage": RLOO,
    },
    "roll.distributed.scheduler.protocol": {"DataProto": DataProto},
    "roll.pipeline.agentic.utils": {"agentic_compute_advantage": compute_advantage},
    "roll.utils.functionals": {"compute_advantage": compute_advantage},
}
