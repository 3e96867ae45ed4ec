"""A Ray of several nodes, each with an address of its own on this machine: learners on two of them,
and generators whose node is lost and replaced while they work."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from ratchet.config.loader import load_config
from ratchet.training.from_config import build_executor, build_policy, start_processes
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run

RECIPE = """
threads: 1
device: cpu
seed: 3
model: {preset: tiny}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 3}
sampling: {temperature: 1.0, max_new_tokens: 4}
evaluation: {tasks: 0, every: 0}
batch_size: 64
stages:
  - {name: grpo, algorithm: {kind: grpo, group_size: 16}, steps: 9, optimizer: {lr: 3e-4, warmup_steps: 1}}
"""
SPARED, LOST = 2, 5  # after this many steps a node is lost, and another takes its place
NODE = {"num_cpus": 1, "object_store_memory": 128 * 2**20}


def play(config, after_step=lambda step, pool: None):
    """Metrics of each step, without times and counts of restarts."""
    executor = build_executor(config)
    policy = start_processes(config, executor, build_policy(config))
    found = []

    def observe(step, metrics):
        found.append({k: v for k, v in metrics.items() if k.startswith(("rollout/", "policy/"))})
        after_step(step, policy.generator)

    async def trained():
        run = build_run(config, 0, policy, observers=[observe])
        await train(run)
        await run.close()

    try:
        asyncio.run(trained())
    finally:
        asyncio.run(policy.close())
        executor.close()
    return found


def main():
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE)
        alone = play(load_config(recipe))
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        second = cluster.add_node(**NODE, node_ip_address="127.0.0.2")
        ray = f"cluster={{kind: ray, address: '{cluster.address}', nodes: 2, strategy: per_node}}"

        spread = play(load_config(recipe, [ray, "learner.kind=dtensor", "learner.dp_shard=2"]))
        for mine, theirs in zip(spread[:2], alone, strict=False):
            assert mine == {key: pytest.approx(theirs[key], rel=1e-4, abs=1e-5) for key in mine}

        present = []

        def change_nodes(step, pool):
            present.append(pool.present_receivers.size)
            if step == SPARED:
                cluster.remove_node(second, allow_graceful=False)
            if step == LOST:
                cluster.add_node(**NODE, node_ip_address="127.0.0.3")

        workers = "generator={kind: workers, workers: 2, worker: {kind: engine}, recovery: restart}"
        lost = play(load_config(recipe, [ray, workers]), change_nodes)
        sys.stdout.write(f"workers after each step: {present}\n")
        assert lost == alone
        assert present[:SPARED] == [2] * SPARED
        assert set(present[SPARED:LOST]) == {1}
        assert present[-1] == 2
        cluster.shutdown()


if __name__ == "__main__":
    main()
