"""What the tests of the real vLLM do with it, each in a process of its own.

vLLM changes the process that it starts in, and two engines one after the other disturb each other.
By hand: `call_in_fork` of `command_line.py` with `run` and the words of a play.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from generators.direct_link import DirectWeightSync
from support.vllm_preload import fork_engines

from ratchet.config.experience import ParityConfig
from ratchet.config.loader import load_config
from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.errors import ConfigError, DataError, ModelError, WeightSyncError
from ratchet.executors import env_vars
from ratchet.experience.checks.logprob_parity import ParityGate, ParityPair
from ratchet.generators.config import VLLMConfig
from ratchet.generators.vllm import device_memory
from ratchet.generators.vllm import generator as vllm_generator
from ratchet.generators.vllm.device_memory import DeviceCarrier
from ratchet.generators.vllm.generator import VLLMGenerator
from ratchet.generators.vllm.transfer import call_workers
from ratchet.generators.vllm.weights import PushReader
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.decoder import Decoder
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.files import save_adapter
from ratchet.models.policy import DecoderPolicy
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.protocols import Shard, WeightSync
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.conformance import check_generator
from ratchet.training.from_config import build_executor, build_policy, start_processes
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run
from ratchet.types import Sampling, StopReason
from ratchet.utils.temp_dirs import OWNER_FILE
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver, WeightSender
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

PROMPTS = [[1, 2, 3], [4] * 40, list(range(5, 60)), [7, 7, 8]]


class Numbers:
    """Token i reads "i,"."""

    def decode(self, ids):
        return "".join(f"{i}," for i in ids)


class Weights:
    """As much of a learner as a link needs."""

    def __init__(self, policy):
        self.policy = policy

    def weights(self):
        for name, tensor in self.policy.canonical_weights():
            yield Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def policy(*, tied=True, seed=0):
    shape = DecoderConfig(67, 64, 2, 4, 2, 32, 96, max_positions=256, init_std=0.2, tied=tied)
    return DecoderPolicy(Decoder(shape).init_weights(seed))


def shake(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@asynccontextmanager
async def started(model, engine, *, tokenizer=None, **keys):
    config = VLLMConfig(
        engine=engine, kv_cache_gib=0.05, enforce_eager=True, max_running=16, **keys
    )
    shared = set(Path("/dev/shm").glob("*-cpushm_*"))  # between the workers of a divided model
    with env_vars.set_env_defaults(config.environment):
        generator = VLLMGenerator(config, model, tokenizer or Numbers())
    try:
        yield generator
    finally:
        await generator.close()
        left = [
            path for path in Path("/dev/shm").glob("ratchet-vllm-*") if path == generator._directory
        ]
        left += set(Path("/dev/shm").glob("*-cpushm_*")) - shared
        assert not left, "files are left"
        assert not children(), f"processes are left: {children()}"


def children():
    """Of this process, whatever depth; Python's own tracker of shared memory ends with it."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            found[int(stat.parent.name)] = (
                parent,
                (stat.parent / "cmdline").read_text().replace("\0", " "),
            )
        except OSError:
            continue
    below = {os.getpid()}
    for _ in range(4):
        below |= {pid for pid, (parent, _) in found.items() if parent in below}
    return [
        found[pid][1] for pid in below - {os.getpid()} if "resource_tracker" not in found[pid][1]
    ]


def expected(model, prompt, completion, temperature=1.0):
    tokens = torch.tensor([*prompt, *completion.tokens.tolist()])
    with torch.no_grad():
        hidden = model.hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
        logits = model.logits(hidden)[len(prompt) - 1 : -1] / temperature
    return (
        logits.log_softmax(-1).gather(1, torch.from_numpy(completion.tokens)[:, None])[:, 0].numpy()
    )


def furthest(model, prompts, completions, temperature=1.0):
    pairs = zip(prompts, completions, strict=True)
    return max(
        float(np.abs(expected(model, p, c, temperature) - c.logprobs).max()) for p, c in pairs
    )


