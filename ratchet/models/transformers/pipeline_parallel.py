"""Pipeline parallelism for models that transformers runs: a rank has some of the layers.

A stage runs the forward of the model's own backbone, with stand-ins for what other stages have. So
each stage makes the masks and rotary embeddings of its layers as the architecture does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.parallel.stages import ModelStage
from ratchet.models.transformers.backbone_inputs import BackboneInputs
from ratchet.models.transformers.modules import replace_submodule

if TYPE_CHECKING:
    from ratchet.models.transformers.policy import TransformersPolicy

REMEDY = "set learner.pipeline_parallel=1, and learner.dp_shard to the number of ranks"


class Elsewhere(nn.Module):
    """A stand-in for a module of another stage, which returns its first argument."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        return hidden_states


class _Before(Elsewhere):
    """A stand-in for a layer of an earlier stage, which returns the states after that stage."""

    states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        assert self.states is not None, "`TransformersStage.run` sets the states"
        return self.states


class _After(Elsewhere):
    """A stand-in for a layer of a later stage, which keeps the states that it gets."""

    states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        self.states = hidden_states
        return hidden_states


class TransformersStage(ModelStage):
    """Consecutive layers of a model of transformers. It shares modules with the model.

    The first stage has the embedding, and the encoders of media. The last one has the other modules
    with weights outside the layers, such as the final norm, and the head. If head and embedding are
    tied, both stages have both.
    """

    def __init__(self, policy: TransformersPolicy, index: ShardIndex) -> None:
        """Make a stage of a whole model."""
        super().__init__(index)
        object.__setattr__(self, "policy", policy)  # not a child
        self.policy: TransformersPolicy
        is_first, is_last = index.index == 0, index.index == index.count - 1
        embedding, head = policy.model.get_input_embeddings(), policy.model.get_output_embeddings()
        assert head is not None, "`TransformersPolicy` has a head"
        has_both = (is_first or is_last) and head.weight is embedding.weight
        layers = policy.layers()
        own = index.range(len(layers))
        self._layers = [layers[i] for i in own]
        self._before = _Before()
        self._after = _After()
        all_layers = [
            layer if i in own else self._before if i < own.start else self._after
            for i, layer in enumerate(layers)
        ]
        language = policy.backbone.get_submodule(policy.language_path)
        children = dict(language.named_children())
        for name, module in children.items():
            if isinstance(module, nn.ModuleList) and list(module) == layers:
                children[name] = nn.ModuleList(all_layers)
            elif module is embedding:
                children[name] = module if is_first or has_both else Elsewhere()
            elif not is_last and any(True for _ in module.parameters()):
                children[name] = Elsewhere()
        own_language = copy.copy(language)
        own_language.__dict__["_modules"] = children
        self.backbone = (
            replace_submodule(policy.backbone, policy.language_path, own_language)
            if is_first
            else own_language
        )
        # FSDP shards the head with the stage. `TransformersPolicy.logits` runs it.
        self.head = head if is_last or has_both else None

    def layers(self) -> Sequence[nn.Module]:
        return self._layers

    def experts(self) -> Sequence[nn.Module]:
        division, modules = self.policy.expert_division, set(self.modules())
        return () if division is None else [m for m in division.modules if m in modules]

    def run(self, packed: BackboneInputs, x: Tensor | None) -> Tensor:
        # What the backbone computes before this stage's layers is replaced, and what it computes
        # after them is not read.
        self._before.states = None if x is None else x[None]
        output = self.policy.run_backbone(packed, x, self.backbone)
        if self._after.states is not None:
            output = self._after.states[0]
        # Kept states would keep their graph.
        self._before.states = self._after.states = None
        output = output.clone()  # FSDP warns of views
        return self.policy.add_zero_gradients(output) if x is None else output


def keep_stages(policy: TransformersPolicy, stages: Sequence[TransformersStage]) -> None:
    """Replace the modules of a model that no stage has by stand-ins."""
    kept = {module for stage in stages for module in stage.modules()}
    _replace_others(policy.backbone, kept)
    if policy.model.get_output_embeddings() not in kept:
        policy.model.set_output_embeddings(Elsewhere())


def _replace_others(module: nn.Module, kept: AbstractSet[nn.Module]) -> None:
    """Replace the modules inside a module that neither are kept nor contain kept ones."""
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            setattr(module, name, Elsewhere())
        else:
            _replace_others(child, kept)
