"""Config sections of the sandboxes, chosen by `kind:`.

The number of concurrent programs and the weakest isolation allowed are keys of the section that
uses the sandbox.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from ratchet.config.base import Section
from ratchet.config.resolve import resolve

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class LocalSandboxConfig(Section):
    """A sandbox on this machine, with the strongest isolation that the machine permits."""

    builds: ClassVar[str] = "ratchet.sandbox.local:build_local_sandbox"

    readable: tuple[str, ...] = ()
    """Directories that programs can read and import from."""


def local_sandbox() -> Section:
    """Return the default section of a `sandbox` key: kind local.

    `resolve` sets `kind` explicitly, so that it is written to a saved recipe.
    """
    return resolve("sandbox", {"kind": "local"})


class DockerSandboxConfig(Section):
    """A sandbox that runs each program or session in its own container (Docker Engine API)."""

    builds: ClassVar[str] = "ratchet.sandbox.docker:DockerSandbox"

    image: str = Field("python:3.11-slim", min_length=1)
    """Container image of programs, unless their task names another image."""
    address: str = "unix:///var/run/docker.sock"
    """Address of the engine: unix://, http:// (loopback) or https://."""
    certificates: Path | None = None
    """Directory with ca.pem, cert.pem and key.pem, for https://."""
    pull: bool = False
    """True to fetch an image that the engine lacks from its registry."""
    runtime: str | None = None
    """Runtime of the engine, such as runsc (gVisor) or kata; null: the engine's default."""
    user: str = Field("65534:65534", min_length=1)
    """User (name, uid or uid:gid) under which programs run."""
    cpus: float = Field(1.0, gt=0)
    """Number of processors that a container can use."""
    read_only: bool = True
    """True: only /tmp can be written, up to the disk limit. False: the whole image can be written,
    without a limit."""
    workdir: str = Field("/tmp", pattern="^/")
    """Working directory of sessions; with read_only it must be /tmp or below /tmp."""
    shell: str = Field("sh", min_length=1)
    """Shell of sessions; it must be in the image."""
    python: str = Field("python3", min_length=1)
    """Command of the Python interpreter in the image."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of each answer of the engine, in seconds."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        scheme, _, location = address.partition("://")
        if scheme not in ("unix", "http", "https") or not location:
            raise ValueError(
                f"{address!r} is not an address of an engine: write unix:///path, "
                "http://127.0.0.1:port or https://host:port"
            )
        host = location.split("/")[0].rpartition(":")[0] or location
        if scheme == "http" and host not in LOOPBACK:
            raise ValueError(
                f"address={address} is not encrypted, and access to an engine is root access. "
                "Set address=https://host:port, or use a tunnel."
            )
        return address

    def check_keys(self) -> None:
        if self.certificates is not None and not self.address.startswith("https://"):
            raise ValueError(
                f"certificates={self.certificates} is only used with https://, and the address is "
                f"{self.address}: remove certificates, or set an https:// address"
            )
        if self.read_only and self.workdir != "/tmp" and not self.workdir.startswith("/tmp/"):
            raise ValueError(
                f"workdir={self.workdir} can't be written with read_only: set read_only: false, or "
                "use /tmp"
            )


class RemoteSandboxConfig(Section):
    """A sandbox service with SandboxFusion's API (bytedance/SandboxFusion, POST /run_code)."""

    builds: ClassVar[str] = "ratchet.sandbox.remote:RemoteSandbox"

    address: str = Field(pattern="^https?://")
    """Address of the service, without /run_code."""
    offers: Literal["seccomp", "landlock", "namespaces", "kernel"]
    """Isolation under which the service runs programs, as its operator states it. The service does
    not report it, so Ratchet checks it with two test programs."""
    token_file: Path | None = None
    """File whose text is sent as the bearer token; null: no token is sent."""
    retries: int = Field(3, ge=0)
    """Number of further tries after errors of the service or the network."""
    retry_wait_s: float = Field(0.5, ge=0)
    """Wait before the first retry, in seconds; it doubles with each retry, and up to half is added
    at random."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds to wait for an answer beyond the program's own time limit. It leaves room for the
    service's queue."""
