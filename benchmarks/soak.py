"""Train for half an hour under disturbance, and watch the memory, file descriptors, threads and files
of every process.

    python benchmarks/soak.py [--minutes 30] [--every 10] [--kill-every 60] [--seed 0] [--folder
    DIRECTORY]

The training runs under Ray with two worker generators, records, and saves in the background. One
worker lives as long as the training, and its growth is judged. The other one is killed from time to
time. The table shows its replacements separately, because their memory depends on their age.
`ratchet ui` shows the run, `ratchet serve` serves another model, and clients of both connect and
sometimes disconnect early. At the end SIGTERM stops the training.

Prints a table with a row for each kind of process and each measure: the value in the middle and at
the end, and the growth per hour over the second half. The exit status is 1 if a process of Ratchet
grew beyond a bound (BOUNDS), if anything is left after the end (processes, shared memory, temporary
files), or if a process did not end as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

MIB = 2**20
SHARED_MEMORY = "/dev/shm/"
BASE: dict[str, Any] = {
    "name": "soak",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "optimizer": {"lr": 0.001},
    "algorithm": {"kind": "grpo", "group_size": 4},
    "batch_size": 4,
    "logging": {"progress": "off"},
}
TRAINED: dict[str, Any] = {
    **BASE,
    "cluster": {"kind": "ray", "object_store_mib": 100},
    "generator": {
        "kind": "workers",
        "workers": 2,
        "recovery": "restart",
        "max_restarts": 100_000,
        "worker": {"kind": "engine"},
    },
    "checkpoint": {"every": 50, "keep": 2, "background": True},
    "record": {"max_gib": 0.05},
    "evaluation": {"every": 200, "tasks": 4},
    "steps": 100_000_000,
}
OURS = ("driver", "worker", "ui", "serve")  # kinds of Ratchet's processes
REPLACED = "worker, replaced when killed"
LOADING_S = 20.0  # younger processes are not counted: they may still load their model
# Maximum growth of a kind of Ratchet's processes in the second half: the larger of an amount, and a
# share of the value in the middle.
BOUNDS = {"uss_mib": (16.0, 0.05), "descriptors": (4.0, 0.05), "threads": (4.0, 0.05)}
CACHES = ("torchinductor_",)  # caches in the folder for temporary files, which are kept on purpose
FINISH_S = 120.0  # maximum time until a process has ended after SIGTERM


@dataclass(frozen=True)
class Stat:
    """The entry of a process in /proc.

    birth: clock ticks from the start of the machine to that of the process. It distinguishes
      processes that had the same pid.
    """

    pid: int
    parent: int
    birth: int

    @classmethod
    def read(cls, pid: int) -> Stat | None:
        """Return None for a process that has ended."""
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                return cls(pid, int(fields[1]), int(fields[19]))
        return None


def compute_age_s(birth: int) -> float:
    """Return the age of a process in seconds. birth: as in `Stat`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - birth / os.sysconf("SC_CLK_TCK")


def list_descendants(roots: list[int]) -> list[Stat]:
    """Return the roots and all their children, grandchildren and so on."""
    stats = {
        int(name): stat
        for name in os.listdir("/proc")
        if name.isdecimal() and (stat := Stat.read(int(name)))
    }
    children = defaultdict[int, list[Stat]](list)
    for stat in stats.values():
        children[stat.parent].append(stat)
    tree = [stats[root] for root in roots if root in stats]
    for stat in tree:
        tree += children[stat.pid]
    return tree