async def all_of(generator, sampling, prompts=PROMPTS):
    return await asyncio.gather(*(generator.generate(prompt, sampling) for prompt in prompts))


async def conforms(engine):
    model = policy()
    sampling = Sampling(max_new_tokens=24, seed=3)
    async with started(model, engine) as generator:
        start = generator._directory / "start"
        # processes that say they are ready still read it
        assert start.exists() == (engine == "async")
        await check_generator(generator, PROMPTS)
        assert not start.exists()

        first = await generator.generate([1, 2, 3], sampling)
        assert first.stop is StopReason.LENGTH
        assert len(first.tokens) == 24
        alone = first.tokens.tolist()
        several = await all_of(generator, sampling, [[1, 2, 3], [9, 8], [1, 2, 3, 4]])
        assert several[0].tokens.tolist() == alone, "neighbours changed a request's draws"
        other = await generator.generate([1, 2, 3], replace(sampling, seed=4))
        assert other.tokens.tolist() != alone
        greedy = await generator.generate([1, 2, 3], replace(sampling, temperature=0.0))
        assert furthest(model, [[1, 2, 3]], [greedy]) < 1e-4
        cold = await generator.generate([1, 2, 3], replace(sampling, temperature=0.7))
        assert furthest(model, [[1, 2, 3]], [cold], 0.7) < 1e-4

        text = f"{alone[4]},{alone[5]},"
        string = await generator.generate([1, 2, 3], replace(sampling, stop=(text,)))
        assert string.stop is StopReason.STOP_STRING
        assert string.tokens.tolist() == alone[: len(string.tokens)]
        assert text in Numbers().decode(string.tokens.tolist())
        assert text not in Numbers().decode(string.tokens.tolist()[:-1])
        assert len(string.versions) == len(string.tokens)

        full = await generator.generate([5] * 250, sampling)
        assert full.stop is StopReason.CONTEXT
        assert len(full.tokens) == 6
        none = await generator.generate([5] * 256, sampling)
        assert none.stop is StopReason.CONTEXT
        assert not len(none.tokens)
        for sampling_or_prompt, error in [
            (([5] * 257, sampling), DataError),
            (([67], sampling), DataError),
            (([1], replace(sampling, temperature=0.001)), ConfigError),
        ]:
            with pytest.raises(error):
                await generator.generate(*sampling_or_prompt)
        await halts_and_aborts(generator, model, sampling)


async def halts_and_aborts(generator, model, sampling):
    # so that pieces come, and can be counted
    long = replace(sampling, max_new_tokens=200, stop=("nothing says this",))
    whole = await all_of(generator, long)
    tasks = [asyncio.create_task(generator.generate(prompt, long)) for prompt in PROMPTS]
    await until_some(generator, 3)
    await generator.pause()
    late = asyncio.create_task(generator.generate([1, 2], long))
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in [*tasks, late])
    await generator.resume()
    for task, reference in zip(tasks, whole, strict=True):
        assert (await task).tokens.tolist() == reference.tokens.tolist(), (
            "a pause changed a running request"
        )
    await late

    await generator.offload()
    asleep = asyncio.create_task(generator.generate(PROMPTS[0], long))
    await asyncio.sleep(0.3)
    assert not asleep.done()
    await generator.onload()
    assert (await asleep).tokens.tolist() == whole[0].tokens.tolist()

    tasks = [asyncio.create_task(generator.generate(prompt, long)) for prompt in PROMPTS]
    await until_some(generator, 3)
    tasks[0].cancel()
    generator.abort()
    fresh = asyncio.create_task(generator.generate([3, 3], sampling))
    cancelled, *partial = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    for completion, reference in zip(partial, whole[1:], strict=True):
        assert completion.stop is StopReason.ABORTED
        assert 0 < len(completion.tokens) < 200
        assert completion.tokens.tolist() == reference.tokens[: len(completion.tokens)].tolist()
        assert len(completion.versions) == len(completion.tokens)
    assert (await fresh).stop is StopReason.LENGTH, "a request after the abort was aborted too"
    unstarted = asyncio.create_task(generator.generate([3, 4], long))
    await asyncio.sleep(0)
    generator.abort()
    assert (await unstarted).stop is StopReason.ABORTED


