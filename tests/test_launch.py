"""The files of docs/launch: their syntax, and that what they call exists; the scripts run with
stand-ins for the cluster's."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ratchet.commands.describe_recipe import describe
from ratchet.config.loader import load_config

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "docs" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sbatch"))
MANIFESTS = sorted(LAUNCH.glob("kubernetes-*.yaml"))
RECIPE = ROOT / "ratchet" / "recipes" / "quickstart.yaml"

# Each logs how it was called; srun runs what it is given, here.
STAND_INS = {
    "scontrol": "printf 'one\\ntwo\\n'",
    "srun": 'while [[ $1 == --* ]]; do shift; done; [[ $1 == hostname ]] && echo "10.0.0.1 '
    'fe80::1" || exec "$@"',
    "ray": '[[ $1 != start ]] || sleep 0.1; [[ $1 != health-check ]] || grep -q -- "start --head" '
    '"$LOG"',
    "sleep": "exec /bin/sleep 0.05",
    "torchrun": "",
    "python": '[[ $1 != -c ]] || grep -c "^ray start" "$LOG"; '
    '[[ $* != *ratchet* ]] || { echo "RAY_ADDRESS=${RAY_ADDRESS:-}" >> "$LOG"; exit 7; }',
}
SLURM = {
    "SLURM_JOB_NODELIST": "one,two",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "5",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.fixture
def dry_run(tmp_path):
    def dry_run(script, *arguments):
        """(exit status, the calls of the stand-ins, as words)"""
        programs, log = tmp_path / "bin", tmp_path / "log"
        programs.mkdir()
        for name, body in STAND_INS.items():
            path = programs / name
            path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$LOG"\n{body}\n')
            path.chmod(0o755)
        environment = {
            **os.environ,
            **SLURM,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "LOG": str(log),
        }
        done = subprocess.run(
            ["bash", script, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, [shlex.split(line) for line in log.read_text().splitlines()]

    return dry_run


def options_of(*command: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return set(re.findall(r"--[a-z][a-z-]+", done.stdout))


def options_in(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    if shutil.which("shellcheck"):
        subprocess.run(
            ["shellcheck", "--shell=bash", "--exclude=SC1091", script], check=True, timeout=60
        )
    text = script.read_text()
    assert "set -euo pipefail" in text
    lines = text.splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first_command = next(
        number for number, line in enumerate(lines) if line and not line.startswith("#")
    )
    assert directives
    assert max(directives) < first_command, "Slurm reads no directive behind a command"


def test_the_ray_script(dry_run):
    status, calls = dry_run(
        LAUNCH / "slurm-ray.sbatch", str(RECIPE), "learner.kind=dtensor", "learner.dp_shard=16"
    )
    assert status == 7  # the driver's own
    starts = [call for call in calls if call[:2] == ["ray", "start"]]
    # Both start in the background, in any order.
    starts.sort(key=lambda call: "--head" not in call)
    assert ["--head" in call for call in starts] == [True, False]
    assert "--address=10.0.0.1:6379" in starts[1]
    assert all({"--num-gpus=8", "--block"} <= set(call) for call in starts)
    driver = next(call for call in calls if "ratchet" in call)
    assert driver[1:4] == ["-m", "ratchet", "train"]
    assert "cluster ray" in describe(load_config(RECIPE, driver[5:]))
    assert ["RAY_ADDRESS=10.0.0.1:6379"] in calls


def test_the_ray_script_resumes(dry_run):
    _, calls = dry_run(LAUNCH / "slurm-ray.sbatch", "--resume", "runs/quickstart")
    assert ["python", "-m", "ratchet", "train", "--resume", "runs/quickstart"] in calls


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_ray_has_the_options(dry_run):
    _, calls = dry_run(LAUNCH / "slurm-ray.sbatch", str(RECIPE))
    used = set().union(*(options_in(call) for call in calls if call[:2] == ["ray", "start"]))
    assert used <= options_of("ray.scripts.scripts", "start")


@pytest.mark.slow
def test_the_torchrun_script(dry_run):
    status, calls = dry_run(
        LAUNCH / "slurm-torchrun.sbatch", str(RECIPE), "learner.kind=dtensor", "learner.dp_shard=16"
    )
    assert status == 0
    call = next(call for call in calls if call[0] == "torchrun")
    at = call.index("-m")
    assert call[at : at + 4] == ["-m", "ratchet", "train", str(RECIPE)]
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=one:29400"} <= set(call)
    assert options_in(call[:at]) <= options_of("torch.distributed.run")
    assert "16 ranks" in describe(load_config(RECIPE, call[at + 4 :]))


def commands_in(manifest: Path) -> list[list[str]]:
    """Of each `python -m ratchet` in a manifest, the arguments."""
    texts = [
        text for text in strings(yaml.safe_load(manifest.read_text())) if "ratchet train" in text
    ]
    return [
        shlex.split(found)
        for text in texts
        for found in re.findall(r"python -m ratchet (train [^;]*);", text)
    ]


def strings(value):
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value] if isinstance(value, str) else [text for part in parts for text in strings(part)]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifests_run_what_ratchet_takes(manifest):
    resume, fresh = commands_in(manifest)
    assert resume == ["train", "--resume", "/runs/quickstart"]
    recipe, option, run, *overrides = fresh[1:]
    assert (option, run) == ("--run-dir", resume[2])
    config = load_config(recipe, overrides)
    accelerators = sum(
        int(pod["resources"]["limits"].get("nvidia.com/gpu", 0)) * count
        for pod, count in containers(manifest)
    )
    assert config.stages[0].learner.dp_shard == accelerators  # all that there are, each with a rank


def containers(manifest: Path) -> list[tuple[dict, int]]:
    """With how many pods have it."""
    spec = yaml.safe_load(manifest.read_text())["spec"]
    if "rayClusterSpec" not in spec:
        return [(found, 1) for found in spec["template"]["spec"]["containers"]]
    cluster = spec["rayClusterSpec"]
    groups = [
        (cluster["headGroupSpec"], 1),
        *((group, group["replicas"]) for group in cluster["workerGroupSpecs"]),
    ]
    return [
        (found, count)
        for group, count in groups
        for found in group["template"]["spec"]["containers"]
    ]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_their_parts(manifest):
    said = yaml.safe_load(manifest.read_text())
    assert (said["apiVersion"], said["kind"]) in {("batch/v1", "Job"), ("ray.io/v1", "RayJob")}
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", said["metadata"]["name"])
    for container, _ in containers(manifest):
        assert container["image"].rpartition(":")[2] == "0.1.0"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/runs", "/dev/shm"}
    for pod in pods(said):
        assert {volume["name"] for volume in pod["volumes"]} == {"runs", "shm"}
    if said["kind"] == "RayJob":
        assert said["spec"]["rayClusterSpec"]["authOptions"]["mode"] == "token"


@pytest.mark.parametrize(("status", "starts"), [(0, 1), (1, 1), (2, 2), (143, 1)])
def test_the_skypilot_job_starts_a_run_only_where_there_is_none(tmp_path, status, starts):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    log, program = tmp_path / "log", tmp_path / "ratchet"
    program.write_text(
        f'#!/bin/bash\necho "$*" >> {log}\n[[ $* != *--resume* ]] || exit {status}\nexit 7\n'
    )
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": "s3://b/run"}
    done = subprocess.run(["bash", "-c", task["run"]], env=environment, timeout=60, check=False)
    calls = [shlex.split(line) for line in log.read_text().splitlines()]
    assert calls[0] == ["train", "--resume", "s3://b/run", "--supervise", "3"]
    assert (done.returncode, len(calls)) == (7 if starts == 2 else status, starts)
    if starts == 2:
        assert calls[1][:6] == [
            "train",
            "quickstart",
            "--run-dir",
            "s3://b/run",
            "--supervise",
            "3",
        ]
        assert load_config(RECIPE, calls[1][6:]).stages[0].learner.dp_shard == 8


def pods(value):
    """Every pod's spec in a manifest."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    own = [value] if isinstance(value, dict) and "containers" in value else []
    return own + [pod for part in parts for pod in pods(part)]


def test_the_container_file():
    text = re.sub(r"\\\n\s*", "", (LAUNCH / "Containerfile").read_text())
    lines = [
        line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")
    ]
    verbs = [verb for verb, _ in lines]
    assert verbs[0] == "FROM"
    assert set(verbs) <= {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "CMD"}
    assert not lines[0][1].endswith("latest")
    assert ":" in lines[0][1]
    assert [rest for verb, rest in lines if verb == "USER"][-1] != "root"
    for rest in (rest for verb, rest in lines if verb == "COPY"):
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
    for rest in (rest for verb, rest in lines if verb == "RUN"):
        if "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
        if "pip install" in rest:
            assert "--no-cache-dir" in rest
            assert "--constraint constraints.txt" in rest
    assert lines[-1] == ["CMD", '["ratchet", "doctor"]']
