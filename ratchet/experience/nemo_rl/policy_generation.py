"""A generator with the calls that NeMo RL's training loop makes around a generation and a refit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ratchet.config.resolve import resolve
from ratchet.errors import ModelError
from ratchet.experience.nemo_rl.generation import WithSampling, get_weights_version, run_blocking
from ratchet.protocols import Generator, Learner, Shard, WeightSync
from ratchet.types import Sampling
from ratchet.utils.summarize import summarize_names
from ratchet.weight_sync.factory import SyncEndpoints, make_weight_sync


class PolicyGeneration(WithSampling):
    """A generator of Ratchet for loops that are written to upstream's GenerationInterface.

    The rollout functions take it as any generator. All calls here block until they are done, so the
    refit methods return no references to wait for. The weights come from a learner of Ratchet by a
    weight sync, or from any other policy by `update_weights`.

    Args:
        generator: The generator.
        sampling: The sampling parameters of rollouts.
        weight_sync: The weight sync from the learner; None: the weights never change.
    """

    def __init__(
        self, generator: Generator, sampling: Sampling, weight_sync: WeightSync | None = None
    ) -> None:
        super().__init__(generator, sampling)
        self.weight_sync = weight_sync
        self._version = get_weights_version(generator)
        self._is_shut_down = False
        self._refit_info: Mapping[str, Any] = {}

    @classmethod
    def from_learner(
        cls, generator: Generator, sampling: Sampling, learner: Learner
    ) -> PolicyGeneration:
        """Return the generator with the weight sync that a recipe would choose for the learner."""
        endpoints = SyncEndpoints(learner, generator)
        return cls(generator, sampling, make_weight_sync(resolve("weight_sync", {}), endpoints))

    @property
    def version(self) -> int:
        return self._version

    def prepare_for_generation(self, *args: Any, **options: Any) -> bool:
        """Take the accelerator back and continue. Repeating a call has no effect."""
        run_blocking(self._wake())
        return True

    async def _wake(self) -> None:
        if self.generator.can_offload:
            await self.generator.onload()
        await self.generator.resume()

    def finish_generation(self, *args: Any, release_gpu: bool = True, **options: Any) -> bool:
        """Stop generating, and release the accelerator unless `release_gpu` is False.

        Running requests keep their tokens and continue after `prepare_for_generation`.
        """
        run_blocking(self._rest(release_gpu))
        return True

    async def _rest(self, release_gpu: bool) -> None:
        await self.generator.pause()
        if release_gpu and self.generator.can_offload:
            await self.generator.offload()

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int
    ) -> Sequence[Any]:
        """Return no references: the weight sync connects its ends itself, at its first push."""
        return ()

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """Compare the learner's weights, (shape, dtype) by name, with the generator's.

        Raises ModelError for a name or a shape that the generator doesn't have. A generator whose
        weights can't be read is not compared. `update_weights` then takes these weights only.
        """
        shapes = {shard.name: tuple(shard.shape) for shard in self.generator.weights()}
        wrong = [
            name
            for name, (shape, *_) in state_dict_info.items()
            if shapes and shapes.get(name) != tuple(shape)
        ]
        if wrong:
            raise ModelError(
                f"the generator lacks {summarize_names(wrong)}, or has another shape of it. Refit "
                "it from a learner of the same model"
            )
        self._refit_info = dict(state_dict_info)

    def update_weights_from_collective(self) -> Sequence[Any]:
        """Push the learner's weights by the weight sync, whatever its transport is.

        Raises ModelError without a weight sync, and the errors of the push; then the old weights
        continue to serve.
        """
        if self.weight_sync is None:
            raise ModelError(
                "this generator has no weight sync. Make it by PolicyGeneration.from_learner, or "
                "hand it the weights by update_weights"
            )
        run_blocking(self.weight_sync.push(self._version + 1))
        self._version += 1
        return ()

    def update_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> bool:
        """Load the weights that a policy of any library hands over, as Hugging Face names them.

        Args:
            weights: All weights of the model: a state dict, or (name, tensor) pairs that are read
                one after the other, so that no whole model need be in memory.

        Raises:
            ModelError: A weight is missing, or `prepare_refit_info` has named other weights, or
                another shape or dtype of one. Then, and if the generator raises, the old weights
                continue to serve.
        """
        source: Any = weights
        items = source.items() if isinstance(source, Mapping) else source
        run_blocking(self._load(self._check(items)))
        self._version += 1
        return True

    async def _load(self, shards: Iterator[Shard]) -> None:
        await self.generator.prepare({})
        try:
            await self.generator.receive(shards)
            await self.generator.commit(self._version + 1)
        except BaseException:
            await self.generator.rollback()
            raise

    def _check(self, items: Iterable[tuple[str, Tensor]]) -> Iterator[Shard]:
        """Yield the weights as shards. Raises ModelError if they are not the announced ones.

        If none were announced, they must be all weights of the generator whose names can be read.
        """
        missing: dict[str, Any] = dict(self._refit_info)
        if not missing:
            missing = dict.fromkeys(shard.name for shard in self.generator.weights())
        for name, tensor in items:
            announced = missing.pop(name, None)
            if self._refit_info:
                shape, dtype, *_ = announced or (None, None)
                if shape is None or tuple(shape) != tuple(tensor.shape) or dtype != tensor.dtype:
                    raise ModelError(
                        f"weight {name} is {tuple(tensor.shape)} {tensor.dtype}, which "
                        "prepare_refit_info did not announce. Send what it announced, once"
                    )
            yield Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())
        if missing:
            raise ModelError(
                f"the refit lacks {summarize_names(list(missing))} of the model. Send all weights"
            )

    def update_weights_via_ipc_zmq(self) -> Sequence[Any]:
        """Push the learner's weights, as `update_weights_from_collective` does."""
        return self.update_weights_from_collective()

    def shutdown(self) -> bool:
        """End the weight sync and the generator. Repeating a call has no effect."""
        if not self._is_shut_down:
            self._is_shut_down = True
            run_blocking(self._close())
        return True

    async def _close(self) -> None:
        if self.weight_sync is not None:
            await self.weight_sync.close()
        await self.generator.close()
