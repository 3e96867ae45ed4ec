"""Which accelerator belongs to which process and thread."""

import asyncio

import pytest
import torch

from ratchet.config.loader import load_config
from ratchet.errors import ConfigError
from ratchet.executors.freeze import freeze
from ratchet.executors.local import LocalExecutor
from ratchet.training.from_config import build_executor, build_policy, start_processes
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver

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