async def until_some(generator, count):
    """Every running request has so many tokens."""

    def fed(request):
        return len(request.stop_strings.window)

    while len(running(generator)) < len(PROMPTS) or min(map(fed, running(generator))) < count:
        await asyncio.sleep(0.001)


def running(generator):
    core = generator.core
    return (
        list(core._requests.values())
        if hasattr(core, "_requests")
        else [a.request for a in core._partials.values()]
    )


async def pushes(engine, tied, *parallel):
    """parallel: "data_parallel=2" and the like."""
    model = policy(tied=tied == "tied")
    learner = Weights(model)
    sampling = Sampling(max_new_tokens=24, seed=3)
    sizes = {name: int(size) for name, size in (one.split("=") for one in parallel)}
    async with started(model, engine, **sizes) as generator:
        old = await all_of(generator, sampling)
        assert furthest(model, PROMPTS, old) < 1e-4
        link = DirectWeightSync(learner, generator)
        for version in (1, 2):
            shake(model, version)
            stale = await all_of(generator, sampling)
            assert furthest(model, PROMPTS, stale) > 0.1, (
                "the learner's weights reached vLLM by themselves"
            )
            await link.push(version)
            new = await all_of(generator, sampling)
            assert furthest(model, PROMPTS, new) < 1e-4
            assert furthest(model, PROMPTS, stale) > 0.1
            assert all((c.versions == version).all() for c in new)
        good = [torch.clone(parameter.detach()) for parameter in model.parameters()]
        shake(model, 5)
        await refused_pushes(generator, learner)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), good, strict=True):
                parameter.copy_(value)
        again = await all_of(generator, sampling)
        assert furthest(model, PROMPTS, again) < 1e-4, "a failed push changed the weights"
        assert all((c.versions == 2).all() for c in again)
        shake(model, 6)
        await in_pieces(generator, learner)
        new = await all_of(generator, sampling)
        assert furthest(model, PROMPTS, new) < 1e-4
        assert generator.version == 3
        if engine == "sync" or tied == "untied":
            await fails_while_loading(generator, learner, model, sampling)


async def pushes_through_memory(engine):
    """Through a buffer that workers map, as on an accelerator: a file, which processes can map on a
    CPU, takes the place of CUDA IPC, and all else is the real code in the real workers."""
    with tempfile.TemporaryDirectory() as folder:
        switches = Switches(Path(folder))
        pretend_device_memory(switches)
        switches.set("unmappable")
        model = policy(tied=False)
        async with started(model, engine) as generator:
            await pushes_what_is_mapped(generator, model, switches)


class Switches:
    """Faults that workers, which are forks of this process, find as files."""

    def __init__(self, folder):
        self.folder = folder

    def set(self, name, on=True):
        path = self.folder / name
        path.touch() if on else path.unlink()

    def is_set(self, name):
        return (self.folder / name).exists()


def pretend_device_memory(switches):
    path, weights = switches.folder / "memory", PushReader.weights

    def allocate(n_bytes, device):
        path.write_bytes(bytes(n_bytes))
        return torch.from_file(str(path), shared=True, size=n_bytes, dtype=torch.uint8)

    def map_memory(handle):
        if switches.is_set("unmappable"):
            raise ModelError("the accelerator isn't visible")
        return torch.from_file(str(path), shared=True, size=handle["n_bytes"], dtype=torch.uint8)

    def break_off(reader):
        for index, pair in enumerate(weights(reader)):
            if index == 9 and switches.is_set("breaks off"):
                raise RuntimeError("disk on fire")
            yield pair

    device_memory.can_export = lambda tensor: True
    device_memory.allocate_memory = allocate
    device_memory.export_memory = lambda bytes_n: {"n_bytes": len(bytes_n), "memory": b"\0\xff"}
    device_memory.map_memory = map_memory
    PushReader.weights = break_off
    vllm_generator.choose_transfer = lambda *arguments, **keywords: "auto"


