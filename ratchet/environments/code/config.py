"""Configuration of environments whose answers are programs. Free of torch and of their code."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, SerializeAsAny, model_validator

from ratchet.config.base import Section
from ratchet.config.resolve import Slot
from ratchet.data.files import DataFile
from ratchet.environments.config import EnvironmentConfig
from ratchet.rewards.config import CodeConfig


class ProgramsConfig(EnvironmentConfig):
    """Programs judged by tests: small functions that are made up, or the rows of a file.

    A file holds rows with `prompt`, and `tests` ([{"stdin", "stdout"}]) or HumanEval's
    `entry_point` and `test`; a `canonical_solution` serves as demonstration. The test split is the
    file `test`, or else one in ten of the prompts.
    """

    builds: ClassVar[str] = "ratchet.environments.code.programs:programs"
    default_reward: ClassVar[str] = "code"

    train: DataFile | None = Field(
        None, description="A file; null: made-up functions, f: *3 +2 -> def f(x):return x*3+2."
    )
    test: DataFile | None = Field(None, description="Likewise.")
    operations: int = Field(2, ge=1, le=6, description="Of a made-up function.")

    @model_validator(mode="after")
    def _test_needs_train(self) -> ProgramsConfig:
        if self.test is not None and self.train is None:
            raise ValueError("test is read beside train: set train, or remove test")
        if self.train is not None and "operations" in self.changed:
            raise ValueError(
                f"operations={self.operations} is of made-up functions: remove it, or train"
            )
        return self


class CodeRepairConfig(EnvironmentConfig):
    """Programs with another try after each that fails its tests: the policy is shown what went
    wrong."""

    builds: ClassVar[str] = "ratchet.environments.code.repair:CodeRepair"

    problems: Annotated[SerializeAsAny[Section], Slot("problems")] = Field(
        description="Where tasks come from, with tests as the reward code reads them: {kind: "
        "programs}."
    )
    judge: CodeConfig = Field(
        CodeConfig.model_validate({}), description="How a program is run and judged."
    )
    tries: int = Field(3, ge=1, description="Programs of one attempt.")
    discount: float = Field(
        1.0, gt=0, le=1, description="Factor on the reward for each try that failed before."
    )
    error_chars: int = Field(800, gt=0, description="Of an error that is shown: its end.")
