"""The base class of the models that judge attempts."""

from __future__ import annotations


class JudgeModel:
    """A model of the run that judging rewards use (`Reward.use_judges`)."""

    @property
    def final_error(self) -> Exception | None:
        """Return the error with which every further question fails; None while it answers."""
        return None

    async def close(self) -> None:
        """End the processes of the model."""
        return
