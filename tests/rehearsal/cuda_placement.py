"""Which accelerator belongs to which process and thread."""

import asyncio
from typing import Any

import pytest
import torch

from ratchet.config.loader import load_config
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.resolve import resolve
from ratchet.errors import ConfigError, ModelError
from ratchet.executors.freeze import freeze
from ratchet.executors.local import LocalExecutor
from ratchet.generators.vllm.device_memory import DeviceCarrier
from ratchet.generators.vllm.transfer import CarrierChoice, count_push_bytes
from ratchet.generators.vllm.weights import FileCarrier, PushReader, PushWriter
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.load import init_policy
from ratchet.protocols import Shard
from ratchet.training.from_config import build_executor, build_policy, start_processes
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver
from ratchet.weight_sync.factory import SyncEndpoints, make_weight_sync

RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: arithmetic}
algorithm: {kind: grpo}
device: cuda
threads: 1
"""
WORKERS = "generator={kind: workers, workers: 1, worker: {kind: engine}}"


@pytest.fixture(autouse=True)
def first_device():
    yield
    torch.cuda.set_device(0)


@pytest.fixture
def make_config(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return lambda *overrides: freeze(load_config(path, overrides))


def get_devices_of(policy):
    return {str(parameter.device) for parameter in policy.model.parameters()}


@pytest.mark.parametrize("index", [0, 1])
def test_a_generator_worker_gets_the_accelerator_that_the_driver_does_not_use(
    index, make_config, monkeypatch
):
    config = make_config(f"device=cuda:{index}", WORKERS)
    executor = build_executor(config)
    assert isinstance(executor, LocalExecutor)
    monkeypatch.setattr("ratchet.training.from_config.start_generators", lambda *arguments: None)
    policy = build_policy(config)
    start_processes(config, executor, policy)
    assert get_devices_of(policy) == {f"cuda:{index}"}
    assert torch.cuda.current_device() == index
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "it plans each new shape"
    bundles = {role: executor.cluster.bundles(role) for role in ("driver", "generator")}
    visible = {role: bundle.visible_devices for role, (bundle,) in bundles.items()}
    assert visible == {"driver": str(index), "generator": str(1 - index)}


def test_a_device_that_the_cluster_leaves_out_is_refused(make_config):
    config = make_config("cluster.devices=[1]", WORKERS)
    with pytest.raises(ConfigError, match=r"device=cuda is accelerator 0, .* Set device=cuda:1"):
        start_processes(config, build_executor(config), build_policy(config))


@pytest.mark.parametrize(
    ("generator", "expected"),
    [("generator.kind=engine", "cuda:0"), (WORKERS, "cpu"), ("generator.kind=vllm", "cpu")],
)
def test_the_model_of_ranks_is_not_on_the_drivers_accelerator_too(
    generator, expected, make_config, monkeypatch
):
    monkeypatch.setattr("ratchet.training.stage.build", lambda *arguments, **options: None)
    config = make_config("learner.kind=dtensor", generator)
    assert get_devices_of(build_policy(config)) == {expected}


class CurrentDevice:
    def get(self):
        return torch.empty(0, device="cuda").device.index


def test_helper_threads_have_the_device_of_their_callers():
    torch.cuda.set_device(1)
    component = CurrentDevice()
    assert asyncio.run(LocalRank(component).call("get")) == [1]
    receiver = WeightReceiver(generator=None)
    assert asyncio.run(receiver._run_in_thread(component.get)) == 1


class Receives:
    """Of a generator what a push calls."""

    version, adopted, shares_weights = 0, False, False

    async def prepare(self, manifest): ...

    async def receive(self, shards):
        self.shards = list(shards)

    async def commit(self, version):
        self.version = version

    async def rollback(self): ...


def test_a_learner_hands_its_own_tensors_to_a_generator_of_its_process(make_config):
    policy = build_policy(make_config())
    assert policy.is_on_accelerator
    generator = Receives()
    learner = LocalLearner(LocalConfig(), policy.model)
    endpoints = SyncEndpoints(learner, generator, on_accelerator=policy.is_on_accelerator)
    weight_sync = make_weight_sync(resolve("weight_sync", {}), endpoints)
    asyncio.run(weight_sync.push(1))
    places = {shard.name: shard.tensor.data_ptr() for shard in generator.shards}
    assert places == {name: w.data_ptr() for name, w in policy.model.canonical_weights()}
    assert generator.version == 1


def test_a_push_to_vllm_is_copied_and_compared_on_the_accelerator(tmp_path, caplog):
    weights = dict(
        init_policy(get_preset("tiny", vocab_size=8), seed=0, device="cuda:0").canonical_weights()
    )
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    n_bytes = count_push_bytes(weights, torch.bfloat16)
    buffer_n = torch.empty(n_bytes, dtype=torch.uint8, device="cuda:1")
    writer = PushWriter(DeviceCarrier(buffer_n, torch.bfloat16), shapes)
    writer.add(Shard(name, shapes[name], (0,) * w.dim(), w) for name, w in weights.items())
    manifest = writer.build_manifest()
    assert manifest is not None
    assert all(entry["checksum"].startswith("sums:") for entry in manifest["entries"].values())
    received = dict(PushReader.open_checked(manifest, buffer_n).weights())
    for name, weight in weights.items():
        assert received[name].device.index == 1
        assert torch.equal(received[name].cpu(), weight.cpu().bfloat16())
    buffer_n[4] ^= 1
    with pytest.raises(ModelError, match="checksum"):
        PushReader.open_checked(manifest, buffer_n)


def test_an_accelerator_without_shared_memory_pushes_through_files(tmp_path, caplog):
    choice = CarrierChoice("auto", FileCarrier(tmp_path, torch.bfloat16), 1024)
    tensor = torch.ones(2, device="cuda:0")
    core: Any = None  # nothing is sent to workers, as the pretended accelerator exports no memory
    assert asyncio.run(choice.choose(core, tensor)) is choice.file
    assert "weights are pushed to them through files" in caplog.text
