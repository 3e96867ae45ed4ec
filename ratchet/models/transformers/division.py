"""Divide a model that transformers runs over ranks: by its plan, tokens, experts and layers.

Each division is followed by a probe: the ranks together must compute what the whole model does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.parallel.collectives import Group, all_reduce_sum
from ratchet.models.parallel.sharded_policy import DistributedShard
from ratchet.models.parallel.sharding import StageIndex
from ratchet.models.transformers.context_parallel import REMEDY as CONTEXT_REMEDY
from ratchet.models.transformers.context_parallel import (
    DividedAttention,
    check_context,
)
from ratchet.models.transformers.expert_parallel import REMEDY as EXPERTS_REMEDY
from ratchet.models.transformers.expert_parallel import (
    check_experts,
    choose_experts_forward,
    divide_experts,
    find_stacked_experts,
)
from ratchet.models.transformers.language_inputs import divide_language_inputs
from ratchet.models.transformers.pipeline_parallel import REMEDY as PIPELINE_REMEDY
from ratchet.models.transformers.pipeline_parallel import TransformersStage, keep_stages
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.models.transformers.probe import PROBE_LENGTHS, ProbeInputs, is_close, make_probe
from ratchet.models.transformers.sequence_parallel import REMEDY as SEQUENCE_REMEDY
from ratchet.models.transformers.sequence_parallel import TokenShards
from ratchet.models.transformers.tensor_parallel import divide_model
from ratchet.models.transformers.tp_plan import REMEDY, TPPlan, find_language_rules
from ratchet.utils.terminal_text import get_first_line

PROBE_TOKENS = 7  # length of the sequence in a probe of one sequence
# Factor on the tolerance for a divided model. It sums in another order, and the summands of a
# gradient nearly cancel each other. A wrong division changes gradients far more.
PROBE_ROUNDING = 100


def divide(
    policy: TransformersPolicy,
    shard: DistributedShard,
    device: torch.device | str,
) -> None:
    """Reduce a model to this rank's shard.

    device: the device that computes with the shard.

    Raises ModelError if the ranks together don't compute the same as the whole model.
    """
    if shard.experts is not None:
        # Before the layers are divided: a stage may have dense layers only.
        check_experts(policy.model, shard.experts.size())
    if shard.stages[0].count > 1:
        divide_by_layers(policy, shard.stages)
    if shard.tensor is not None:
        divide_by_plan(policy, shard.tensor, device, sequence=shard.sequence)
    if shard.context is not None:
        divide_by_tokens(policy, shard.context)
    if shard.experts is not None:
        divide_by_experts(policy, shard.experts)


def make_plan(policy: TransformersPolicy, ranks: int) -> TPPlan:
    """Return the plan by which tensor parallelism divides a model.

    Raises ModelError if the architecture has no plan, or if the model can't be divided evenly over
    this number of ranks.
    """
    model, head = policy.model, policy.head_name.removesuffix(".weight")
    rules = model.tp_plan
    if policy.reads_media:
        rules = find_language_rules(model, policy.language, head)
    plan = TPPlan.from_rules(model, rules, head)
    keys = {"query heads": "num_attention_heads", "KV heads": "num_key_value_heads"}
    heads = {name: getattr(policy.text_config, key, None) for name, key in keys.items()}
    plan.check(model, ranks, {name: total for name, total in heads.items() if total is not None})
    return plan


def check_sequence_division(policy: TransformersPolicy, n_first_layers: int) -> None:
    """Raise ModelError if ranks can't divide hidden states between the blocks of a model.

    n_first_layers: number of layers of the first pipeline stage.
    """
    name, n_feature_layers = type(policy.model).__name__, policy.n_feature_layers
    if (reason := _explain_no_packing(policy)) is not None:
        raise ModelError(
            f"{name} {reason}, which learner.sequence_parallel does not support where transformers "
            f"runs the model: {SEQUENCE_REMEDY}"
        )
    if n_feature_layers and n_first_layers <= n_feature_layers:
        # After the last layer of a stage hidden states are whole.
        raise ModelError(
            f"{name} adds features of images after its first {n_feature_layers} layers. With "
            "learner.sequence_parallel the first pipeline stage needs more layers than these, but "
            f"it has {n_first_layers}: set learner.stage_layers with {n_feature_layers + 1} or "
            f"more for that stage, or {SEQUENCE_REMEDY}"
        )


def _explain_no_packing(policy: TransformersPolicy) -> str | None:
    """Return why sequences with media can't share a forward; None if they can."""
    if policy.reads_media and not policy.probe_images:
        return "reads other media than images"
    if policy.packs:
        return None
    # Encoders may mix the media of different sequences.
    return f"can't pack sequences{' with images' if policy.reads_media else ''}"