async def pushes_what_is_mapped(generator, model, switches):
    sampling = Sampling(max_new_tokens=24, seed=3)
    link = DirectWeightSync(Weights(model), generator)
    device, choice = generator._weight_writer, generator._carriers

    async def serves(version):
        completions = await all_of(generator, sampling)
        assert furthest(model, PROMPTS, completions) < 1e-4
        assert all((c.versions == version).all() for c in completions)

    shake(model, 1)
    await link.push(1)
    await serves(1)
    assert choice.kind == "file", "workers that can't map the memory get a file"
    switches.set("unmappable", on=False)
    choice.kind = "ipc"
    for version in (2, 3):
        shake(model, version)
        await link.push(version)
        await serves(version)
        assert isinstance(device.carrier, DeviceCarrier)
        assert [path.name for path in generator._directory.iterdir()] == [OWNER_FILE]

    good = [parameter.detach().clone() for parameter in model.parameters()]
    shake(model, 4)
    await generator.prepare({})
    await generator.receive(Weights(model).weights())
    device.carrier.bytes_n[1000] ^= 1
    await refuses(generator.commit(4), "refused by 1 .* checksum")
    await generator.rollback()
    # Checked and dropped, as where another worker refuses it.
    await generator.receive(Weights(model).weights())
    await call_workers(generator.core, "check_push", generator._weight_writer.build_manifest())
    await generator.rollback()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), good, strict=True):
            parameter.copy_(value)
    await serves(3)

    switches.set("breaks off")
    shake(model, 5)
    await refuses(link.push(5), "disk on fire")
    await refuses(generator.generate([1], sampling), "push again")
    switches.set("breaks off", on=False)
    await link.push(6)
    await serves(6)


async def adapters(engine):
    """Behind a base that comes once, the adapter alone: new tokens are its own, to the learner's
    logprobs; what was damaged on the way leaves the one before."""
    adapter = Adapter(LoRAConfig(rank=3, alpha=4.0, rslora=True), seed=5)
    model = policy(seed=2)
    model.attach(adapter)
    learner = LocalLearner(LocalConfig(), model, optimizer=OptimizerConfig(), total_steps=1)
    sampling = Sampling(max_new_tokens=24, seed=3)
    async with started(policy(), engine, lora_rank=3) as generator:
        link = SharedMemoryWeightSync(
            LocalRank(WeightSender(learner)), LocalRank(WeightReceiver(generator)), adapter=adapter
        )
        await link.push(1)
        assert furthest(model, PROMPTS, await all_of(generator, sampling)) < 1e-4
        everything = link.sent_bytes
        for version in (2, 3):
            shake_adapter(model, version)
            long = asyncio.create_task(
                generator.generate(PROMPTS[0], replace(sampling, max_new_tokens=200))
            )
            while not running(generator):
                await asyncio.sleep(0)
            await link.push(version)
            assert link.sent_bytes < everything / 2
            completions = await all_of(generator, sampling)
            assert furthest(model, PROMPTS, completions) < 1e-4
            assert {int(v) for completion in completions for v in completion.versions} == {version}
            assert (await long).versions[-1] == version
        await damaged_adapter(generator, link, model, sampling)
        group = make_group(
            "g", [sampled(prompt, c) for prompt, c in zip(PROMPTS, completions, strict=True)]
        )
        numbers = await ParityGate(ParityPair(learner, generator, link, {}), ParityConfig()).check(
            pack([group]), version=3
        )
        assert numbers["max"] < 1e-4
        await refuses(
            generator.prepare({"adapter": Adapter(LoRAConfig(rank=9))}), "generator.lora_rank=9"
        )
        await link.close()


