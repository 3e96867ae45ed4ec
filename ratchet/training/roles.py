"""Build a stage's learners: the policy and the other roles of its algorithm."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ratchet.algorithms.base import Algorithm, Role
from ratchet.config.base import Section
from ratchet.config.resolve import add_slot_keys, build
from ratchet.config.schema import OptimizerConfig
from ratchet.config.sections import LearnerSection
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.processor import Processor, load_processor
from ratchet.errors import ConfigError, ModelError
from ratchet.learners.compute.token_outputs import SCALAR_COLUMNS
from ratchet.learners.config import DistributedConfig
from ratchet.learners.cross_tokenizer_teacher import AlignedTeacher
from ratchet.learners.distributed.role_spec import RoleSpec
from ratchet.learners.lora_reference import LoRAReference
from ratchet.learners.remote import RemoteLearner
from ratchet.learners.teacher import Teacher
from ratchet.models.load import find_model, load_policy, reads_media
from ratchet.models.lora.decoder import Adapter, is_adapter_parameter
from ratchet.models.model_source import ModelSource
from ratchet.models.policy import UNLIMITED, DecoderPolicy, PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.models.weights.hf_weights import read_text_config
from ratchet.protocols import Generator, Learner
from ratchet.utils.user_parts import add_missing_members
from ratchet.worker_protocols import Workers

# Largest vocabulary whose log-probabilities are all kept: a batch of 8,192 tokens then takes
# 8,192 x 4,096 x 4 bytes = 128 MiB.
WHOLE_VOCABULARY = 4096


def make_roles(
    model: PolicyModel,
    tokenizer: Tokenizer,
    algorithm: Algorithm,
    *,
    section: LearnerSection,
    optimizer: OptimizerConfig,
    steps: int,
    ranks: Workers | None = None,
    algorithm_section: Section | None = None,
    adapter: Adapter | None = None,
) -> dict[str, Learner]:
    """Return the learner "policy", which trains `model`, and one for each role of the algorithm.

    A role that no term updates is frozen. A role whose passes or terms read a scalar head gets one,
    initialised to zeros.

    With a LoRA adapter, the policy without its adapter serves as the frozen copy of the policy (the
    reference). A copy that trains (a critic) gets its own adapter on the same weights. The previous
    stage's adapter is merged into the weights first.

    Embedding rows beyond the tokenizer's tokens are padding, whose size differs within a model
    family. So distributions are compared over the token ids that all models have, and renormalised
    to sum to 1. No text contains the other ids.

    Args:
        model: The policy's model.
        tokenizer: The policy's tokenizer.
        algorithm: Names the roles.
        section: The section of the learners.
        optimizer: The optimizer's section.
        steps: Number of batches in the stage.
        ranks: The learners' worker processes; None trains in this process.
        algorithm_section: The algorithm's section, from which worker processes build it again.
        adapter: The LoRA adapter that the policy trains instead of its weights.

    Raises:
        ConfigError: See `check_roles`.
    """
    check_roles(model.vocab_size, tokenizer, algorithm)
    if ranks is None and isinstance(section, DistributedConfig):
        raise ConfigError(
            f"learner.kind={section.kind_name} trains in worker processes, but there are none. "
            "Pass the ranks of ratchet.training.from_config.start_processes to Policy.create, or "
            "set learner.kind=local"
        )
    arguments: dict[str, Any] = {
        "section": section,
        "optimizer": optimizer,
        "steps": steps,
        "adapter": adapter,
    }
    if ranks is not None:
        return _make_remote_roles(
            ranks, model, tokenizer, algorithm, algorithm_section, **arguments
        )
    return _make_local_roles(model, tokenizer, algorithm, **arguments)


def _make_local_roles(
    model: PolicyModel,
    tokenizer: Tokenizer,
    algorithm: Algorithm,
    *,
    section: LearnerSection,
    optimizer: OptimizerConfig,
    steps: int,
    adapter: Adapter | None,
) -> dict[str, Learner]:
    """Return learners that train in this process."""
    if model.adapter is not None:
        model.merge()
    if adapter is not None:
        model.attach(adapter)
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype

    def make_learner(name: str, role: Role, role_model: PolicyModel) -> Learner:
        is_trained = name in algorithm.losses
        role_optimizer = (
            optimizer if role.lr is None else optimizer.model_copy(update={"lr": role.lr})
        )
        head = (
            ScalarHead(role_model.hidden_size).to(device, dtype)
            if SCALAR_COLUMNS & algorithm.required_outputs(name)
            else None
        )
        learner = build(
            section,
            role_model if is_trained else role_model.requires_grad_(False),
            optimizer=role_optimizer if is_trained else None,
            total_steps=_count_updates(algorithm, name, steps),
            unit=algorithm.unit,
            head=head,
            autocast=device.type == "cuda",
            **({"shared_vocab": shared_vocab} if shared_vocab < role_model.vocab_size else {}),
            **({"replays_routes": True} if algorithm.replays_routes and name == "policy" else {}),
        )
        return add_missing_members(learner, Learner)

    adapterless = _list_adapterless_copies(algorithm, model.adapter)
    models = {
        name: _copy_model(model) if role.path is None else load_policy(role.path, device=device)
        for name, role in algorithm.roles.items()
        if name not in adapterless
    }
    compared_models = [
        model,
        *(role_model for name, role_model in models.items() if not algorithm.roles[name].aligned),
    ]
    shared_vocab = min(role_model.vocab_size for role_model in compared_models)
    policy = make_learner("policy", Role(), model)
    roles: dict[str, Learner] = {
        "policy": policy,
        **{name: LoRAReference(policy) for name in adapterless},
    }
    for name, role in algorithm.roles.items():
        if name in adapterless:
            continue
        role_learner = make_learner(name, role, models[name])
        if role.path is not None:
            vocab = models[name].vocab_size
            positions = models[name].max_positions
            role_learner = _make_teacher(
                role_learner, name, role.path, role, vocab, positions, tokenizer
            )
        roles[name] = role_learner
    return roles


def _list_adapterless_copies(algorithm: Algorithm, adapter: Adapter | None) -> frozenset[str]:
    """Return the roles that are frozen copies of the policy; none if the policy has no adapter.

    The policy with its adapter switched off serves as each of these copies.
    """
    if adapter is None:
        return frozenset()
    return frozenset(
        name
        for name, role in algorithm.roles.items()
        if role.path is None and name not in algorithm.losses
    )


def _copy_model(model: PolicyModel) -> PolicyModel:
    """Return a copy of the policy. With an adapter, only the adapter is copied, not the weights."""
    if model.adapter is None:
        return copy.deepcopy(model)
    frozen = [p for name, p in model.named_parameters() if not is_adapter_parameter(name)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*frozen, *model.buffers())})


def _make_remote_roles(
    ranks: Workers,
    model: PolicyModel,
    tokenizer: Tokenizer,
    algorithm: Algorithm,
    algorithm_section: Section | None,
    *,
    section: LearnerSection,
    optimizer: OptimizerConfig,
    steps: int,
    adapter: Adapter | None,
) -> dict[str, Learner]:
    """Return learners that call `ranks`, the worker processes that train."""
    assert isinstance(section, DistributedConfig), (
        "only distributed learners run in other processes"
    )
    if algorithm_section is None:
        raise ConfigError(
            f"algorithm {algorithm.name} was made in Python, but learner.kind={section.kind_name} "
            "builds its losses again in other processes. Set StageSpec.algorithm to its section"
        )
    _check_optimizer(section, optimizer)
    shapes = {name: _read_shape(role.path, model) for name, role in algorithm.roles.items()}
    compared_sizes = (shapes[name][0] for name, role in algorithm.roles.items() if not role.aligned)
    shared_vocab = min([model.vocab_size, *compared_sizes])
    specs: dict[str, RoleSpec] = {}
    adapterless = _list_adapterless_copies(algorithm, adapter)
    for name, role in {"policy": Role(), **algorithm.roles}.items():
        if name in adapterless:
            continue
        role_optimizer = (
            optimizer if role.lr is None else optimizer.model_copy(update={"lr": role.lr})
        )
        specs[name] = RoleSpec(
            origin=None if role.path is None else ModelSource(path=role.path),
            optimizer=add_slot_keys("optimizer", role_optimizer).model_dump(mode="json")
            if name in algorithm.losses
            else None,
            total_steps=_count_updates(algorithm, name, steps),
            has_scalar_head=bool(SCALAR_COLUMNS & algorithm.required_outputs(name)),
            shared_vocab=shared_vocab,
            replays_routes=algorithm.replays_routes and name == "policy",
            adapter=adapter if role.path is None else None,
        )
    ranks.call_now("begin", specs, algorithm_section.model_dump(mode="json"))
    roles: dict[str, Learner] = {}
    for name in specs:
        role = algorithm.roles.get(name, Role())
        vocab, positions = shapes.get(name, (model.vocab_size, model.max_positions))
        learner = RemoteLearner(
            ranks,
            section,
            name,
            device=next(model.parameters()).device.type,
            vocab_size=vocab,
            unit=algorithm.unit,
            shares_prefixes=model.shares_prefixes,
        )
        roles[name] = (
            learner
            if role.path is None
            else _make_teacher(learner, name, role.path, role, vocab, positions, tokenizer)
        )
        if name == "policy":
            roles |= {copy_name: LoRAReference(learner) for copy_name in adapterless}
    return roles


def _check_optimizer(section: DistributedConfig, optimizer: OptimizerConfig) -> None:
    """Raise ConfigError for an optimizer that the learner does not support."""
    kind = section.kind_name
    if section.has_own_adamw and optimizer.needs_whole_matrices:
        raise ConfigError(
            f"learner.kind={kind} has only its own AdamW, and {type(optimizer).__name__} is "
            "another optimizer. Set optimizer.kind=adamw, or learner.kind=dtensor"
        )


def _count_updates(algorithm: Algorithm, name: str, steps: int) -> int:
    """Return the number of optimizer steps of a role."""
    return (steps - algorithm.warmup.get(name, 0)) * algorithm.updates_per_batch


def _read_shape(path: str | None, model: PolicyModel) -> tuple[int, int]:
    """Return a role's vocabulary size and maximum row length, from its model's files alone."""
    if path is None:
        return model.vocab_size, model.max_positions
    shape = read_text_config(find_model(path))
    return int(shape["vocab_size"]), int(shape.get("max_position_embeddings") or UNLIMITED)


def check_roles(
    vocab_size: int, tokenizer: Tokenizer, algorithm: Algorithm, *, longest: int = 0
) -> None:
    """Check the models that roles load from a path, without loading their weights.

    A model must exist. It must have the policy's tokens and take rows of `longest` tokens (0: the
    length is not checked), unless its role is aligned: such a role has a tokenizer of its own.

    Args:
        vocab_size: The size of the policy's vocabulary.
        tokenizer: The policy's tokenizer.
        algorithm: Names the roles.
        longest: The number of tokens of the longest row that must fit.

    Raises:
        ConfigError: A model does not fit.
    """
    sizes = [vocab_size]
    for name, role in algorithm.roles.items():
        if role.path is None:
            continue
        try:
            shape = read_text_config(find_model(role.path))
            role_tokenizer = load_tokenizer(role.path)
        except ModelError as error:
            raise ConfigError(
                f"{name}: {error}. If another run makes this model, finish that run first"
            ) from error
        context = shape.get("max_position_embeddings")
        size = shape.get("vocab_size", role_tokenizer.vocab_size)
        if not role.aligned:
            _check_same_tokens(name, role.path, role_tokenizer, tokenizer, size)
            sizes.append(size)
            if context is not None and longest > context:
                raise ConfigError(
                    f"{name}: the model in {role.path} reads {context} tokens, but attempts may "
                    f"have {longest}. Lower sampling.max_new_tokens"
                )
    keeps_whole_vocabulary = any(
        scoring_pass.output == "topk_logprobs" and not scoring_pass.top_k
        for scoring_pass in algorithm.passes
    )
    if keeps_whole_vocabulary and min(sizes) > WHOLE_VOCABULARY:
        raise ConfigError(
            f"algorithm.top_k=null keeps {min(sizes):,} log-probabilities for each token of a "
            f"batch, but the limit is a vocabulary of {WHOLE_VOCABULARY:,}. Set algorithm.top_k=64"
        )


def check_media_readers(
    processor: Processor | None, algorithm: Algorithm, *, needs_media: bool
) -> None:
    """Check that models loaded from a path read the media that the policy's processor prepares.

    Args:
        processor: The policy's processor; None if the policy reads no media.
        algorithm: Names the roles.
        needs_media: True if every task has media. If it is False, a model may read text alone.

    Raises:
        ConfigError: A model does not read these media.
    """
    for name, role in algorithm.roles.items():
        if processor is None or role.path is None:
            continue
        directory = find_model(role.path)
        if role.aligned or not reads_media(directory):
            if needs_media:
                reason = (
                    "with teacher_tokens=aligned it reads text alone"
                    if role.aligned
                    else f"the model in {role.path} reads text alone"
                )
                raise ConfigError(
                    f"{name}: {reason}, but the tasks have images, audio or videos. Use a teacher "
                    "of the policy's family that reads media"
                    f"{', with teacher_tokens=same' if role.aligned else ''}"
                )
            continue
        role_processor = load_processor(directory)
        if role_processor is None or role_processor.settings != processor.settings:
            raise ConfigError(
                f"{name}: the model in {role.path} has another media processor than the policy, so "
                "it can't read the policy's inputs. Use a teacher of the policy's family, or copy "
                "the policy's processor files there if they fit that model"
            )


def check_routers(
    model: PolicyModel, generator: Generator, algorithm: Algorithm, section: LearnerSection
) -> None:
    """Check that model, generator and learners support `algorithm.router`.

    The model must have routers. For replay, the generator must record the experts of each token.
    To measure or train routers, each rank must see a router's outputs whole.

    Args:
        model: The policy's model.
        generator: The policy's generator.
        algorithm: An algorithm that may read or replay routers.
        section: The section of the learners.

    Raises:
        ConfigError: The model, the generator or the learners do not support it.
    """
    reads_routers = any("routers" in algorithm.required_outputs(role) for role in algorithm.losses)
    if (algorithm.replays_routes or reads_routers) and not model.has_routers:
        reason = (
            "this model has none"
            if isinstance(model, DecoderPolicy)
            else "transformers runs this model"
        )
        raise ConfigError(
            "algorithm.router needs a mixture of experts on Ratchet's own decoder, but "
            f"{reason}. Remove algorithm.router"
        )
    if algorithm.replays_routes and not generator.records_routes:
        raise ConfigError(
            "algorithm.router.replay=true needs the experts of each sampled token, which "
            f"{type(generator).__name__} does not record. Set generator.kind=engine, or for vLLM "
            "generator.arguments={enable_return_routed_experts: true}, or "
            "algorithm.router.replay=false"
        )
    if reads_routers and isinstance(section, DistributedConfig):
        for key in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
            if (value := getattr(section, key)) > 1:
                raise ConfigError(
                    f"learner.{key}={value} splits the router outputs over ranks, but "
                    "algorithm.router's losses and metrics need them whole. Set "
                    f"router.measure=false and no router coefficient, or learner.{key}=1"
                )
        if section.recomputes_layers:
            raise ConfigError(
                "learner.recompute=full keeps no gradient of the router outputs, which "
                "algorithm.router's losses need. Set router.measure=false and no router "
                "coefficient, or learner.recompute=attention"
            )


def _check_same_tokens(
    name: str, path: str, tokenizer: Tokenizer, policy_tokenizer: Tokenizer, size: int
) -> None:
    """Raise ConfigError unless a role's tokenizer fits the policy's, and its model's vocabulary.

    size: The vocabulary size of the model at `path`.
    """
    if not tokenizer.has_same_tokens(policy_tokenizer):
        raise ConfigError(
            f"{name}: the model in {path} has another tokenizer than the policy, so their tokens "
            "can't be compared. Set teacher_tokens=aligned, or use a teacher of the same family"
        )
    if tokenizer.vocab_size > size:
        raise ConfigError(
            f"{name}: the tokenizer in {path} has {tokenizer.vocab_size} tokens, but the model's "
            f"embedding has {size}. Copy the model's own tokenizer there"
        )


def get_max_row_length(model: PolicyModel, roles: Mapping[str, Learner]) -> int:
    """Return the maximum row length in tokens of the policy and the teachers that read its rows."""
    limits = (
        role.max_positions
        for role in roles.values()
        if isinstance(role, Teacher) and role.reads_rows
    )
    return min([model.max_positions, *limits])


def _make_teacher(
    learner: Learner,
    name: str,
    path: str,
    role: Role,
    vocab: int,
    positions: int,
    tokenizer: Tokenizer,
) -> Teacher:
    """Return the teacher around the learner of a model at `path`.

    Args:
        learner: The frozen learner of the teacher's model.
        name: The role's name.
        path: The teacher's model directory.
        role: The role.
        vocab: The vocabulary size of the teacher's model.
        positions: The maximum row length of the teacher's model, in tokens.
        tokenizer: The policy's tokenizer.
    """
    if role.aligned:
        return AlignedTeacher(learner, tokenizer, load_tokenizer(path), max_positions=positions)
    can_read_media = reads_media(find_model(path))
    return Teacher(
        learner, name=name, max_positions=positions, vocab_size=vocab, reads_media=can_read_media
    )