def divide_by_plan(
    policy: TransformersPolicy,
    group: Group,
    device: torch.device | str,
    *,
    sequence: bool = False,
) -> None:
    """Reduce a model to this rank's tensor-parallel shard, on the device.

    sequence: True to divide hidden states too (sequence parallelism).

    Raises ModelError if the ranks together don't compute the same as the whole model.
    """
    plan, inputs = make_plan(policy, group.size()), make_probe(policy, (PROBE_TOKENS,))
    experts = _ExpertsProbe(policy, inputs)
    with experts.replay_routes():
        whole_probe = _probe(policy, inputs)
    tokens, plan_name = None, f"the plan of {type(policy.model).__name__} for tensor parallelism"
    remedy = REMEDY
    if sequence:
        stages = [stage.layers() for stage in policy.local_stages] or [policy.layers()]
        is_first = not policy.local_stages or policy.local_stages[0].index.index == 0
        check_sequence_division(policy, len(stages[0]) if is_first else len(policy.layers()))
        tokens, remedy = TokenShards(group, plan, stages), SEQUENCE_REMEDY
        plan_name = f"{plan_name}, with learner.sequence_parallel,"
    division = divide_model(policy.model, plan, group, tokens)
    policy.tp_division = division
    choose_experts_forward(policy.model)
    nn.Module.to(policy.model, device)
    if tokens is not None:
        experts.divide(tokens)
    experts.check(plan_name, remedy)
    try:
        with experts.replay_routes():
            shard_probe = _probe(policy, inputs)
    except (AttributeError, IndexError, TypeError, RuntimeError) as error:
        raise ModelError(f"{plan_name} can't be followed ({error}): {remedy}") from None
    for name, computed in shard_probe.items():
        expected = whole_probe[name].to(computed)
        if name == "logits" and division.vocab_parallel is not None:
            rows = division.vocab_parallel.rows
            expected = expected[:, rows.start : rows.stop]
        # The gradient of a divided parameter has only this rank's entries.
        if name not in division.divided_pieces and not is_close(
            computed, expected, policy.model.dtype, PROBE_ROUNDING
        ):
            raise ModelError(f"{plan_name} changes what the model computes ({name}): {remedy}")


def check_layer_division(policy: TransformersPolicy, stage: StageIndex) -> None:
    """Raise ModelError if a pipeline with such a stage can't compute what a model computes."""
    _cut_layers(policy, stage)


def divide_by_layers(policy: TransformersPolicy, indices: Sequence[StageIndex]) -> None:
    """Reduce a model to this rank's pipeline stages, which are the ones at `indices`.

    Raises ModelError if all stages together don't compute the same as the model.
    """
    stages = _cut_layers(policy, indices[0])
    tied = set(stages[0].parameters()) & set(stages[-1].parameters())
    policy.tied_stage_weights = frozenset(
        name for name, parameter in policy.model.named_parameters() if parameter in tied
    )
    own = [stages[index.index] for index in indices]
    keep_stages(policy, own)
    policy.frozen_parameters &= {name for name, _ in policy.named_parameters()}
    policy.stages = nn.ModuleList(own)


