"""Context parallelism for models that transformers runs: the tokens of each sequence on many ranks.

Everything but attention is computed token by token. So the attention function of the model is
replaced by one that gathers keys and values from all ranks, then calls the model's own function for
each of this rank's segments. Its scale, soft-capping, sinks and sliding window stay the model's.

T = tokens of the packed sequences, t = tokens of this rank, H = query heads, K = key/value heads,
D = head_dim, E = head_dim of the values.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ratchet.errors import ModelError
from ratchet.models.parallel.collectives import Group, gather_uneven
from ratchet.models.parallel.context_parallel import ContextSplit
from ratchet.models.transformers_settings import read_setting

REMEDY = "set learner.context_parallel=1, and learner.dp_shard to the number of ranks"
FULL, SLIDING = "full_attention", "sliding_attention"
# Scalings whose frequencies depend on the longest position, which differs between ranks.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")

_numbers = itertools.count()


def check_context(model: PreTrainedModel, config: Any) -> None:
    """Raise ModelError if tokens of one sequence can't be divided over ranks.

    config: the configuration of the language model.
    """
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ModelError(f"the attention of {name} can't be divided over ranks: {REMEDY}")
    kinds = sorted({*(read_setting(config, "layer_types") or ())} - {FULL, SLIDING})
    if kinds:
        raise ModelError(
            f"{name} has layers of {', '.join(kinds)}, which can't be divided over ranks: {REMEDY}"
        )
    rope = read_setting(config, "rope_parameters") or {}
    for section in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if section.get("rope_type") in LENGTH_DEPENDENT_ROPES:
            raise ModelError(
                f"the rotary embedding of {name} ({section['rope_type']}) depends on the length of "
                f"the context, of which a rank has a part: {REMEDY}"
            )


class DividedAttention:
    """The attention function of a model whose tokens are divided over ranks.

    `split` is that of the current micro-batch.
    """

    def __init__(self, model: PreTrainedModel, config: Any, group: Group) -> None:
        """Replace the model's attention function.

        model: the language model, without the encoders of a multimodal model.

        Raises ModelError if the model does not take another.
        """
        self.group = group
        self.config = config
        self.own_name = str(config._attn_implementation)
        self.split: ContextSplit | None = None
        name = f"ratchet_context_{next(_numbers)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self.attend)
        model.set_attn_implementation(name)
        if config._attn_implementation != name:
            raise ModelError(
                f"the attention of {type(model).__name__} can't be divided over ranks: {REMEDY}"
            )

    def keep_split(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts in which activation checkpointing computes and recomputes a layer."""
        return nullcontext(), self._use(self.split)

    @contextmanager
    def _use(self, split: ContextSplit | None) -> Iterator[None]:
        """Use the split inside the context."""
        split_before, self.split = self.split, split
        try:
            yield
        finally:
            self.split = split_before

    def attend(
        self,
        module: nn.Module,
        query_1HtD: Tensor,
        key_1KtD: Tensor,
        value_1KtE: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return the attention of this rank's tokens to all earlier ones [1, t, H, E].

        options: the options of the model's own attention function.
        """
        split = self.split
        assert split is not None, "`TransformersPolicy.hidden` sets the split"
        assert attention_mask is None, "transformers makes no mask for this attention function"
        window = self._get_window(module, options)
        key_1KTD, value_1KTE = self._gather(key_1KtD, value_1KtE, split)
        attend = self._get_own_function(module)
        outputs: list[Tensor] = []
        start = 0
        for segment in split.segments:
            queries = query_1HtD[:, :, start : start + segment.length]
            start += segment.length
            # The keys that the segment's tokens can see, and their positions.
            first = 0 if window is None else max(0, segment.begin - window + 1)
            offset = int(split.starts_S[segment.row])
            keys, values = (
                x[:, :, offset + first : offset + segment.end] for x in (key_1KTD, value_1KTE)
            )
            mask = _make_mask(segment.begin, segment.end, first, window, queries)
            if self.own_name == "eager":
                mask = torch.zeros_like(mask, dtype=queries.dtype).masked_fill(
                    ~mask, torch.finfo(queries.dtype).min
                )
            outputs.append(attend(module, queries, keys, values, mask, **options)[0])
        if not outputs:
            # A rank without tokens computes one that nothing reads, so that it takes part in all
            # collectives, also in the backward.
            heads = query_1HtD.shape[1], value_1KtE.shape[3]
            zero = (key_1KTD.sum() + value_1KTE.sum() + query_1HtD.sum()) * 0
            return zero.expand(1, query_1HtD.shape[2], *heads), None
        padding = query_1HtD.shape[2] - start
        return F.pad(torch.cat(outputs, dim=1), (0, 0, 0, 0, 0, padding)), None

    def _gather(
        self, key_1KtD: Tensor, value_1KtE: Tensor, split: ContextSplit
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all ranks, in the order of the packed tokens."""
        n_local = len(split.tokens)
        # Heads and their dimensions become one dimension: K D values of keys, then K E of values.
        flat = [x[0, :, :n_local].transpose(0, 1).flatten(1) for x in (key_1KtD, value_1KtE)]
        gathered = gather_uneven(torch.cat(flat, dim=1), split.sizes, self.group)
        ordered = gathered[torch.from_numpy(split.gathered_index_T).to(gathered.device)]
        key, value = ordered.split([part.shape[1] for part in flat], dim=1)
        return tuple(  # pyright: ignore[reportReturnType]
            x.unflatten(1, (like.shape[1], like.shape[3])).transpose(0, 1)[None]
            for x, like in ((key, key_1KtD), (value, value_1KtE))
        )

    def _get_window(self, module: nn.Module, options: dict[str, Any]) -> int | None:
        """Return the number of tokens that the layer looks back, its own included; None: all.

        Raises ModelError if the layer has a window that it does not tell its attention function.
        """
        window = options.get("sliding_window")
        kinds = read_setting(self.config, "layer_types")
        layer = getattr(module, "layer_idx", None)  # only layers of a decoder have a number
        kind = kinds[layer] if kinds and layer is not None else None
        has_window = (
            kind == SLIDING
            if kind is not None
            else read_setting(self.config, "sliding_window") is not None
        )
        if has_window and window is None:
            raise ModelError(
                f"{type(module).__name__} does not tell its sliding window, so its tokens can't be "
                f"divided over ranks: {REMEDY}"
            )
        return window if has_window else None

    def _get_own_function(self, module: nn.Module) -> Any:
        """Return the attention function that the model had before."""
        own_eager: Any = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.own_name, own_eager)


def _make_mask(begin: int, end: int, first: int, window: int | None, like: Tensor) -> Tensor:
    """Return which keys each query sees [1, 1, end - begin, end - first], True where it does."""
    queries = torch.arange(begin, end, device=like.device)[:, None]
    keys = torch.arange(first, end, device=like.device)
    mask = keys <= queries
    if window is not None:
        mask &= queries - keys < window
    return mask[None, None]
