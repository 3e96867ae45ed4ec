"""Measure the cost of the driver of a distributed learner: its packing, planning, distribution of
rows and messages.

    python benchmarks/scale.py [--cases small|full] [--markdown]

A step is a GRPO step with a reference model, as the training loop makes it: pack, scoring passes,
advantages, weights, an update. The driver's code is the real one. Its ranks are simulated: they
receive the real messages, and answer at once, with a cost that is estimated and not computed on a
GPU. The time of bytes in the network is not measured. Each case runs in a separate process, and
prints a JSON line.
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
# Median, in tokens, and sigma of the log-normal lengths of prompts and answers.
PROMPT, ANSWER = (150, 0.6), (180, 0.9)
MAX_LENGTH = 2048  # tokens
# The simulated rank: parameters of the model, operations per second of the accelerator, and seconds
# of overhead of a micro-batch.
PARAMETERS, OPERATIONS_S, CALL_S = 7e9, 4e14, 2e-3
# Cases as (ranks, trajectories). Weak scaling: equal work for each rank.
WEAK = [(1, 96), (8, 768), (64, 6_144), (256, 24_576), (1024, 98_304)]
# Strong scaling: equal work in total.
STRONG = [(ranks, 24_576) for ranks in (1, 8, 64, 1024)]
SMALL = [(1, 96), (8, 768), (64, 6_144)]


@dataclass(frozen=True)
class Measured:
    """The numbers of one step.

    tensor: tensor-parallel size.
    driver_s: processor seconds of the driver, before and between the ranks' work.
    parts_s: the same seconds by part.
    driver_mib: peak memory of the driver in addition to the groups.
    rank_mib, rank_mib_most: MiB that a rank receives: mean and maximum over the ranks.
    microbatches: sum over the ranks.
    balance: mean work of a rank, divided by the maximum.
    ranks_s: estimated seconds of the rank with the most work.
    """

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


class SimulatedRank(WorkerHandle):
    """A rank that computes nothing: it counts the bytes that it receives, and answers at once."""

    def __init__(self, rank: int, ranks: int, tensor: int) -> None:
        super().__init__(WorkerName("learner", rank, ranks, "here"), silence_s=1e9)
        self._has_greeted = True
        self.tensor = tensor
        self.received_bytes = self.microbatches = 0
        self.work_s = 0.0  # estimated seconds of the accelerator
        self.simulation_s = 0.0  # processor seconds of the simulation, which no driver spends

    def close(self) -> None:
        self._end(None)

    def kill(self) -> None: ...

    def _send(self, number: int, request: frames.Parcel) -> None:
        start = time.process_time()
        self.received_bytes += len(request.body) + sum(buffer.nbytes for buffer in request.buffers)
        # torch warns because some of the driver's buffers are read-only.
        with warnings.catch_warnings(action="ignore"):
            _, (method, (_, batches, output_names, *_), _) = protocol.unpack(request)
        tokens = sum(batch.n_tokens for batch in batches)
        passes = 3 if method == "update" else 1  # a backward costs as two forwards
        self.work_s += (
            CALL_S * len(batches) + 2 * PARAMETERS * passes * tokens / OPERATIONS_S / self.tensor
        )
        self.microbatches += len(batches)
        answer: Any = {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6}
        if method == "score":
            answer = [
                {name: torch.zeros(batch.n_tokens) for name in output_names} for batch in batches
            ]
        packed = protocol.pack(answer)
        self.simulation_s += time.process_time() - start
        self._complete(number, (frames.FrameKind.RESULT, packed))


def draw_groups(count: int, seed: int) -> list[Group]:
    """Return random groups of `count` trajectories together."""
    rng = np.random.default_rng(seed)

    def draw_length(median: float, sigma: float) -> int:
        return int(min(max(1, rng.lognormal(np.log(median), sigma)), MAX_LENGTH))

    def make_attempt(prompt: np.ndarray, number: int) -> Trajectory:
        n, m = len(prompt), draw_length(*ANSWER)
        owner = np.repeat(np.array([Owner.PROMPT, Owner.POLICY], dtype=np.int8), [n, m])
        is_policy = owner == Owner.POLICY
        return Trajectory(
            tokens=np.concatenate([prompt, rng.integers(VOCABULARY, size=m)]),
            owner=owner,
            trainable=is_policy,
            rollout_logprobs=np.where(is_policy, -1.0, 0.0).astype(np.float32),
            versions=np.where(is_policy, 0, -1).astype(np.int32),
            attempt=number,
            turns=(Turn(n, n + m),),
            outcome=Scored(float(rng.integers(2))),
        )

    groups = []
    for index in range(count // ATTEMPTS):
        prompt = rng.integers(VOCABULARY, size=draw_length(*PROMPT))
        task = Task(f"task/{index}", (Message("user", ""),))
        attempts = tuple(make_attempt(prompt, number) for number in range(ATTEMPTS))
        groups.append(Group(f"grpo/{index}", task, attempts))
    return groups


def measure(ranks: int, trajectories: int, tensor: int) -> Measured:
    """Measure the second of two steps, because the first one allocates the process's memory."""
    groups = draw_groups(trajectories, seed=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_step(groups, ranks, tensor)
    measured = run_step(groups, ranks, tensor)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return replace(measured, trajectories=trajectories, driver_mib=(after - before) / 1024)


def run_step(groups: Sequence[Group], ranks: int, tensor: int) -> Measured:
    config = DTensorConfig(dp_shard=ranks // tensor, tensor_parallel=tensor)
    algorithm = build(
        resolve("algorithm", {"kind": "grpo", "group_size": ATTEMPTS, "kl": {"coef": 0.01}})
    )
    members = [SimulatedRank(rank, ranks, tensor) for rank in range(ranks)]
    places = [
        WorkerPlace("learner", rank, ranks, rank % PER_NODE, "here", "", 1, "cuda:0")
        for rank in range(ranks)
    ]
    workers, state = WorkerGroup(places, members), AlgoState()
    seconds_by_part: dict[str, float] = {}

    def make_learner(role: str) -> RemoteLearner:
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
        "policy": make_learner("policy"),
        **{role: make_learner(role) for role in algorithm.roles},
    }

    def sum_simulation_s() -> float:
        return sum(member.simulation_s for member in members)

    def measure_part(name: str, work: Any) -> Any:
        start, simulation_s = time.process_time(), sum_simulation_s()
        result = work()
        seconds_by_part[name] = time.process_time() - start - (sum_simulation_s() - simulation_s)
        return result

    measure_part("lay out ranks", lambda: lay_out_ranks(ranks))
    batch = measure_part("pack", lambda: pack(groups))
    batch = measure_part("score", lambda: asyncio.run(fill_columns(batch, algorithm, roles)))
    batch = measure_part("advantages", lambda: algorithm.advantage(batch, state))
    batch = measure_part("weigh", lambda: algorithm.weigh(batch, state))
    losses = algorithm.losses["policy"]
    measure_part("update", lambda: asyncio.run(roles["policy"].update(batch, losses)))
    workers.close()
    work_s = [member.work_s for member in members]
    received_bytes = [member.received_bytes for member in members]
    return Measured(
        ranks=ranks,
        trajectories=0,  # `measure` sets this and driver_mib
        tokens=batch.n_tokens,
        tensor=tensor,
        driver_s=sum(seconds_by_part.values()),
        parts_s=seconds_by_part,
        driver_mib=0.0,
        rank_mib=statistics.fmean(received_bytes) / 2**20,
        rank_mib_most=max(received_bytes) / 2**20,
        microbatches=sum(member.microbatches for member in members),
        balance=statistics.fmean(work_s) / max(work_s),
        ranks_s=max(work_s),
    )


def lay_out_ranks(ranks: int) -> None:
    nodes = [
        ClusterNode(f"node{i}", 96, tuple(map(Accelerator, range(PER_NODE))))
        for i in range(-(-ranks // PER_NODE))
    ]
    VirtualCluster(ResourceManager(nodes)).plan([ResourceRequest("learner", ranks, gpus=1)])


def table(cases: Sequence[Measured]) -> str:
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
    for case in cases:
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
    parser.add_argument(
        "--markdown", action="store_true", help="also print the table of docs/scaling.md"
    )
    parser.add_argument(
        "--case",
        type=int,
        nargs=3,
        metavar=("RANKS", "TRAJECTORIES", "TP"),
        help="measure only this case, in this process",
    )
    options = parser.parse_args()
    if options.case:
        prepare_process(1)
        print(json.dumps(asdict(measure(*options.case))), flush=True)
        return 0
    cases = SMALL if options.cases == "small" else list(dict.fromkeys([*WEAK, *STRONG]))
    cases = [(*case, 1) for case in cases] + [(64, 6_144, 8)]
    measured = []
    for case in cases:
        command = [sys.executable, __file__, "--case", *map(str, case)]
        line = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        print(line, end="", flush=True)
        measured.append(Measured(**json.loads(line)))
    if options.markdown:
        print(table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