def _cut_layers(policy: TransformersPolicy, stage: StageIndex) -> list[TransformersStage]:
    """Return all stages of a pipeline with `stage`, which together compute what the model does."""
    stage.check(len(policy.layers()))
    name = type(policy.model).__name__
    if (reason := _explain_no_packing(policy)) is not None:
        raise ModelError(
            f"{name} {reason}, so its layers can't be divided over ranks: {PIPELINE_REMEDY}"
        )
    n_first = len(replace(stage, index=0).range(len(policy.layers())))
    if n_first < policy.n_feature_layers:
        raise ModelError(
            f"{name} adds features of images after its first {policy.n_feature_layers} layers, "
            f"which must be in the first pipeline stage, but that has {n_first}: set "
            f"learner.stage_layers with {policy.n_feature_layers} or more for that stage"
        )
    inputs = make_probe(policy, PROBE_LENGTHS)
    # Micro-batches of a pipeline are padded, but not those of a probe.
    _check_language_inputs(policy, inputs)
    whole_probe = _probe(policy, inputs)
    stages = [TransformersStage(policy, replace(stage, index=i)) for i in range(stage.count)]
    users = Counter(parameter for stage in stages for parameter in stage.parameters())
    embeddings = set(policy.model.get_input_embeddings().parameters())
    if any(n > 1 and parameter not in embeddings for parameter, n in users.items()):
        raise ModelError(f"layers of {name} in several stages share weights: {PIPELINE_REMEDY}")
    policy.stages = nn.ModuleList(stages)
    try:
        stages_probe = _probe(policy, inputs)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = get_first_line(str(error))
        raise ModelError(
            f"{name} can't compute in pipeline stages ({reason}): {PIPELINE_REMEDY}"
        ) from None
    finally:
        policy.stages = nn.ModuleList()
    for kind, computed in stages_probe.items():
        if not is_close(computed, whole_probe[kind], policy.model.dtype):
            raise ModelError(
                f"{name} computes something else in pipeline stages ({kind}): {PIPELINE_REMEDY}"
            )
    return stages


def check_token_division(policy: TransformersPolicy) -> None:
    """Raise ModelError if the tokens of a sequence can't be divided over ranks."""
    reason = None if policy.takes_positions else "takes no positions of tokens"
    if policy.reads_media:
        reason = _explain_no_packing(policy)
    if reason is not None:
        raise ModelError(
            f"{type(policy.model).__name__} {reason}, so its tokens can't be divided over ranks: "
            f"{CONTEXT_REMEDY}"
        )
    check_context(policy.model, policy.text_config)
    _check_language_inputs(policy, make_probe(policy, PROBE_LENGTHS))


def _check_language_inputs(policy: TransformersPolicy, inputs: ProbeInputs) -> None:
    """Raise ModelError if a multimodal model gives its language model what can't be divided."""
    if policy.reads_media:
        index = torch.arange(len(inputs.tokens_T), device=policy.model.device)
        with torch.no_grad(), divide_language_inputs(policy.language, index):
            inputs.run(policy)


def divide_by_tokens(policy: TransformersPolicy, group: Group) -> None:
    """Let `hidden` compute only this rank's tokens, with the keys and values of all ranks.

    Raises ModelError if the ranks together don't compute the same as one.
    """
    check_token_division(policy)
    inputs = make_probe(policy, PROBE_LENGTHS)
    whole_probe = _probe(policy, inputs)
    policy.divided_attention = DividedAttention(policy.language, policy.text_config, group)
    context_split = policy.split_context(inputs.lengths)
    assert context_split is not None, "the group has more than one rank"
    tokens = torch.from_numpy(context_split.tokens)
    for name, computed in _probe(policy, inputs).items():
        expected = whole_probe[name]
        if name in ("hidden states", "logits"):
            expected = expected[tokens.to(expected.device)]
        else:
            computed = all_reduce_sum(computed, group)
        if len(expected) and not is_close(computed, expected, policy.model.dtype, PROBE_ROUNDING):
            raise ModelError(
                f"{type(policy.model).__name__} computes something else when its tokens are "
                f"divided over ranks ({name}): {CONTEXT_REMEDY}"
            )


def divide_by_experts(policy: TransformersPolicy, group: Group) -> None:
    """Reduce each layer's experts to this rank's.

    `check_experts` says whether they can be divided.

    Raises ModelError if the ranks together don't compute the same as one.
    """
    experts = _ExpertsProbe(policy, make_probe(policy, (PROBE_TOKENS,)))
    divided_pieces = {} if policy.tp_division is None else policy.tp_division.divided_pieces
    policy.expert_division = divide_experts(policy.model, group, divided_pieces)
    name = f"{type(policy.model).__name__}, whose experts are divided over ranks,"
    experts.check(name, EXPERTS_REMEDY)


