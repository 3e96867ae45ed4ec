"""AdamW by torch's functional form. The class around it imports torch's compiler when it is made,
which takes as long as torch itself: a run would start a second later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ratchet.config.schema import OptimizerConfig
from ratchet.errors import CheckpointError

# AdamW: "step" (float32 scalar), "exp_avg", "exp_avg_sq" and "average" (as the parameter)
Moments = dict[str, Tensor]


class AdamW:
    """Decoupled weight decay (arXiv:1711.05101) on matrices only: decaying a norm's scale or a bias
    regularises nothing. Where the configuration has an `ema_decay`, it also keeps an average of
    each parameter over the steps taken, which begins at the parameter itself.

    state: by the parameter's name, from its first gradient on. matrices: see
    `PolicyModel.matrices`, for optimizers that treat these in another way. local: what of a
    parameter and its gradient is on this rank.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        matrices: Mapping[str, Sequence[int]] | None = None,
        local: Callable[[Tensor], Tensor] = lambda whole: whole,
    ) -> None:
        self.config, self.named, self.matrices, self.local = config, named, matrices or {}, local
        self.state: dict[str, Moments] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.change([(name, p) for name, p in self.named if p.grad is not None], lr)
        if self.config.ema_decay is not None:
            for p, moments in self._begun():
                moments["average"].lerp_(p, 1 - self.config.ema_decay)

    def change(self, given: Sequence[tuple[str, nn.Parameter]], lr: float) -> None:
        """The weights of those that have a gradient."""
        for matrices, decay in ((True, self.config.weight_decay), (False, 0.0)):
            some = [(name, p) for name, p in given if (p.dim() >= 2) == matrices]
            if some:
                self._adamw(some, lr, decay)

    def _adamw(self, some: Sequence[tuple[str, nn.Parameter]], lr: float, decay: float) -> None:
        moments = [self.state.get(name) or self.begin(name, p) for name, p in some]
        gradients = [self.local(p.grad) for _, p in some if p.grad is not None]
        self.take([self.local(p) for _, p in some], gradients, moments, lr, decay)

    def take(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[Moments],
        lr: float,
        decay: float,
    ) -> None:
        """One step of all of them, in their places."""
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

    def begin(self, name: str, p: Tensor) -> Moments:
        """What is kept of a parameter before its first step."""
        own = self.local(p.detach())
        made = self.moments(name, own)
        if self.config.ema_decay is not None:
            made["average"] = own.clone()
        self.state[name] = made
        return made

    def moments(self, name: str, own: Tensor) -> Moments:
        return {
            "step": torch.zeros((), device=own.device),
            "exp_avg": torch.zeros_like(own),
            "exp_avg_sq": torch.zeros_like(own),
        }

    def plain(self, name: str) -> Moments:
        """What is kept of a parameter, but for its steps: numbers that lie as the parameter
        does."""
        return {key: moment for key, moment in self.state[name].items() if key != "step"}

    def keep(self, name: str, plain: Mapping[str, Tensor]) -> None:
        """Takes what `plain` gave, and somebody has filled with other numbers in place."""

    def _begun(self) -> Iterator[tuple[Tensor, Moments]]:
        """What is on this rank of each parameter that has had a gradient."""
        for name, p in self.named:
            if name in self.state:
                yield self.local(p.detach()), self.state[name]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Meanwhile the parameters have their averages as values; one that never had a gradient is
        its own average."""
        assert self.config.ema_decay is not None, "no average is kept"
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for p, moments in self._begun():
            average = moments["average"].clone()
            moments["average"].copy_(p)
            p.copy_(average)

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
                f"the checkpoint has optimizer state of '{min(unknown)}', which the model does not "
                "have: it was saved by an "
                "older version or for another model; start a new run from its exported model"
            )
        self.state = {}
        for name, p in self.named:
            if name in state:
                for key, value in self.begin(name, p).items():
                    value.copy_(kept(state[name], key, name))


def kept(moments: Mapping[str, Tensor], key: str, name: str) -> Tensor:
    """One of what a checkpoint has of a parameter. Raises CheckpointError where it lacks it."""
    if key not in moments:
        raise CheckpointError(
            f"the checkpoint has no '{key}' of '{name}': it was saved with another optimizer "
            "section; go on with that one"
        )
    return moments[key]
