"""Describe the containers of a Docker sandbox, and the isolation that an engine gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ratchet.sandbox.base import FIXED_ENVIRONMENT, Isolation, Limits, SandboxError, Strength
from ratchet.sandbox.config import DockerSandboxConfig
from ratchet.sandbox.docker_api import read_field
from ratchet.sandbox.reaper import OWNER_LABEL

# Name prefixes of runtimes with a kernel of their own: gVisor, Kata Containers.
OWN_KERNEL_RUNTIMES = ("runsc", "kata")
# Processes in addition to the program's limit: the first process, shells, and KILL_SCRIPT.
SPARE_PROCESSES = 8
SCRATCH_DIRECTORY = "/tmp"
# The first process. It restarts its `cat` if a program kills it, ends when the connection ends, and
# reaps ended processes.
KEEPER_SCRIPT = "exec 3<&0; while :; do cat <&3 >/dev/null & wait $!; [ $? -le 128 ] && exit; done"


def build_container_config(
    image: str, config: DockerSandboxConfig, limits: Limits, owner: str, *, is_podman: bool = False
) -> dict[str, Any]:
    """Return the body of the request that creates a container for a program or a session."""
    memory = limits.memory_mib << 20
    cpu_s = math.ceil(limits.cpu_s)
    scratch = f"size={limits.disk_mib}m,mode=1777,nosuid,nodev"
    # A volume, not a tmpfs of the container: Docker can put files only into volumes if the root is
    # read-only. Podman can put them into a tmpfs, and would ignore the volume's options.
    volume = {
        "Type": "volume",
        "Target": SCRATCH_DIRECTORY,
        "VolumeOptions": {
            "DriverConfig": {
                "Name": "local",
                "Options": {"type": "tmpfs", "device": "tmpfs", "o": scratch},
            }
        },
    }
    mounts = {"Tmpfs": {SCRATCH_DIRECTORY: scratch}} if is_podman else {"Mounts": [volume]}
    # Over its CPU limit a process gets SIGXCPU, and a second later SIGKILL.
    ulimits = [("nofile", 256, 256), ("core", 0, 0), ("cpu", cpu_s, cpu_s + 1)]
    return {
        "Image": image,
        "Entrypoint": ["sh", "-c", KEEPER_SCRIPT],
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in FIXED_ENVIRONMENT.items()],
        "User": config.user,
        "WorkingDir": "/",
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "NetworkDisabled": True,
        "Labels": {OWNER_LABEL: owner},
        "HostConfig": {
            "AutoRemove": True,
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(config.cpus * 1e9),
            "PidsLimit": limits.processes + limits.threads + SPARE_PROCESSES,
            "Ulimits": [{"Name": name, "Soft": soft, "Hard": hard} for name, soft, hard in ulimits],
            "NetworkMode": "none",
            "IpcMode": "none" if config.read_only else "private",
            "ReadonlyRootfs": config.read_only,
            **mounts,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "LogConfig": {"Type": "none"},
            **({"Runtime": config.runtime} if config.runtime else {}),
        },
    }


def read_strength(info: Mapping[str, Any], config: DockerSandboxConfig) -> Strength:
    """Return the isolation that the engine gives.

    Args:
        info: The engine's answer to GET /info.
        config: The sandbox's section.

    Raises:
        SandboxError: The engine can't run the containers, or isolates nothing.
    """
    options = [str(option) for option in read_field(info, list, "SecurityOptions", default=[])]
    if info.get("OSType", "linux") != "linux":
        raise SandboxError(
            f"the engine at {config.address} runs containers of {info['OSType']}: linux is needed"
        )
    runtimes = read_field(info, dict, "Runtimes", default={})
    if config.runtime and config.runtime not in runtimes and "." not in config.runtime:
        raise SandboxError(
            f"the engine at {config.address} has no runtime '{config.runtime}', only "
            f"{', '.join(runtimes)}"
        )
    runtime = config.runtime or str(info.get("DefaultRuntime", ""))
    has_seccomp = any(
        option.startswith("name=seccomp") and "unconfined" not in option for option in options
    )
    has_own_kernel = runtime.removeprefix("io.containerd.").startswith(OWN_KERNEL_RUNTIMES)
    if not has_seccomp and not has_own_kernel:
        raise SandboxError(
            f"the engine at {config.address} filters no system calls (seccomp): no isolation level "
            "holds there"
        )
    mechanisms = [
        "container",
        "no capabilities",
        "no-new-privileges",
        "no network",
        "cgroups",
        f"runtime {runtime or 'default'}",
    ]
    mechanisms += [option.split(",")[0].removeprefix("name=") for option in options]
    refused = (
        () if has_own_kernel else (f"runtime {runtime or 'default'} shares the machine's kernel",)
    )
    return Strength(
        Isolation.KERNEL if has_own_kernel else Isolation.NAMESPACES, refused, tuple(mechanisms)
    )
