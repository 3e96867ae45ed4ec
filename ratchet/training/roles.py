"""The models of a stage beside the policy, and the learners of all of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ratchet.algorithms.base import Algorithm, Role
from ratchet.config.base import Section
from ratchet.config.resolve import construct, with_kind
from ratchet.config.schema import OptimizerConfig
from ratchet.data.chat.tokenizer import Tokenizer, load_tokenizer
from ratchet.data.processor import Processor, load_processor
from ratchet.errors import ConfigError, ModelError
from ratchet.learners.compute.token_outputs import SCALARS
from ratchet.learners.config import SpreadConfig
from ratchet.learners.cross_tokenizer_teacher import AlignedTeacher
from ratchet.learners.distributed.stage_spec import RoleSpec
from ratchet.learners.lora_reference import BaseView
from ratchet.learners.remote import RemoteLearner
from ratchet.learners.teacher import Teacher
from ratchet.models.load import find_model, load_policy, reads_media
from ratchet.models.lora.decoder import Adapter, of_adapter
from ratchet.models.model_source import Origin
from ratchet.models.policy import UNLIMITED, DecoderPolicy, PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.models.weights.hf_weights import read_json
from ratchet.protocols import Generator, Learner, Workers

WHOLE_VOCABULARY = (
    # tokens: more make a batch's columns larger than many a model (8,192 tokens x 4,096 x 4 bytes:
    # 128 MiB)
    4096
)


def make_roles(
    model: PolicyModel,
    tokenizer: Tokenizer,
    algorithm: Algorithm,
    *,
    section: Section,
    optimizer: OptimizerConfig,
    steps: int,
    ranks: Workers | None = None,
    spec: Section | None = None,
    adapter: Adapter | None = None,
) -> dict[str, Learner]:
    """A learner for each role that the algorithm names, "policy" among them, which trains `model`
    itself. A role that no term updates is frozen. Those whose passes or terms read a scalar head
    get one, of zeros.

    adapter: what the policy trains in place of its weights, into which the one of the stage before
    is merged. A frozen copy of the policy is then the policy without it, and a copy that trains (a
    critic) gets an adapter of its own on the same weights.

    Rows of the embeddings beyond the tokenizer's tokens pad them, and models of one family have
    different numbers of them. So distributions are compared over the first tokens that all the
    models have, renormalised to sum to 1: what a model gives to the others, which no text contains,
    is left out of account.

    section: of the learners. steps: batches of the stage. ranks: the processes in which they live;
    None: this one. spec: the section that the algorithm was made from, for other processes to make
    it again. Raises ConfigError as `check_roles` does.
    """
    check_roles(model, tokenizer, algorithm)
    if ranks is None and isinstance(section, SpreadConfig):
        raise ConfigError(
            f"learner.kind={_kind(section)} trains in processes of a group, and there is none "
            "here: give Policy.of the ranks "
            "that ratchet.training.from_config.start_processes makes, or set learner.kind=local"
        )
    own: dict[str, Any] = {
        "section": section,
        "optimizer": optimizer,
        "steps": steps,
        "adapter": adapter,
    }
    if ranks is not None:
        return _remote_roles(ranks, model, tokenizer, algorithm, spec, **own)
    return _local_roles(model, tokenizer, algorithm, **own)


def _local_roles(
    model: PolicyModel,
    tokenizer: Tokenizer,
    algorithm: Algorithm,
    *,
    section: Section,
    optimizer: OptimizerConfig,
    steps: int,
    adapter: Adapter | None,
) -> dict[str, Learner]:
    if model.adapter is not None:
        model.merge()
    if adapter is not None:
        model.attach(adapter)
    first = next(model.parameters())
    device, dtype = first.device, first.dtype

    def learner(name: str, role: Role, body: PolicyModel) -> Any:
        trains = name in algorithm.losses
        own = optimizer if role.lr is None else optimizer.model_copy(update={"lr": role.lr})
        head = (
            ScalarHead(body.hidden_size).to(device, dtype)
            if SCALARS & algorithm.required_outputs(name)
            else None
        )
        return construct(
            section,
            body if trains else body.requires_grad_(False),
            optimizer=own if trains else None,
            total_steps=_updates(algorithm, name, steps),
            unit=algorithm.unit,
            head=head,
            autocast=device.type == "cuda",
            **({"shared_vocab": shared} if shared < body.vocab_size else {}),
            **({"replays": True} if algorithm.replays and name == "policy" else {}),
        )

    views = _views(algorithm, model.adapter)
    bodies = {
        name: _copy(model) if role.path is None else load_policy(role.path, device=device)
        for name, role in algorithm.roles.items()
        if name not in views
    }
    compared = [
        model,
        *(body for name, body in bodies.items() if not algorithm.roles[name].aligned),
    ]
    shared = min(body.vocab_size for body in compared)
    policy = learner("policy", Role(), model)
    roles: dict[str, Learner] = {"policy": policy, **{name: BaseView(policy) for name in views}}
    for name, role in algorithm.roles.items():
        if name in views:
            continue
        made = learner(name, role, bodies[name])
        vocab, positions = bodies[name].vocab_size, bodies[name].max_positions
        roles[name] = (
            made
            if role.path is None
            else _teacher(made, name, role.path, role, vocab, positions, tokenizer)
        )
    return roles


def _views(algorithm: Algorithm, adapter: Adapter | None) -> frozenset[str]:
    """The roles that are the policy without its adapter: copies that nothing trains."""
    if adapter is None:
        return frozenset()
    return frozenset(
        name
        for name, role in algorithm.roles.items()
        if role.path is None and name not in algorithm.losses
    )


def _copy(model: PolicyModel) -> PolicyModel:
    """Of the policy as it is; where it has an adapter, another one on the same weights, which
    rest."""
    if model.adapter is None:
        return copy.deepcopy(model)
    resting = [p for name, p in model.named_parameters() if not of_adapter(name)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*resting, *model.buffers())})


def _remote_roles(
    ranks: Workers,
    model: PolicyModel,
    tokenizer: Tokenizer,
    algorithm: Algorithm,
    spec: Section | None,
    *,
    section: Section,
    optimizer: OptimizerConfig,
    steps: int,
    adapter: Adapter | None,
) -> dict[str, Learner]:
    assert isinstance(section, SpreadConfig), "only learners of this kind live in other processes"
    if spec is None:
        raise ConfigError(
            f"algorithm {algorithm.name} was made in Python, and learner.kind={_kind(section)} "
            "makes its losses again in other "
            "processes: give Plan.algorithm the section that it is made from"
        )
    _check_remote(_kind(section), model, algorithm, optimizer)
    shapes = {name: _shape(role.path, model) for name, role in algorithm.roles.items()}
    compared = (shapes[name][0] for name, role in algorithm.roles.items() if not role.aligned)
    shared = min([model.vocab_size, *compared])
    specs: dict[str, RoleSpec] = {}
    views = _views(algorithm, adapter)
    for name, role in {"policy": Role(), **algorithm.roles}.items():
        if name in views:
            continue
        own = optimizer if role.lr is None else optimizer.model_copy(update={"lr": role.lr})
        specs[name] = RoleSpec(
            origin=None if role.path is None else Origin(path=role.path),
            optimizer=with_kind("optimizer", own).model_dump(mode="json")
            if name in algorithm.losses
            else None,
            total_steps=_updates(algorithm, name, steps),
            scalar=bool(SCALARS & algorithm.required_outputs(name)),
            shared_vocab=shared,
            replays=algorithm.replays and name == "policy",
            adapter=adapter if role.path is None else None,
        )
    ranks.call_now("begin", specs, spec.model_dump(mode="json"))
    roles: dict[str, Learner] = {}
    for name in specs:
        role, (vocab, positions) = (
            algorithm.roles.get(name, Role()),
            shapes.get(name, (model.vocab_size, model.max_positions)),
        )
        made = RemoteLearner(
            ranks,
            section,
            name,
            device=next(model.parameters()).device.type,
            vocab_size=vocab,
            unit=algorithm.unit,
            shares_prefixes=model.shares_prefixes,
        )
        roles[name] = (
            made
            if role.path is None
            else _teacher(made, name, role.path, role, vocab, positions, tokenizer)
        )
        if name == "policy":
            roles |= {view: BaseView(made) for view in views}
    return roles


def _check_remote(
    kind: str, model: PolicyModel, algorithm: Algorithm, optimizer: OptimizerConfig
) -> None:
    """What learners in other processes can't do. Raises ConfigError."""
    if optimizer.whole_matrices:
        raise ConfigError(
            f"{type(optimizer).__name__} computes with whole matrices, and learner.kind={kind} "
            "divides them: set "
            "optimizer.kind=adamw, or learner.kind=local"
        )
    copied = next((name for name, role in algorithm.roles.items() if role.path is None), None)
    if copied is not None and not isinstance(model, DecoderPolicy):
        raise ConfigError(
            f"{copied} is a copy of the policy, and learner.kind={kind} copies only models of "
            "Ratchet's own decoder: here "
            "transformers runs the model; choose an algorithm without it (kl.coef=0, say)"
        )