class _ExpertsProbe:
    """Compares what stacked experts compute of a few tokens before and after a division.

    The experts of each token are those of the first forward: near a tie a router could choose
    others after a rounding difference.
    """

    def __init__(self, policy: TransformersPolicy, inputs: ProbeInputs) -> None:
        self._dtype = policy.model.dtype
        self._modules = find_stacked_experts(policy.model)
        self._inputs: dict[str, tuple[Tensor, ...]] = {}
        if self._modules:
            with torch.no_grad(), self.replay_routes():
                inputs.run(policy)
        # The weights of the outputs in the loss.
        self._weights = {
            path: torch.arange(hidden.numel(), dtype=hidden.dtype).cos().view(hidden.shape)
            for path, (hidden, *_) in self._inputs.items()
        }
        self._outputs = {path: self._compute(path) for path in self._inputs}

    def divide(self, tokens: TokenShards) -> None:
        """Keep this rank's tokens only, because experts now get no others."""
        self._inputs = _take_own(self._inputs, tokens)
        self._outputs = _take_own(self._outputs, tokens)
        self._weights = {path: tokens.take_own(x) for path, x in self._weights.items()}

    @contextmanager
    def replay_routes(self) -> Iterator[None]:
        """Within the context, give experts the routes of the first forward, without gradients."""

        def make_hook(path: str) -> Any:
            def replay(_: nn.Module, args: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
                hidden, *routes = *args, *named.values()
                __, *first_routes = self._inputs.setdefault(path, (hidden, *routes))
                return (hidden, *(x.to(hidden.device) for x in first_routes)), {}

            return replay

        hooks = [
            # Before the hooks of a division, which gather divided tokens.
            module.register_forward_pre_hook(make_hook(path), with_kwargs=True, prepend=True)
            for path, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check(self, name: str, remedy: str) -> None:
        """Raise ModelError if the experts compute something else than before.

        name: the model and its division, in a message.
        """
        for path, outputs in self._outputs.items():
            try:
                outputs_now = self._compute(path)
            except (IndexError, TypeError, RuntimeError) as error:
                raise ModelError(f"{name} can't compute {path} ({error}): {remedy}") from None
            for computed, expected in zip(outputs_now, outputs, strict=True):
                if not is_close(computed, expected.to(computed), self._dtype, PROBE_ROUNDING):
                    raise ModelError(f"{name} changes what {path} computes: {remedy}")

    def _compute(self, path: str) -> tuple[Tensor, ...]:
        """Return the output of a layer's experts, and the gradients of its inputs."""
        module: Any = self._modules[path]
        device = next(iter(module.parameters())).device
        hidden_Td, experts_TK, weights_TK = (x.to(device) for x in self._inputs[path])
        inputs = [x.detach().clone().requires_grad_() for x in (hidden_Td, weights_TK)]
        with torch.enable_grad():
            output = module(inputs[0], experts_TK, inputs[1])
            loss = (output * self._weights[path].to(output)).sum()
            return output.detach(), *torch.autograd.grad(loss, inputs)


def _take_own(
    tensors: Mapping[str, tuple[Tensor, ...]], tokens: TokenShards
) -> dict[str, tuple[Tensor, ...]]:
    return {path: tuple(map(tokens.take_own, values)) for path, values in tensors.items()}


def _probe(policy: TransformersPolicy, inputs: ProbeInputs) -> dict[str, Tensor]:
    """Return hidden states, logits and gradients of a few tokens that this rank has, by name.

    Gradients of one-dimensional parameters (norms, biases) are enough: a fault in any layer shows
    in the gradient of the first layer's norm.
    """
    vectors = {
        name: parameter
        for name, parameter in policy.model.named_parameters()
        if parameter.dim() == 1 and parameter.requires_grad
    }
    with torch.enable_grad():
        hidden = inputs.run(policy)
        # The loss is a weighted sum. A final norm would make a sum of squares nearly constant.
        numbers = torch.arange(
            sum(inputs.lengths) * hidden.shape[1], dtype=hidden.dtype, device=hidden.device
        )
        weights = numbers.cos().view(-1, hidden.shape[1])
        context_split = policy.split_context(inputs.lengths)
        if context_split is not None:
            weights = weights[torch.from_numpy(context_split.tokens).to(weights.device)]
        loss = (hidden * weights).sum()
        grads = (
            torch.autograd.grad(loss, list(vectors.values()), allow_unused=True) if vectors else ()
        )
    with torch.no_grad():
        outputs = {"hidden states": hidden.detach(), "logits": policy.logits(hidden)}
    gradients = {name: grad for name, grad in zip(vectors, grads, strict=True) if grad is not None}
    division = policy.tp_division
    if division is not None:
        for name, gradient in gradients.items():
            if name in division.partial_gradients:
                gradients[name] = all_reduce_sum(gradient, division.group)
    return outputs | gradients
