"""The base class of the models that judge attempts."""

from __future__ import annotations

from collections.abc import Mapping


class JudgeModel:
    """A model of the run that judging rewards use (`Reward.use_judges`)."""

    @property
    def final_error(self) -> Exception | None:
        """Return the error with which every further question fails; None while it answers."""
        return None

    async def close(self) -> None:
        """End the processes of the model."""
        return


# The models of a recipe's `judges` by name, as `Reward.use_judges` takes them.
Judges = Mapping[str, JudgeModel]