def _updates(algorithm: Algorithm, name: str, steps: int) -> int:
    return (steps - algorithm.warmup.get(name, 0)) * algorithm.updates_per_batch


def _shape(path: str | None, model: PolicyModel) -> tuple[int, int]:
    """(rows of the embedding, longest row) of a role's model, from its files alone."""
    if path is None:
        return model.vocab_size, model.max_positions
    shape = read_json(find_model(path) / "config.json")
    shape = shape.get("text_config") or shape
    return int(shape["vocab_size"]), int(shape.get("max_position_embeddings") or UNLIMITED)


def check_roles(
    model: PolicyModel, tokenizer: Tokenizer, algorithm: Algorithm, *, longest: int = 0
) -> None:
    """What models from elsewhere must be, from their files alone: there, of the policy's tokens (or
    asked about the same text in their own), and with room for rows of `longest` tokens. Raises
    ConfigError."""
    sizes = [model.vocab_size]
    for name, role in algorithm.roles.items():
        if role.path is None:
            continue
        try:
            shape = read_json(find_model(role.path) / "config.json")
            own = load_tokenizer(role.path)
        except ModelError as error:
            raise ConfigError(
                f"{name}: {error}; a model that another run makes is trained before"
            ) from error
        shape = shape.get("text_config") or shape
        context, size = (
            shape.get("max_position_embeddings"),
            shape.get("vocab_size", own.vocab_size),
        )
        if not role.aligned:
            _check_same_tokens(name, role.path, own, tokenizer, size)
            sizes.append(size)
            if context is not None and longest > context:
                raise ConfigError(
                    f"{name}: the model in {role.path} reads {context} tokens, and attempts may "
                    f"have {longest}: "
                    "lower sampling.max_new_tokens"
                )
    whole = any(item.output == "topk_logprobs" and not item.top_k for item in algorithm.passes)
    if whole and min(sizes) > WHOLE_VOCABULARY:
        raise ConfigError(
            f"algorithm {algorithm.name}: top_k=null keeps {min(sizes):,} numbers for each token "
            "of a batch, one for each "
            f"of the vocabulary, and is for vocabularies of up to {WHOLE_VOCABULARY:,}: set "
            "algorithm.top_k (64, say)"
        )


