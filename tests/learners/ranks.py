"""Runs a function on several gloo ranks: processes that a fork server starts quickly, as it has
imported torch already."""

import importlib
import multiprocessing
import os
import pickle
import tempfile
import traceback
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

# What ranks import: transformers takes a rank over a second, Megatron Core over two.
RANK_MODULES = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "pytest",
    "transformers.modeling_utils",
    "ratchet.algorithms.policy_gradient",
    "ratchet.algorithms.sft",
    "ratchet.learners.distributed.fsdp_models",
    "ratchet.learners.distributed.worker",
    "ratchet.models.transformers.multimodal_policy",
    "ratchet.testing.builders",
)
CONTEXT = multiprocessing.get_context("forkserver")
MEGATRON = ["ratchet.learners.megatron.learner"] if find_spec("megatron") else []
CONTEXT.set_forkserver_preload([*RANK_MODULES, *MEGATRON, "support.frozen_imports"])


def run_ranks(world, target, *arguments, timeout_s=600):
    """The results by rank of `target` ("module:function"), called with (rank, *arguments)."""
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        receivers, processes = [], []
        for rank in range(world):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_serve, args=(rank, world, store, target, arguments, sender), daemon=True
            )
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            results = [
                _receive(rank, receiver, timeout_s) for rank, receiver in enumerate(receivers)
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()
    broken = [result[1] for result in results if result[0] == "error"]
    assert not broken, "\n".join(broken)
    return [result[1] for result in results]


def _receive(rank, receiver, timeout_s):
    if not receiver.poll(timeout_s):
        return "error", f"rank {rank} said nothing for {timeout_s} s"
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return "error", f"rank {rank} died"


def _serve(rank, world, store, target, arguments, sender):
    import torch
    import torch.distributed as dist

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=world,
            init_method=f"file://{store}",
            timeout=timedelta(seconds=60),
        )
        module, _, name = target.partition(":")
        result = getattr(importlib.import_module(module), name)(rank, *arguments)
        # as bytes: torch would send tensors by a server in this process
        sender.send_bytes(pickle.dumps(("done", result)))
    except BaseException:
        sender.send_bytes(pickle.dumps(("error", f"rank {rank}:\n{traceback.format_exc()}")))
    sender.close()
