"""What the driver of a spread learner costs: the real packing, planning, dealing and messages, with
simulated ranks.

    python benchmarks/scale.py [--cases small|full] [--markdown]

A step is one of GRPO with a reference, as the loop makes it: pack, scoring passes, advantages,
weights, an update. Its ranks are members of a real group, and receive the messages that real ones
would; they answer by a model of cost instead of a GPU. Not measured: the time in which bytes cross
the network. Each case runs in a process of its own, and prints a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.scoring import fill_columns
from ratchet.config.resolve import build, resolve
from ratchet.data.packing import pack
from ratchet.executors import protocol
from ratchet.executors.freeze import prepare_process
from ratchet.executors.placement import (
    Accelerator,
    ClusterNode,
    ResourceManager,
    ResourceRequest,
    VirtualCluster,
)
from ratchet.executors.worker import WorkerPlace
from ratchet.executors.worker_group import WorkerGroup
from ratchet.executors.worker_handle import WorkerHandle, WorkerName
from ratchet.learners.config import DTensorConfig
from ratchet.learners.remote import RemoteLearner
from ratchet.processes import frames
from ratchet.types import Group, Message, Owner, Scored, Task, Trajectory, Turn

PER_NODE, ATTEMPTS, VOCABULARY = 8, 8, 150_000
PROMPT, ANSWER = (150, 0.6), (180, 0.9)  # tokens: median and spread of log-normal lengths
LONGEST = 2048
# Of the simulated rank: a model of 7e9 parameters on an accelerator that does 4e14 operations a
# second.
PARAMETERS, OPERATIONS_S, CALL_S = 7e9, 4e14, 2e-3
WEAK = [(1, 96), (8, 768), (64, 6_144), (256, 24_576), (1024, 98_304)]  # as much for each rank
STRONG = [(ranks, 24_576) for ranks in (1, 8, 64, 1024)]  # the same work
SMALL = [(1, 96), (8, 768), (64, 6_144)]


@dataclass(frozen=True)
class Measured:
    """Of one step. driver_s: of the driver's processor, what it does before and between the ranks'
    work, by part in `parts_s`. driver_mib: the most memory above what the groups take. rank_mib:
    what a rank receives, the mean and the most. balance: the mean work of a rank over the most."""

    ranks: int
    trajectories: int
    tokens: int
    tensor: int
    driver_s: float
    parts_s: dict[str, float]
    driver_mib: float
    rank_mib: float
    rank_mib_most: float
    microbatches: int
    balance: float
    ranks_s: float


class Simulated(WorkerHandle):
    """A rank that computes nothing: it counts the bytes that come, and answers at once."""

    def __init__(self, rank: int, ranks: int, tensor: int) -> None:
        super().__init__(WorkerName("learner", rank, ranks, "here"), silence_s=1e9)
        self._has_greeted = True
        self.tensor = tensor
        self.bytes = self.micros = 0
        self.work_s = 0.0  # of the accelerator that it stands for
        self.aside_s = 0.0  # of this process, which a driver would not spend

    def close(self) -> None:
        self._end(None)

    def kill(self) -> None: ...

    def _send(self, number: int, request: frames.Parcel) -> None:
        start = time.process_time()
        self.bytes += len(request.body) + sum(buffer.nbytes for buffer in request.buffers)
        # parts of what the driver has may be read-only
        with warnings.catch_warnings(action="ignore"):
            _, (method, (_, batches, wanted, *_), _) = protocol.unpack(request)
        tokens = sum(batch.n_tokens for batch in batches)
        passes = 3 if method == "update" else 1  # a backward costs as two forwards
        self.work_s += (
            CALL_S * len(batches) + 2 * PARAMETERS * passes * tokens / OPERATIONS_S / self.tensor
        )
        self.micros += len(batches)
        answer: Any = {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6}
        if method == "score":
            answer = [{name: torch.zeros(batch.n_tokens) for name in wanted} for batch in batches]
        packed = protocol.pack(answer)
        self.aside_s += time.process_time() - start
        self._complete(number, (frames.FrameKind.RESULT, packed))


def drawn(count: int, seed: int) -> list[Group]:
    rng = np.random.default_rng(seed)

    def length(median: float, spread: float, most: int) -> int:
        return int(min(max(1, rng.lognormal(np.log(median), spread)), most))

    def attempt(prompt: np.ndarray, number: int) -> Trajectory:
        n, m = len(prompt), length(*ANSWER, LONGEST)
        owner = np.repeat(np.array([Owner.PROMPT, Owner.POLICY], dtype=np.int8), [n, m])
        written = owner == Owner.POLICY
        return Trajectory(
            tokens=np.concatenate([prompt, rng.integers(VOCABULARY, size=m)]),
            owner=owner,
            trainable=written,
            rollout_logprobs=np.where(written, -1.0, 0.0).astype(np.float32),
            versions=np.where(written, 0, -1).astype(np.int32),
            attempt=number,
            turns=(Turn(n, n + m),),
            outcome=Scored(float(rng.integers(2))),
        )

    groups = []
    for g in range(count // ATTEMPTS):
        prompt = rng.integers(VOCABULARY, size=length(*PROMPT, LONGEST))
        task = Task(f"task/{g}", (Message("user", ""),))
        groups.append(
            Group(f"grpo/{g}", task, tuple(attempt(prompt, number) for number in range(ATTEMPTS)))
        )
    return groups


def measure(ranks: int, trajectories: int, tensor: int) -> Measured:
    """The second step of two: the first one's memory is new to the process."""
    groups = drawn(trajectories, seed=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(groups, ranks, tensor)
    found = step(groups, ranks, tensor)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return replace(found, trajectories=trajectories, driver_mib=(after - before) / 1024)


def step(groups: Sequence[Group], ranks: int, tensor: int) -> Measured:
    config = DTensorConfig(dp_shard=ranks // tensor, tensor_parallel=tensor)
    algorithm = build(
        resolve("algorithm", {"kind": "grpo", "group_size": ATTEMPTS, "kl": {"coef": 0.01}})
    )
    members = [Simulated(rank, ranks, tensor) for rank in range(ranks)]
    places = [
        WorkerPlace("learner", rank, ranks, rank % PER_NODE, "here", "", 1, "cuda:0")
        for rank in range(ranks)
    ]
    workers, state, parts = WorkerGroup(places, members), AlgoState(), {}

    def learner(role: str) -> RemoteLearner:
        return RemoteLearner(
            workers,
            config,
            role,
            device="cuda",
            vocab_size=VOCABULARY,
            unit=algorithm.unit,
            shares_prefixes=True,
        )

    roles: Mapping[str, RemoteLearner] = {
        "policy": learner("policy"),
        **{role: learner(role) for role in algorithm.roles},
    }

    def timed(name: str, work: Any) -> Any:
        start, aside = time.process_time(), sum(member.aside_s for member in members)
        made = work()
        parts[name] = (
            time.process_time() - start - (sum(member.aside_s for member in members) - aside)
        )
        return made

    timed("lay out ranks", lambda: laid_out(ranks))
    batch = timed("pack", lambda: pack(groups))
    batch = timed("score", lambda: asyncio.run(fill_columns(batch, algorithm, roles)))
    batch = timed("advantages", lambda: algorithm.advantage(batch, state))
    batch = timed("weigh", lambda: algorithm.weigh(batch, state))
    timed("update", lambda: asyncio.run(roles["policy"].update(batch, algorithm.losses["policy"])))
    workers.close()
    work_s, received = [member.work_s for member in members], [member.bytes for member in members]
    return Measured(
        ranks=ranks,
        trajectories=0,
        tokens=batch.n_tokens,
        tensor=tensor,
        driver_s=sum(parts.values()),
        parts_s=parts,
        driver_mib=0.0,
        rank_mib=statistics.fmean(received) / 2**20,
        rank_mib_most=max(received) / 2**20,
        microbatches=sum(member.micros for member in members),
        balance=statistics.fmean(work_s) / max(work_s),
        ranks_s=max(work_s),
    )


def laid_out(ranks: int) -> None:
    nodes = [
        ClusterNode(f"node{i}", 96, tuple(map(Accelerator, range(PER_NODE))))
        for i in range(-(-ranks // PER_NODE))
    ]
    VirtualCluster(ResourceManager(nodes)).plan([ResourceRequest("learner", ranks, gpus=1)])


def table(found: Sequence[Measured]) -> str:
    heading = (
        "Ranks",
        "Trajectories",
        "Tokens",
        "Driver s",
        "µs a token",
        "Driver MiB",
        "Bytes a token",
        "MiB a rank",
        "most",
    )
    heading = (*heading, "Ranks' own s", "Balance")
    lines = [heading, tuple("---:" for _ in heading)]
    for case in found:
        lines.append(
            (
                f"{case.ranks:,}" + (f" (TP {case.tensor})" if case.tensor > 1 else ""),
                f"{case.trajectories:,}",
                f"{case.tokens:,}",
                f"{case.driver_s:.2f}",
                f"{1e6 * case.driver_s / case.tokens:.2f}",
                f"{case.driver_mib:,.0f}",
                f"{2**20 * case.driver_mib / case.tokens:.0f}",
                f"{case.rank_mib:.1f}",
                f"{case.rank_mib_most:.1f}",
                f"{case.ranks_s:.2f}",
                f"{case.balance:.0%}",
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", choices=("small", "full"), default="small")
    parser.add_argument("--markdown", action="store_true", help="and the table of docs/scaling.md")
    parser.add_argument(
        "--case",
        type=int,
        nargs=3,
        metavar=("RANKS", "TRAJECTORIES", "TP"),
        help="this one, in this process",
    )
    chosen = parser.parse_args()
    if chosen.case:
        prepare_process(1)
        print(json.dumps(asdict(measure(*chosen.case))), flush=True)
        return 0
    cases = SMALL if chosen.cases == "small" else list(dict.fromkeys([*WEAK, *STRONG]))
    cases = [(*case, 1) for case in cases] + [(64, 6_144, 8)]
    found = []
    for case in cases:
        command = [sys.executable, __file__, "--case", *map(str, case)]
        line = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        print(line, end="", flush=True)
        found.append(Measured(**json.loads(line)))
    if chosen.markdown:
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