def check_readers(processor: Processor | None, algorithm: Algorithm, *, shown: bool) -> None:
    """What models from elsewhere must make of media, from their files alone: they are given what
    the policy's processor prepares. shown: whether every task has some. Raises ConfigError."""
    for name, role in algorithm.roles.items():
        if processor is None or role.path is None:
            continue
        directory = find_model(role.path)
        if role.aligned or not reads_media(directory):
            if shown:
                reads = (
                    "is asked about the text"
                    if role.aligned
                    else f"the model in {role.path} reads text"
                )
                raise ConfigError(
                    f"{name}: {reads} alone, and the tasks have images, audio or videos: use a "
                    "teacher of the policy's family "
                    f"that reads them{', with teacher_tokens=same' if role.aligned else ''}"
                )
            continue
        theirs = load_processor(directory)
        if theirs is None or theirs.settings != processor.settings:
            raise ConfigError(
                f"{name}: the model in {role.path} has another processor than the policy, whose "
                "inputs it can't read: use a "
                "teacher of the policy's family, or copy the policy's processor files there where "
                "they are right for it"
            )


def check_routers(
    model: PolicyModel, generator: Generator, algorithm: Algorithm, section: Section
) -> None:
    """What an algorithm wants of routers: that there are some, a sampler that records them, and
    learners (`section` is theirs) that see each whole. Raises ConfigError."""
    watches = any("routers" in algorithm.required_outputs(role) for role in algorithm.losses)
    if (algorithm.replays or watches) and not model.routes:
        why = (
            "this one has none"
            if isinstance(model, DecoderPolicy)
            else "transformers runs this one"
        )
        raise ConfigError(
            "algorithm.router is of a mixture of experts that Ratchet's own decoder runs, and "
            f"{why}: remove algorithm.router"
        )
    if algorithm.replays and not getattr(generator, "records_routes", False):
        raise ConfigError(
            "algorithm.router.replay needs the experts that each token was sampled with, which "
            f"{type(generator).__name__} "
            "does not record: set generator.kind=engine, or router.replay=false"
        )
    if watches and isinstance(section, SpreadConfig):
        for key in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
            if (value := getattr(section, key)) > 1:
                raise ConfigError(
                    f"learner.{key}={value} divides what the losses and measures of "
                    "algorithm.router read: set "
                    f"router.measure=false and no coefficient of it, or learner.{key}=1"
                )
        if getattr(section, "recompute", "none") == "full":
            raise ConfigError(
                "learner.recompute=full keeps no gradient of what the losses and measures of "
                "algorithm.router read: set "
                "router.measure=false and no coefficient of it, or learner.recompute=attention"
            )


