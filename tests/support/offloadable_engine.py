"""The embedded engine as a generator that can leave its accelerator, as vLLM can: away from it, it
has no request and computes nothing."""

from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine

KIND = f"{__name__}:OffloadableEngine"


class OffloadableEngine(EmbeddedEngine):
    can_offload = True
    is_away = False

    class Config(EngineConfig):
        can_offload = True
        builds = KIND
        kind: str = KIND

    async def offload(self):
        assert not self.core.busy, "requests run while the learner takes the accelerator"
        self.is_away = True

    async def onload(self):
        self.is_away = False

    def _step(self):
        assert not self.is_away, "it computes on the learner's accelerator"
        super()._step()
