"""Read `task.toml` of a task directory, in schema 1.4 of Harbor 0.25.

Requirements that Ratchet can't meet are refused, each with a sentence. Some can be waived, for
tasks whose tests pass without them.

Source: the package harbor 0.25.0, models/task/config.py (the schema) and models/task/task.py.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ratchet.errors import DataError

MANIFEST = "task.toml"
Waiver = Literal["image", "network", "user", "unknown_keys"]
NEWEST_SCHEMA = (1, 4)
TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
SIZE_IN_MIB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


class _Table(BaseModel):
    """A table of the file. Keys outside the schema are kept, so that errors can name them."""

    model_config = ConfigDict(extra="allow")

    @field_validator("*", mode="before")
    @classmethod
    def _check_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise for a boolean instead of a number, or the reverse, which Pydantic would convert."""
        if info.field_name is None or not isinstance(value, bool | int | float):
            return value
        takes_boolean = bool in get_args(cls.model_fields[info.field_name].annotation)
        if takes_boolean != isinstance(value, bool):
            raise ValueError(f"must {'' if takes_boolean else 'not '}be true or false")
        return value


class Phase(_Table):
    """The keys that the tables [agent] and [verifier] share."""

    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class AgentPhase(Phase):
    """The table [agent]."""

    timeout_sec: float | None = Field(default=None, gt=0)
    """Wall time of the agent's commands in seconds; None: no limit."""


class Machine(_Table):
    """The table [environment], or [verifier.environment]: an image and its resources."""

    docker_image: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0)
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = Field(default=None, gt=0)
    memory: str | None = None
    storage_mb: int | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None
    network_mode: str = "public"
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None

    @property
    def has_network(self) -> bool:
        """True if the task may use a network. `network_mode` overrides `allow_internet`."""
        if "network_mode" not in self.model_fields_set and self.allow_internet is False:
            return False
        return self.network_mode != "no-network"

    @property
    def memory_mib(self) -> int | None:
        """Return the memory in MiB, from `memory` ("2G") or `memory_mb`; None if neither is set."""
        if self.memory is None:
            return self.memory_mb
        unit = self.memory.strip()[-1:].upper()
        return int(float(self.memory.strip()[:-1]) * SIZE_IN_MIB[unit])

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, memory: str | None) -> str | None:
        if memory is not None and not re.fullmatch(r"\s*\d+(\.\d+)?[GgMmKk]\s*", memory):
            raise ValueError(f"{memory!r} is not a size: write 1G or 512M")
        return memory


class Verification(Phase):
    """The table [verifier]."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Machine | None = None
    collect: list[Any] = []

    @property
    def is_separate(self) -> bool:
        """True in separate mode, which [verifier.environment] implies unless a mode is set."""
        mode = self.environment_mode
        return mode == "separate" or (mode is None and self.environment is not None)


class Solution(_Table):
    """The table [solution]."""

    env: dict[str, str] = {}


class Manifest(_Table):
    """The content of a `task.toml`."""

    schema_version: str = "1.4"
    version: str | None = None
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    verifier: Verification = Verification()
    agent: AgentPhase = AgentPhase()
    environment: Machine = Machine()
    solution: Solution = Solution()
    source: str | None = None
    multi_step_reward_strategy: str | None = None
    steps: list[Any] = []
    artifacts: list[str | dict[str, Any]] = []

    @property
    def name(self) -> str | None:
        """Return the package name of the task, such as org/name; None if it has none."""
        return None if self.task is None else self.task.get("name")


def read_manifest(directory: Path, waived: frozenset[Waiver]) -> Manifest:
    """Return the directory's `task.toml`.

    Raises DataError if the file is malformed, or if the task requires a feature that Ratchet lacks
    and `waived` does not name.
    """
    path = directory / MANIFEST
    try:
        manifest = Manifest.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise DataError(f"{path}: {where} {fault['msg'][:1].lower()}{fault['msg'][1:]}") from None
    for waiver, sentence in _list_unmet(manifest, directory):
        if waiver is None:
            raise DataError(f"{path}: {sentence}")
        if waiver not in waived:
            raise DataError(f"{path}: {sentence} If it does not matter, set waive: [{waiver}].")
    return manifest


def fill_template(values: Mapping[str, str], path: Path) -> dict[str, str]:
    """Return environment variables with `${NAME:-default}` replaced by the default.

    Raises DataError for `${NAME}`: sandboxes get no variable of this process.
    """

    def fill(match: re.Match[str]) -> str:
        if match[2] is None:
            raise DataError(
                f"{path}: a variable's value is {match[0]}, and sandboxes get no variables of this "
                f"machine. Write the value, or a default: ${{{match[1]}:-value}}."
            )
        return match[2]

    return {name: TEMPLATE.sub(fill, value) for name, value in values.items()}


def _list_unmet(manifest: Manifest, directory: Path) -> Iterator[tuple[Waiver | None, str]]:
    """Yield (waiver, sentence) for each unmet requirement; waiver None if it can't be waived."""
    version = tuple(map(int, re.findall(r"\d+", manifest.version or manifest.schema_version)))
    if version[:1] > NEWEST_SCHEMA[:1] or version > NEWEST_SCHEMA:
        yield "unknown_keys", "its schema is newer than 1.4, so it may require unknown features."
    if manifest.steps:
        yield None, "it has steps, and only tasks of one step are supported."
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (directory / "environment" / name).exists():
            yield None, f"it has environment/{name}, and only a single container is supported."
    for name in ("trajectory.json", "tests/.harborignore", "solution/.harborignore"):
        if (directory / name).exists():
            yield None, f"it has {name}, which is not supported."
    if manifest.verifier.collect:
        yield None, "it has [[verifier.collect]] commands, which are not supported."
    machines = {"environment": manifest.environment}
    if manifest.verifier.environment is not None:
        machines["verifier.environment"] = manifest.verifier.environment
    for table, machine in machines.items():
        yield from _list_unmet_machine(table, machine)
    for table, phase in {"agent": manifest.agent, "verifier": manifest.verifier}.items():
        if phase.user is not None:
            yield "user", f"[{table}] user={phase.user}, and all commands run as one user."
        if phase.network_mode not in (None, "no-network"):
            yield (
                "network",
                f"[{table}] network_mode={phase.network_mode}, and sandboxes have no network.",
            )
    tables: dict[str, _Table] = {
        "": manifest,
        "agent.": manifest.agent,
        "verifier.": manifest.verifier,
        "solution.": manifest.solution,
        **{f"{name}.": machine for name, machine in machines.items()},
    }
    for prefix, table in tables.items():
        for name in table.model_extra or ():
            yield "unknown_keys", f"{prefix}{name} is not a key of schema 1.4."


def _list_unmet_machine(table: str, machine: Machine) -> Iterator[tuple[Waiver | None, str]]:
    if machine.os.lower() != "linux":
        yield None, f"[{table}] os={machine.os}, and only linux is supported."
    if machine.gpus or machine.tpu:
        yield None, f"[{table}] requires an accelerator, and sandboxes have none."
    if machine.mcp_servers:
        yield None, f"[{table}] has mcp_servers, which are not supported."
    if machine.healthcheck:
        yield None, f"[{table}] has a healthcheck, so it starts a service; these are not supported."
    if machine.has_network:
        yield (
            "network",
            f'[{table}] network_mode is {machine.network_mode}, not "no-network", and sandboxes '
            "have no network.",
        )