def _check_same_tokens(name: str, path: str, own: Tokenizer, policys: Tokenizer, size: int) -> None:
    if not own.same_tokens(policys):
        raise ConfigError(
            f"{name}: the model in {path} has another tokenizer than the policy, so their tokens "
            "don't compare: "
            "set teacher_tokens=aligned with on_policy_distillation, or use a teacher of the same "
            "family"
        )
    if own.vocab_size > size:
        raise ConfigError(
            f"{name}: the tokenizer in {path} has {own.vocab_size} tokens, the model's embedding "
            f"{size}: "
            "they don't belong together; copy the model's own tokenizer there"
        )


def longest_row(model: PolicyModel, roles: Mapping[str, Learner]) -> int:
    """Tokens of a sequence that the policy and all that read the same tokens can take in."""
    limits = (
        role.max_positions
        for role in roles.values()
        if isinstance(role, Teacher) and role.reads_rows
    )
    return min([model.max_positions, *limits])


def _teacher(
    made: Learner,
    name: str,
    path: str,
    role: Role,
    vocab: int,
    positions: int,
    tokenizer: Tokenizer,
) -> Teacher:
    if role.aligned:
        return AlignedTeacher(made, tokenizer, load_tokenizer(path), max_positions=positions)
    reads = reads_media(find_model(path))
    return Teacher(made, name=name, max_positions=positions, vocab_size=vocab, reads_media=reads)


def _kind(section: Section) -> str:
    return str(getattr(section, "kind", ""))