async def several_adapters(engine):
    """Requests of one batch have the policy's adapter, others by name, or none: each gets the
    logprobs of its own, before and after pushes of the base and of the policy's adapter, and
    whatever the base's shape is."""
    own = Adapter(LoRAConfig(rank=3, alpha=4.0, rslora=True), seed=5)
    models = {name: policy(seed=2) for name in (None, "base", "one", "two")}
    models[None].attach(own)
    models["one"].attach(Adapter(LoRAConfig(rank=2, alpha=6.0), seed=6))
    models["two"].attach(
        Adapter(LoRAConfig(rank=1, alpha=2.0, target_modules=("v_proj", "down_proj")), seed=7)
    )
    for seed, name in enumerate((None, "one", "two")):
        shake_adapter(models[name], seed)
    learner = LocalLearner(LocalConfig(), models[None], optimizer=OptimizerConfig(), total_steps=1)
    async with started(policy(), engine, lora_rank=3, lora_others=2) as generator:
        with tempfile.TemporaryDirectory() as directory:
            for name in ("one", "two"):
                write_adapter(models[name], Path(directory) / name)
            await generator.add_adapter("one", Path(directory) / "one")
            await refuses(
                generator.add_adapter("one", Path(directory) / "one"),
                "'one' is taken by another adapter",
            )
            link = SharedMemoryWeightSync(
                LocalRank(WeightSender(learner)), LocalRank(WeightReceiver(generator)), adapter=own
            )
            await link.push(1)
            long = asyncio.create_task(
                generator.generate(PROMPTS[0], Sampling(max_new_tokens=200, adapter="one"))
            )
            while not running(generator):
                await asyncio.sleep(0)
            await generator.add_adapter("two", Path(directory) / "two")
            await refuses(
                generator.add_adapter("three", Path(directory) / "two"), "generator.lora_others=3"
            )
        await each_has_its_own(generator, models)
        shake_adapter(models[None], 10)
        await link.push(2)
        await each_has_its_own(generator, models)
        assert furthest(models["one"], PROMPTS[:1], [await long]) < 1e-4, (
            "a push or another adapter changed a running request"
        )
        with pytest.raises(ConfigError, match="no adapter 'three': it serves base, one, two"):
            await generator.generate(PROMPTS[0], Sampling(adapter="three"))
        await link.close()


async def each_has_its_own(generator, models):
    requests = [(name, prompt) for prompt in PROMPTS for name in models]
    sampling = Sampling(max_new_tokens=24, seed=3)
    completions = await asyncio.gather(
        *(generator.generate(p, replace(sampling, adapter=name)) for name, p in requests)
    )
    for (name, prompt), completion in zip(requests, completions, strict=True):
        assert furthest(models[name], [prompt], [completion]) < 1e-4, name
        others = [model for other, model in models.items() if other != name]
        assert min(furthest(model, [prompt], [completion]) for model in others) > 1e-2, name


def write_adapter(model, directory):
    save_adapter(
        directory,
        model.adapter,
        model.resolve_adapter_layers(model.adapter.lora),
        dict(model.adapter_weights()),
    )


async def damaged_adapter(generator, link, model, sampling):
    before = [parameter.detach().clone() for _, parameter in model.trained_parameters()]
    shake_adapter(model, 9)
    write = generator._adapters.write

    def damaged():
        path, checksum = write()
        with (path / "adapter_model.safetensors").open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\x00\x01\x02\x03")
        return path, checksum

    generator._adapters.write = damaged
    with pytest.raises(WeightSyncError, match="checksum"):
        await link.push(4)
    generator._adapters.write = write
    with torch.no_grad():
        for (_, parameter), old in zip(model.trained_parameters(), before, strict=True):
            parameter.copy_(old)
    assert furthest(model, PROMPTS, await all_of(generator, sampling)) < 1e-4


