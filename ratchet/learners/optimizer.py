"""AdamW by torch's functional form. The class around it imports torch's compiler when it is made, which takes as long as torch
itself: a run would start a second later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ratchet.config.schema import OptimizerConfig
from ratchet.errors import CheckpointError

Moments = dict[str, Tensor]  # "step" (float32 scalar), "exp_avg", "exp_avg_sq" (as the parameter)


class AdamW:
    """Decoupled weight decay (arXiv:1711.05101) on matrices only: decaying a norm's scale or a bias regularises nothing.

    state: by the parameter's name, from its first gradient on. local: what of a parameter and its gradient is on this rank.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        *,
        local: Callable[[Tensor], Tensor] = lambda whole: whole,
    ) -> None:
        self.named, self.config, self.local = named, config, local
        self.state: dict[str, Moments] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for matrices, decay in ((True, self.config.weight_decay), (False, 0.0)):
            some = [(name, p) for name, p in self.named if p.grad is not None and (p.dim() >= 2) == matrices]
            if some:
                self._step(some, lr, decay)

    def _step(self, some: Sequence[tuple[str, nn.Parameter]], lr: float, decay: float) -> None:
        moments = [self.state.get(name) or self._begin(name, p) for name, p in some]
        adamw(
            [self.local(p) for _, p in some],
            [self.local(p.grad) for _, p in some if p.grad is not None],
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

    def _begin(self, name: str, p: Tensor) -> Moments:
        own = self.local(p.detach())
        made = {
            "step": torch.zeros((), device=own.device),
            "exp_avg": torch.zeros_like(own),
            "exp_avg_sq": torch.zeros_like(own),
        }
        self.state[name] = made
        return made

    def zero_grad(self) -> None:
        for _, p in self.named:
            p.grad = None

    def to(self, device: torch.device) -> None:
        for moments in self.state.values():
            for key, moment in moments.items():
                moments[key] = moment.to(device)

    def load(self, state: Mapping[str, Moments]) -> None:
        """Raises CheckpointError for a state of other parameters."""
        unknown = set(map(str, state)) - {name for name, _ in self.named}
        if unknown:
            raise CheckpointError(
                f"the checkpoint has optimizer state of '{min(unknown)}', which the model does not have: it was saved by an "
                "older version or for another model; start a new run from its exported model"
            )
        self.state = {}
        for name, p in self.named:
            if name in state:
                for key, value in self._begin(name, p).items():
                    value.copy_(state[name][key])
