"""The AdamW optimizer, built on torch's functional form.

torch's optimizer class imports torch's compiler when it is created, which would delay the start of
a run by a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ratchet.config.schema import OptimizerConfig
from ratchet.errors import CheckpointError

# The optimizer state of a parameter. AdamW has "step" (float32 scalar), and "exp_avg",
# "exp_avg_sq" and, with `ema_decay`, "average" (shaped like the parameter).
Moments = dict[str, Tensor]


class AdamW:
    """AdamW with decoupled weight decay (arXiv:1711.05101), which applies to matrices only.

    Norm scales and biases are not decayed, because decay would not regularise them. With
    `ema_decay` the optimizer also keeps an exponential moving average (EMA) of each parameter,
    which starts at the parameter's value.

    Attributes:
        state: Moments by parameter name; a parameter has none before its first gradient.
        matrices: `PolicyModel.matrices`: the number of rows of each matrix in a parameter, for the
            parameters of the layers. Only subclasses that treat these matrices differently read it.
        to_local: A function that returns this rank's part of a parameter or gradient.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        matrices: Mapping[str, Sequence[int]] | None = None,
        to_local: Callable[[Tensor], Tensor] = lambda whole: whole,
    ) -> None:
        self.config = config
        self.named_parameters = named_parameters
        self.matrices = matrices or {}
        self.to_local = to_local
        self.state: dict[str, Moments] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Take one optimizer step at the learning rate `lr`."""
        with_gradient = [(name, p) for name, p in self.named_parameters if p.grad is not None]
        self.update_parameters(with_gradient, lr)
        if self.config.ema_decay is not None:
            for p, moments in self._local_states():
                moments["average"].lerp_(p, 1 - self.config.ema_decay)

    def update_parameters(self, parameters: Sequence[tuple[str, nn.Parameter]], lr: float) -> None:
        """Update the given parameters, which all have a gradient."""
        for are_matrices, decay in ((True, self.config.weight_decay), (False, 0.0)):
            group = [(name, p) for name, p in parameters if _is_matrix(name, p) == are_matrices]
            if group:
                self._update_group(group, lr, decay)

    def _update_group(
        self, group: Sequence[tuple[str, nn.Parameter]], lr: float, decay: float
    ) -> None:
        """Update parameters that share a weight decay."""
        moments = [self.state.get(name) or self.init_state(name, p) for name, p in group]
        gradients = [self.to_local(p.grad) for _, p in group if p.grad is not None]
        self._adamw_step([self.to_local(p) for _, p in group], gradients, moments, lr, decay)

    def _adamw_step(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[Moments],
        lr: float,
        decay: float,
    ) -> None:
        """Take one AdamW step for the weights, in place."""
        adamw(
            weights,
            gradients,
            [m["exp_avg"] for m in moments],
            [m["exp_avg_sq"] for m in moments],
            [],
            [m["step"] for m in moments],
            fused=True,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self.config.eps,
            maximize=False,
        )

    def init_state(self, name: str, p: Tensor) -> Moments:
        """Create and return the state of a parameter before its first step."""
        local = self.to_local(p.detach())
        moments = self.init_moments(name, local)
        if self.config.ema_decay is not None:
            moments["average"] = local.clone()
        self.state[name] = moments
        return moments

    def init_moments(self, name: str, local: Tensor) -> Moments:
        """Return the initial moments of a parameter; `local` is this rank's part of it."""
        return {
            "step": torch.zeros((), device=local.device),
            "exp_avg": torch.zeros_like(local),
            "exp_avg_sq": torch.zeros_like(local),
        }

    def get_moments(self, name: str) -> Moments:
        """Return the moments of a parameter except `step`, in the parameter's layout.

        A subclass that stores moments quantised overrides this, and returns them in float32.
        """
        return {key: moment for key, moment in self.state[name].items() if key != "step"}

    def store(self, name: str, moments: Mapping[str, Tensor]) -> None:
        """Store moments that the caller got from `get_moments` and has overwritten in place.

        This does nothing if the moments are the tensors of `state` itself, as in this class.
        """

    def _local_states(self) -> Iterator[tuple[Tensor, Moments]]:
        """Yield (this rank's part, moments) of each parameter that has had a gradient."""
        for name, p in self.named_parameters:
            if name in self.state:
                yield self.to_local(p.detach()), self.state[name]

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Set the parameters to their moving averages inside the context.

        A parameter that never had a gradient keeps its value.
        """
        assert self.config.ema_decay is not None, "no average is kept"
        self._swap_averages()
        try:
            yield
        finally:
            self._swap_averages()

    def _swap_averages(self) -> None:
        """Swap the parameters with their averages."""
        for p, moments in self._local_states():
            average = moments["average"].clone()
            moments["average"].copy_(p)
            p.copy_(average)

    def count_later_bytes(self) -> int:
        """Return the bytes that updates will allocate: gradients, and moments not made yet.

        Parameters in host memory do not count.
        """
        total = 0
        for name, p in self.named_parameters:
            local = self.to_local(p.detach())
            if local.is_cpu:
                continue
            local = torch.empty_like(local, device="meta")
            total += local.nbytes
            if name not in self.state:
                total += sum(moment.nbytes for moment in self.init_moments(name, local).values())
                total += local.nbytes if self.config.ema_decay is not None else 0
        return total

    def zero_grad(self) -> None:
        for _, p in self.named_parameters:
            p.grad = None

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor of the state by the function's result, in a fixed order."""
        for name, _ in self.named_parameters:
            moments = self.state.get(name, {})
            for key, moment in moments.items():
                moments[key] = function(moment)

    def load(self, state: Mapping[str, Moments]) -> None:
        """Load a checkpoint's state.

        Raises CheckpointError if it has unknown parameters, or lacks a moment of one.
        """
        unknown = set(map(str, state)) - {name for name, _ in self.named_parameters}
        if unknown:
            raise CheckpointError(
                f"the checkpoint has optimizer state of '{min(unknown)}', which the model does not "
                "have: an older version or a run of another model saved it. Start a new run from "
                "the exported model."
            )
        self.state = {}
        for name, p in self.named_parameters:
            if name in state:
                for key, value in self.init_state(name, p).items():
                    value.copy_(require_moment(state[name], key, name))


def require_moment(moments: Mapping[str, Tensor], key: str, name: str) -> Tensor:
    """Return the moment `key` of the parameter `name` from a checkpoint.

    Raises CheckpointError if the checkpoint lacks it.
    """
    if key not in moments:
        raise CheckpointError(
            f"the checkpoint has no '{key}' of '{name}': it was saved with another optimizer "
            "section. Resume with that section."
        )
    return moments[key]


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """True if a parameter has matrices. The stacked biases of experts have two dimensions too."""
    return parameter.dim() >= 2 and not name.endswith("bias")