def shake_adapter(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in model.trained_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def sampled(prompt, completion):
    tokens, logprobs = completion.tokens.tolist(), completion.logprobs.tolist()
    return make_trajectory(prompt, tokens, logprobs=logprobs, version=3, reward=1.0)


async def refused_pushes(generator, learner):
    async def corrupt():
        with generator._weight_writer.carrier.path.open("r+b") as file:
            file.seek(1000)
            file.write(b"\xff\x00\xff\x00")

    async def cut_off():
        os.truncate(generator._weight_writer.carrier.path, 1000)

    async def gone():
        generator._weight_writer.carrier.path.unlink()

    for damage in (corrupt, cut_off, gone):
        await generator.prepare({})
        await generator.receive(learner.weights())
        await damage()
        await refuses(generator.commit(9), "refused by")
        await generator.rollback()
    shards = list(learner.weights())
    await generator.prepare({})
    await generator.receive(iter(shards[:-1]))
    await refuses(generator.commit(9), "missing")
    await generator.rollback()
    await refuses(
        generator.receive(iter([replace(shards[0], name="model.other")])), "none of that name"
    )
    await refuses(generator.receive(iter([replace(shards[0], shape=(1, 2))])), "shape")
    await generator.rollback()
    assert [path.name for path in generator._directory.iterdir()] == [OWNER_FILE]


async def refuses(push, reason):
    with pytest.raises(ModelError, match=reason):
        await push


async def in_pieces(generator, learner):
    """As ranks of a sharded learner send them."""

    def halves():
        for shard in learner.weights():
            for rank, piece in enumerate(shard.tensor.chunk(2)):
                offset = rank * len(shard.tensor.chunk(2)[0])
                yield Shard(shard.name, shard.shape, (offset, *shard.offsets[1:]), piece)

    pieces = list(halves())
    await generator.prepare({})
    await generator.receive(iter(pieces[::2]))
    await generator.receive(iter(pieces[1::2]))
    await generator.commit(3)


async def fails_while_loading(generator, learner, model, sampling):
    """What the checks can't foresee: the generator says so instead of serving a mixture, and the
    next push mends it."""
    call = generator.core.call
    long = asyncio.create_task(
        generator.generate(PROMPTS[0], replace(sampling, max_new_tokens=200))
    )

    async def broken(method, *arguments):
        return ["disk on fire"] if method == "apply_push" else await call(method, *arguments)

    while not running(generator):
        await asyncio.sleep(0)
    generator.core.call = broken
    await refuses(DirectWeightSync(learner, generator).push(4), "disk on fire")
    generator.core.call = call
    assert (await long).stop is StopReason.ABORTED
    await refuses(generator.generate([1], sampling), "push again")
    await DirectWeightSync(learner, generator).push(5)
    assert furthest(model, PROMPTS, await all_of(generator, sampling)) < 1e-4


async def pushes_in_flight(engine, keep_kv=""):
    """Tokens before the commit are the old weights', those after it the new ones', to the token."""
    model, old = policy(), policy()
    sampling = Sampling(max_new_tokens=200, seed=3, stop=("nothing says this",))
    async with started(model, engine, keep_kv=keep_kv == "keep_kv") as generator:
        tasks = [asyncio.create_task(generator.generate(prompt, sampling)) for prompt in PROMPTS]
        await until_some(generator, 5)
        shake(model, 1)
        await DirectWeightSync(Weights(model), generator).push(7)
        completions = await asyncio.gather(*tasks)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert len(completion.tokens) == 200
            switch = int((completion.versions == 0).sum())
            assert 0 < switch < 200
            assert completion.versions.tolist() == [0] * switch + [7] * (200 - switch)
            by_old = np.abs(expected(old, prompt, completion) - completion.logprobs)
            by_new = np.abs(expected(model, prompt, completion) - completion.logprobs)
            assert by_old[:switch].max() < 1e-4
            if keep_kv:
                assert by_new[switch:].max() > 1e-2, "old keys would have shown"
            else:
                assert by_new[switch:].max() < 1e-4
            assert by_old[switch:].max() > 1e-2
        fresh = await all_of(generator, replace(sampling, max_new_tokens=20))
        assert furthest(model, PROMPTS, fresh) < 1e-4, (
            "a new request found old keys in the prefix cache"
        )


RECIPE = """
threads: 1
device: cpu
seed: 3
model: {preset: tiny}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 4}
sampling: {temperature: 0.7, max_new_tokens: 5}
evaluation: {tasks: 256}
batch_size: 64
stages:
  - {name: sft, algorithm: {kind: sft}, steps: 25, optimizer: {lr: 2e-3, warmup_steps: 5}}
  - {name: grpo, algorithm: {kind: grpo, group_size: 8, equal_rewards: drop}, steps: 40, optimizer: {lr: 3e-4, warmup_steps: 3}}
"""


async def trains_as_the_engine_does():
    """Both start from the same weights and see the same tasks; their draws differ."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE)
        ours = await accuracies(load_config(recipe))
        vllm = ["generator.kind=vllm", "generator.kv_cache_gib=0.1", "generator.enforce_eager=true"]
        theirs = await accuracies(load_config(recipe, vllm))
    sys.stdout.write(f"engine {ours}, vLLM {theirs}\n")
    assert theirs[0] == ours[0], "after the supervised stage the weights are equal"
    assert theirs[1] > theirs[0] + 0.07
    assert abs(theirs[1] - ours[1]) < 0.1


async def takes_turns():
    """With the learner, on what would be one accelerator: it sleeps whenever the learner works,
    which changes nothing."""
    more = [
        "generator.kind=vllm",
        "generator.kv_cache_gib=0.1",
        "generator.enforce_eager=true",
        "stages.sft.steps=5",
    ]
    more += ["stages.grpo.steps=3", "evaluation.tasks=16"]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE)
        apart = await rewards(load_config(recipe, more))
        for learner in ("local", "megatron"):
            turns = ["cluster.colocated=true", f"learner.kind={learner}"]
            together = await rewards(load_config(recipe, [*more, *turns]))
            # vLLM's sums depend on who else is in a batch
            assert together == pytest.approx(apart, abs=0.05), learner
        ahead = ["stages.grpo.rollouts={max_staleness: 2, order: ready}"]
        ahead += ["stages.grpo.sampling={max_new_tokens: 30}"]
        found = await rewards(load_config(recipe, [*more, "cluster.colocated=true", *ahead]))
        assert len(found) == len(apart), "interrupted by each update, and gone on with"


async def rewards(config):
    found = []
    executor = build_executor(config)
    made = start_processes(config, executor, build_policy(config))
    sleeps, sleep = [], made.generator.offload

    async def counted():
        sleeps.append(made.generator.version)
        await sleep()

    made.generator.offload = counted
    try:
        for index in range(len(config.stages)):
            run = build_run(
                config,
                index,
                made,
                observers=[lambda step, numbers: found.append(numbers.get("rollout/reward"))],
            )
            await train(run)
            await run.close()
    finally:
        await made.close()
        executor.close()
    assert len(set(sleeps)) == (5 if config.cluster.colocated else 0), sleeps
    return found[5:]


async def accuracies(config):
    """Greedy, after each stage."""
    made = build_policy(config)
    found = []
    try:
        for index in range(len(config.stages)):
            run = build_run(config, index, made)
            if not made.generator.shares_weights:
                run = replace(run, weight_sync=Compared(run.weight_sync, made))
            await train(run)
            found.append(run.progress.accuracy)
    finally:
        await made.close()
    return found


class Compared(WeightSync):
    """A link that holds the sampler to the learner after every push."""

    def __init__(self, link, policy):
        self.weight_sync, self.policy = link, policy

    async def push(self, version):
        await self.weight_sync.push(version)
        prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 10]]
        sampled = await all_of(
            self.policy.generator, Sampling(max_new_tokens=8, seed=version), prompts
        )
        assert furthest(self.policy.model, prompts, sampled) < 1e-4
        assert all((completion.versions == version).all() for completion in sampled)


async def pushes_experts():
    """Of a mixture of experts, whose weights the model of transformers names otherwise than its
    files."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    made = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=67, max_position_embeddings=256, **shape, **experts)
    )
    model = TransformersPolicy(made.eval())
    shake(model, 0)
    sampling = Sampling(max_new_tokens=24, seed=3)
    async with started(model, "sync") as generator:
        assert furthest(model, PROMPTS, await all_of(generator, sampling)) < 1e-4
        for version in (1, 2):
            shake(model, version)
            await DirectWeightSync(Weights(model), generator).push(version)
            assert furthest(model, PROMPTS, await all_of(generator, sampling)) < 1e-4


