"""The models of a stage beside the policy, and the learners of all of them."""

from __future__ import annotations

import copy

import torch

from ratchet.algorithms.base import Algorithm, Role
from ratchet.config.base import Section
from ratchet.config.kinds import construct
from ratchet.config.schema import OptimizerConfig
from ratchet.data.tokenizer import Tokenizer, load_tokenizer
from ratchet.errors import ConfigError
from ratchet.interfaces import Learner
from ratchet.learners.aligned import AlignedTeacher
from ratchet.learners.columns import SCALARS
from ratchet.learners.teacher import Teacher
from ratchet.models.heads import ScalarHead
from ratchet.models.load import load_policy
from ratchet.models.policy import PolicyModel


def make_roles(
    model: PolicyModel,
    tokenizer: Tokenizer,
    algorithm: Algorithm,
    *,
    section: Section,
    optimizer: OptimizerConfig,
    steps: int,
) -> dict[str, Learner]:
    """A learner for each role that the algorithm names, "policy" among them, which trains `model` itself. A role that no term
    updates is frozen. Those whose passes or terms read a scalar head get one, of zeros.

    section: of the learners. steps: batches of the stage. Raises ConfigError for a teacher with another vocabulary.
    """
    total = steps * algorithm.updates_per_batch
    first = next(model.parameters())
    device, dtype = first.device, first.dtype

    def learner(name: str, role: Role, body: PolicyModel) -> Learner:
        trains = name in algorithm.losses
        own = optimizer if role.lr is None else optimizer.model_copy(update={"lr": role.lr})
        head = ScalarHead(body.hidden_size).to(device, dtype) if SCALARS & algorithm.needs_of(name) else None
        return construct(
            section,
            body if trains else body.requires_grad_(False),
            optimizer=own if trains else None,
            total_steps=total,
            unit=algorithm.unit,
            head=head,
            autocast=device.type == "cuda",
        )

    roles: dict[str, Learner] = {"policy": learner("policy", Role(), model)}
    for name, role in algorithm.roles.items():
        body = copy.deepcopy(model) if role.path is None else _load(role.path, device)
        made = learner(name, role, body)
        if role.path is not None:
            made = _speaking(made, name, role, tokenizer)
        roles[name] = made
    return roles


def _load(path: str, device: torch.device) -> PolicyModel:
    return load_policy(path, backend="auto", device=device, trust_remote_code=False, revision=None)


def _speaking(made: Learner, name: str, role: Role, tokenizer: Tokenizer) -> Learner:
    """A model from elsewhere must know the policy's tokens, or be asked about the same text in its own."""
    assert role.path is not None
    own = load_tokenizer(role.path)
    if role.aligned:
        return AlignedTeacher(made, tokenizer, own)
    if not own.same_tokens(tokenizer):
        raise ConfigError(
            f"{name}: the model in {role.path} has another tokenizer than the policy, so their tokens don't compare: "
            "set teacher_tokens=aligned with on_policy_distillation, or use a teacher of the same family"
        )
    return Teacher(made)