def measure_process(pid: int) -> dict[str, float]:
    """Return the memory, descriptors and threads of a process. Raises OSError if it has ended.

    rss_mib: resident memory. uss_mib: the part of it that no other process shares.
    """
    measures = {"rss_mib": 0.0, "uss_mib": 0.0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss":
            measures["rss_mib"] = int(rest.split()[0]) / 1024
        elif name.startswith("Private_"):
            measures["uss_mib"] += int(rest.split()[0]) / 1024
    measures["descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
    measures["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    return measures


def list_shared_memory(pid: int) -> set[str]:
    """Return the paths in shared memory that a process has open or mapped."""
    paths = set[str]()
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                paths.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        paths |= {
            line.split(maxsplit=5)[-1]
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        }
    return {
        path for path in paths if path.startswith(SHARED_MEMORY) and not path.endswith(" (deleted)")
    }


def find_kind(pid: int) -> str:
    """Return the kind of a process that the driver or Ray started; "" if it has ended.

    It is "worker", "ray NAME" or "other".
    """
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if words[0].startswith("ray::WorkerActor"):
            return "worker"
        if words[0].startswith("ray::"):
            return f"ray {words[0][5:].split('(')[0].strip()}"
        programs = [
            Path(word).name for word in words if word.endswith((".py", "gcs_server", "raylet"))
        ]
        return f"ray {programs[0].removesuffix('.py')}" if programs else "other"
    return ""


@dataclass
class Watch:
    """Samples of all processes over time.

    roots: kind of each process that the soak started, by pid.
    temporary: folder of temporary files of all processes.
    times: time of each sample.
    samples: values by (kind, measure) and by index of the sample.
    births: birth of each process seen, by pid; see `Stat`.
    lasting_worker: pid of the worker that is never killed.
    shared: paths in shared memory seen so far.
    """

    roots: dict[int, str]
    temporary: Path
    times: list[float] = field(default_factory=list)
    samples: dict[tuple[str, str], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    births: dict[int, int] = field(default_factory=dict)
    lasting_worker: int | None = None
    shared: set[str] = field(default_factory=set)

    def look(self) -> list[tuple[str, int]]:
        """Note all processes that exist now, and return the kind and pid of each."""
        processes = []
        for stat in list_descendants(list(self.roots)):
            self.births[stat.pid] = stat.birth
            kind = self.roots.get(stat.pid) or find_kind(stat.pid)
            if kind == "worker":
                self.lasting_worker = self.lasting_worker or stat.pid
                if stat.pid != self.lasting_worker:
                    kind = REPLACED
            if kind:
                processes.append((kind, stat.pid))
        return processes

    def sample(self) -> None:
        index = len(self.times)
        self.times.append(time.monotonic())
        sums = defaultdict[tuple[str, str], float](float)
        for kind, pid in self.look():
            self.shared |= list_shared_memory(pid)
            # A worker that still loads its model has less memory, and loading takes longer on a
            # busy machine.
            if compute_age_s(self.births[pid]) < LOADING_S:
                continue
            with suppress(OSError):
                for measure, value in measure_process(pid).items():
                    sums[kind, measure] += value
                sums[kind, "processes"] += 1
        sums["all", "shared memory"] = sum(os.path.exists(path) for path in self.shared)
        sums["all", "temporary files"] = sum(1 for _ in self.temporary.rglob("*"))
        for (kind, measure), value in sums.items():
            # The number of processes of a kind varies, so the mean over them is sampled.
            count = 1 if measure == "processes" else sums.get((kind, "processes"), 1)
            self.samples[kind, measure][index] = value / count

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each kind and measure, from a line fitted through the second half.

        middle: value of the line at the beginning of the second half.
        grown: increase until its end.
        """
        half = len(self.times) // 2
        for (kind, measure), values in sorted(self.samples.items()):
            points = [
                (self.times[index], value) for index, value in values.items() if index >= half
            ]
            if len(points) < 3:
                continue
            seconds, heights = np.array(points).T
            slope, _ = np.polyfit(seconds - seconds[0], heights, 1)
            middle = float(heights.mean() - slope * (seconds - seconds[0]).mean())
            yield {
                "kind": kind,
                "measure": measure,
                "middle": middle,
                "grown": float(slope * (seconds[-1] - seconds[0])),
                "per_hour": float(slope * 3600),
            }

    def list_leftovers(self) -> list[str]:
        """Return the processes, shared memory and temporary files that still exist."""
        processes = [
            f"process {pid}"
            for pid, birth in self.births.items()
            if (stat := Stat.read(pid)) and stat.birth == birth
        ]
        shared = [path for path in self.shared if os.path.exists(path)]
        files = [str(path) for path in self.temporary.iterdir() if not path.name.startswith(CACHES)]
        return processes + shared + files


class Clients:
    """Threads that send requests to both servers, half of which they break off.

    n_requests: number of requests so far.
    """

    def __init__(self, ui: int, serve: int, rng: random.Random) -> None:
        self._stop, self.n_requests = threading.Event(), 0
        body = json.dumps(
            {"model": "policy", "messages": [{"role": "user", "content": "21="}], "max_tokens": 3}
        )
        post = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            f"{len(body)}\r\n\r\n{body}"
        )
        gets = [
            f"GET {path} HTTP/1.1\r\nHost: localhost:{ui}\r\n\r\n"
            for path in ("/", "/api/runs", "/api/run?run=run", "/nothing")
        ]
        self._threads = [
            threading.Thread(
                target=self._send_requests,
                args=(port, requests, random.Random(rng.random())),
                daemon=True,
            )
            for port, requests in ((ui, gets), (serve, [post]))
        ]
        for thread in self._threads:
            thread.start()

    def _send_requests(self, port: int, requests: list[str], rng: random.Random) -> None:
        while not self._stop.wait(rng.uniform(0.5, 1.5)):
            request = rng.choice(requests).encode()
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
            ):
                self.n_requests += 1
                how = rng.choice(("whole", "whole", "half a request", "answer not read"))
                connection.sendall(
                    request[: len(request) // 2] if how == "half a request" else request
                )
                if how == "whole":
                    while connection.recv(2**16) and b"HTTP" in request:
                        connection.settimeout(1)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Soak:
    """The processes of one soak.

    n_kills: number of workers killed so far.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        # In /tmp, because the paths of Ray's sockets must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
        (folder / "token").write_text("0" * 64)
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        }
        self.n_kills = 0
        self._write("short", BASE | {"steps": 1})
        self._write("long", TRAINED)
        subprocess.run(
            self._command("train", "short.yaml", "--run-dir", "short"),
            cwd=folder,
            env=self.environment,
            check=True,
        )
        ports = [find_free_port(), find_free_port()]
        self.processes = {
            "driver": self._start("driver", "train", "long.yaml", "--run-dir", "run"),
            "serve": self._start("serve", "serve", "short", "--port", str(ports[1])),
        }
        self._wait_for_first_step(folder / "run" / "metrics.jsonl")
        self.processes["ui"] = self._start("ui", "ui", "run", "--port", str(ports[0]))
        self.watch = Watch(
            {process.pid: kind for kind, process in self.processes.items()}, self.temporary
        )
        self.clients = Clients(ports[0], ports[1], self.rng)

    def _write(self, name: str, recipe: dict[str, Any]) -> None:
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "ratchet", *arguments]

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                self._command(*arguments),
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_for_first_step(self, metrics: Path) -> None:
        while not metrics.exists() or not metrics.stat().st_size:
            if self.processes["driver"].poll() is not None:
                raise RuntimeError(
                    f"the training did not begin: {(self.folder / 'driver.log').read_text()}"
                )
            time.sleep(0.5)

    def run(self, seconds: float, every_s: float, kill_every_s: float) -> None:
        end = time.monotonic() + seconds
        next_kill = time.monotonic() + kill_every_s
        while time.monotonic() < end and self.processes["driver"].poll() is None:
            self.watch.sample()
            if time.monotonic() >= next_kill:
                next_kill += kill_every_s * self.rng.uniform(0.5, 1.5)
                self._kill_worker()
            time.sleep(every_s)

    def _kill_worker(self) -> None:
        workers = [pid for kind, pid in self.watch.look() if kind == REPLACED]
        if workers:
            self.n_kills += 1
            with suppress(ProcessLookupError):
                os.kill(self.rng.choice(workers), signal.SIGKILL)

    def end(self) -> list[str]:
        """Stop all processes with SIGTERM, and return descriptions of what went wrong."""
        self.clients.close()
        self.watch.look()
        for process in self.processes.values():
            process.terminate()
        problems = []
        for kind, process in self.processes.items():
            try:
                status = process.wait(FINISH_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
                problems.append(f"{kind} did not end within {FINISH_S:g} s of SIGTERM")
            if kind == "driver" and status != 128 + signal.SIGTERM:
                problems.append(
                    f"the training ended with {status}: "
                    f"{(self.folder / 'driver.log').read_text()[-2000:]}"
                )
        deadline = time.monotonic() + 20
        while (leftovers := self.watch.list_leftovers()) and time.monotonic() < deadline:
            time.sleep(0.5)
        shutil.rmtree(self.temporary, ignore_errors=True)
        return problems + [f"left: {leftover}" for leftover in leftovers]


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def exceeds_bound(row: dict[str, Any]) -> bool:
    """Return True if a process of Ratchet grew more than its bound allows."""
    if row["kind"] not in OURS or row["measure"] not in BOUNDS:
        return False
    amount, share = BOUNDS[row["measure"]]
    return row["grown"] > max(amount, share * row["middle"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument(
        "--kill-every", type=float, default=60.0, help="mean seconds between kills of a worker"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of run and logs, which is kept; default: a temporary one",
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-run-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder, options.seed)
    try:
        soak.run(60 * options.minutes, options.every, options.kill_every)
    finally:
        problems = soak.end()
    rows = list(soak.watch.rows())
    problems += [
        f"{row['kind']}: {row['measure']} grew by {row['grown']:.1f} in the second half"
        for row in rows
        if exceeds_bound(row)
    ]
    sys.stdout.write("| process | measure | middle | end | per hour |\n|---|---|---:|---:|---:|\n")
    for row in rows:
        end_value = row["middle"] + row["grown"]
        cells = (
            f"{row['kind']} | {row['measure']} | {row['middle']:.1f} | {end_value:.1f} | "
            f"{row['per_hour']:+.1f}"
        )
        sys.stdout.write(f"| {cells} |\n")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    sys.stdout.write(
        f"\n{len(lines)} steps, {soak.n_kills} workers killed, {soak.clients.n_requests} requests\n"
    )
    for problem in problems:
        sys.stdout.write(f"WRONG: {problem}\n")
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
