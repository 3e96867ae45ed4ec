"""The plan of tensor parallelism that comes with an architecture of transformers.

A plan maps module paths, with * for numbers, to styles of dividing a module. Of stacked experts it
names the module and its parameters, each with a style.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ratchet.errors import ModelError
from ratchet.models.parallel.sharding import check_even
from ratchet.models.transformers.pipeline_parallel import Elsewhere
from ratchet.models.transformers_settings import read_setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Each rank has some rows of the matrix, and computes the outputs of these.
OUTPUTS = ("colwise",)
# Like OUTPUTS, but every rank then gathers all outputs.
GATHERED_OUTPUTS = ("colwise_gather_output", "colwise_rep")
# Each rank has some columns of the matrix; the ranks' outputs are summed.
INPUTS = ("rowwise",)
# Like INPUTS, but each rank first takes its part of an input that all ranks have whole.
SPLIT_INPUTS = ("rowwise_split_input", "rowwise_rep")
# Each rank has the rows of some tokens.
EMBEDDING = ("embedding_rowwise",)
# Each rank has the whole parameter but uses it only for some heads, so gradients are summed.
PARTIAL = ("replicated_with_grad_allreduce",)
# Each rank has the whole matrix, whose last outputs are the rotary part of all heads' keys. A rank
# uses that part only for some heads, so its gradients are summed.
SHARED_ROPE = ("mla_kv_a_proj",)
# Each rank has a block of every expert's matrices; the ranks' outputs are summed.
EXPERTS = ("moe_tp_experts",)
BY_ROWS, BY_COLUMNS = OUTPUTS + GATHERED_OUTPUTS, INPUTS + SPLIT_INPUTS
LINEAR = BY_ROWS + BY_COLUMNS + SHARED_ROPE
# Families with the same layers, for language models that come without a plan, or with one that
# leaves out norms of heads and experts.
SAME_LAYERS = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
REMEDY = "set learner.tensor_parallel to 1, and learner.dp_shard to the number of ranks"


class Cut(NamedTuple):
    """Describes how a parameter is cut: along `dim`, in which `packed` matrices follow."""

    dim: int
    packed: int = 1


# The cut of experts' stacked matrices [experts, rows, columns], by style.
EXPERT_CUTS = {
    "packed_colwise": Cut(1, packed=2),  # gate and up
    "rowwise": Cut(2),
}


@dataclass(frozen=True)
class TPPlan:
    """A plan of tensor parallelism for one model.

    styles: the style of each module or parameter that the plan names, by its path.
    head: path of the output embedding.
    rope_columns: number of outputs of a matrix in the style SHARED_ROPE that are rotated.
    """

    styles: Mapping[str, str]
    head: str
    rope_columns: int = 0

    @classmethod
    def from_rules(cls, model: PreTrainedModel, rules: Mapping[str, str], head: str) -> TPPlan:
        """Return the plan for a model from its architecture's rules (path pattern -> style).

        Raises ModelError if the rules divide no module but the head, or use an unsupported style.
        """
        model_name = type(model).__name__
        modules = {
            path: module
            for path, module in model.named_modules()
            if not isinstance(module, Elsewhere)
        }
        paths = [*modules, *(name for name, _ in model.named_parameters())]
        styles = {
            path: rules[rule]
            for path in paths
            if (rule := re.sub(r"\.\d+(?=\.|$)", ".*", path)) in rules
        }
        if styles.keys() <= {head}:
            raise ModelError(f"{model_name} has no plan for tensor parallelism: {REMEDY}")
        rope_columns = read_setting(model.config.get_text_config(), "qk_rope_head_dim") or 0
        plan = cls(styles, head, rope_columns)
        for path in styles:
            if (reason := plan.explain_refusal(path, modules)) is not None:
                raise ModelError(f"the plan of {model_name} divides {path}{reason}: {REMEDY}")
        return plan

    def explain_refusal(self, path: str, modules: Mapping[str, nn.Module]) -> str | None:
        """Return why a module or parameter can't be divided in its style; None if it can.

        modules: all modules of the model, by path.
        """
        style, module = self.styles[path], modules.get(path)
        parent_path, _, name = path.rpartition(".")
        if module is None and self.styles.get(parent_path) in EXPERTS:
            matrices = modules[parent_path].get_parameter(name)
            if style not in EXPERT_CUTS:
                return f" in the style '{style}', which is not supported for experts"
            return None if matrices.dim() == 3 else ", which is not a stack of matrices"
        if style not in LINEAR + EMBEDDING + PARTIAL + EXPERTS:
            return f" in the style '{style}', which is not supported"
        if style in LINEAR and not _is_linear(module):
            return ", which is not a plain linear layer"
        if style in SHARED_ROPE and not self.rope_columns:
            return ", but the configuration does not say which of its outputs are rotated"
        if style in EMBEDDING and not isinstance(module, nn.Embedding):
            return ", which is not an embedding"
        if style in EXPERTS and not any(other.startswith(f"{path}.") for other in self.styles):
            return ", but none of its parameters"
        return None

    @cached_property
    def expert_cuts(self) -> Mapping[str, Cut]:
        """The cut of each divided parameter of stacked experts, by its name."""
        return {
            path: EXPERT_CUTS[style]
            for path, style in self.styles.items()
            if self.styles.get(path.rpartition(".")[0]) in EXPERTS
        }

    def check(self, model: nn.Module, ranks: int, heads: Mapping[str, int]) -> None:
        """Raise ModelError if the number of ranks does not divide the model evenly.

        heads: numbers of attention heads, by their name for an error message.
        """
        totals = dict(heads)
        for name, cut in self.expert_cuts.items():
            size = model.get_parameter(name).shape[cut.dim] // cut.packed
            totals[f"columns of an expert ({name})"] = size
        for path, style in self.styles.items():
            if path == self.head or path in self.expert_cuts:
                continue
            if style in BY_ROWS + BY_COLUMNS:
                rows, columns = model.get_parameter(f"{path}.weight").shape
                totals |= (
                    {f"outputs of {path}": rows}
                    if style in BY_ROWS
                    else {f"inputs of {path}": columns}
                )
        check_even(ranks, totals)


def find_language_rules(model: PreTrainedModel, language: nn.Module, head: str) -> dict[str, str]:
    """Return the rules (path pattern -> style) for the language model inside a multimodal model.

    Encoders stay whole on each rank. The head is divided, as in models of text.
    """
    path = next(path for path, module in model.named_modules() if module is language)
    family = SAME_LAYERS.get(model.config.get_text_config().model_type)
    if family is None:
        rules = {name: style for name, style in model.tp_plan.items() if name.startswith(path)}
    else:
        # This import takes seconds unless such a model is loaded already.
        from transformers import CONFIG_MAPPING

        plan = CONFIG_MAPPING[family].base_model_tp_plan or {}
        rules = {f"{path}.{name}": style for name, style in plan.items()}
    return {head: GATHERED_OUTPUTS[0], **rules} if rules else {}


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