async def fails_to_start(engine):
    """The model directory can't be loaded; nothing is left behind."""
    model = policy()
    save = model.save
    folders = []

    def damaged(directory):
        folders.append(directory.parent)
        save(directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))

    model.save = damaged
    with pytest.raises(Exception, match="nitialization failed" if engine == "async" else "size"):
        async with started(model, engine):
            raise AssertionError("it started")
    assert not children(), children()
    assert [folder.exists() for folder in folders] == [False]


async def routes():
    """vLLM's own reason why its builds for CPUs return no routes of experts."""
    shape = DecoderConfig(
        67,
        64,
        2,
        4,
        2,
        32,
        96,
        family="qwen3_moe",
        n_experts=4,
        experts_per_token=2,
        expert_intermediate_size=64,
    )
    model = DecoderPolicy(Decoder(shape).init_weights(0))
    arguments = {"enable_return_routed_experts": True}
    with pytest.raises(ModelError, match="needs Triton"):
        async with started(model, "async", arguments=arguments):
            pass
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder))
        engine_args = import_module("vllm.engine.arg_utils").EngineArgs(model=folder, **arguments)
        with (
            env_vars.set_env_defaults({"VLLM_USE_V2_MODEL_RUNNER": "1"}),
            pytest.raises(ValueError, match="requires Triton"),
        ):
            engine_args.create_engine_config()


def is_killed():
    """A driver in a process of its own is killed, and vLLM's processes end."""
    reading, writing = os.pipe()
    driver = os.fork()
    if not driver:
        signal.alarm(300)
        asyncio.run(says_its_processes(writing))
    os.close(writing)
    with os.fdopen(reading) as said:
        pids = json.loads(said.readline())
    assert len(pids) >= 2
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    deadline = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, "vLLM's processes outlive the one that started them"
        time.sleep(0.1)


async def says_its_processes(writing):
    async with started(policy(), "async") as generator:
        await generator.generate([1], Sampling(max_new_tokens=2))
        pids = [
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _descends(path)
        ]
        os.write(writing, json.dumps(pids).encode() + b"\n")
        await asyncio.sleep(600)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _descends(path):
    try:
        pid = int(path.parent.name)
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if pid == os.getpid():
                return True
    except OSError:
        return False
    return False


def play(plays, words):
    """Run what the words name, of a module's globals. "spawned", the last of them, makes vLLM's
    processes fresh interpreters, as they are for users."""
    *words, last = words
    if last != "spawned":
        fork_engines()
        words.append(last)
    warnings.simplefilter("ignore")
    signal.alarm(390)  # a hang ends here, with a report of where
    import faulthandler

    faulthandler.dump_traceback_later(380)
    playing = plays[words[0]](*words[1:])
    if playing is not None:
        asyncio.run(playing)
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    sys.stdout.write("fine\n")


def run(words):
    play(globals(), words)
