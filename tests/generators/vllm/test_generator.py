"""What of the vLLM generator needs no vLLM: its section, the file of a push, the worker's methods,
the pieces of an answer."""

import asyncio
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from generators.direct_link import DirectWeightSync
from generators.vllm.test_fused_experts import pushed
from pydantic import ValidationError
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from ratchet.config.loader import load_config
from ratchet.config.lora import LoRAConfig
from ratchet.config.resolve import resolve
from ratchet.errors import ConfigError, MissingDependency, ModelError, RequestFailed, TrainingError
from ratchet.executors import env_vars
from ratchet.generators.config import VLLMConfig
from ratchet.generators.engine.stop_strings import StopStrings
from ratchet.generators.request import GenerationRequest
from ratchet.generators.vllm import device_memory, transfer
from ratchet.generators.vllm import generator as vllm
from ratchet.generators.vllm.engines import InProcessCore, MultiprocessCore
from ratchet.generators.vllm.generator import (
    VLLMGenerator,
    choose_dtype,
    explain_misfit,
    make_engine_arguments,
    warn_of_version,
)
from ratchet.generators.vllm.lora import check_expert_matrices
from ratchet.generators.vllm.requests import LoRARequests, PartialCompletion
from ratchet.generators.vllm.weights import FileCarrier, PushReader, PushWriter
from ratchet.generators.vllm.worker_extension import VLLMWorkerExtension
from ratchet.models.decoder import Decoder
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.files import save_adapter
from ratchet.models.policy import DecoderPolicy
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.protocols import Shard
from ratchet.testing.conformance import check_generator
from ratchet.testing.fakes import FakeGenerator
from ratchet.types import Sampling, StopReason
from ratchet.utils.temp_dirs import OWNER_FILE
from ratchet.weight_sync.factory import SyncEndpoints, make_weight_sync
from ratchet.weight_sync.in_process import SharedWeightSync
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

SHAPES = {"model.embed_tokens.weight": (6, 4), "model.norm.weight": (4,)}


def shards(scale=1.0):
    for name, shape in SHAPES.items():
        tensor = scale * torch.arange(float(np.prod(shape))).reshape(shape)
        yield Shard(name, shape, (0,) * len(shape), tensor)


@pytest.fixture
def outbox(tmp_path):
    return PushWriter(FileCarrier(tmp_path, torch.float32), SHAPES)


def test_another_release_of_vllm_is_warned_of(caplog):
    for version in ("0.32", "0.32.0", "0.32.1+cpu"):
        warn_of_version(version)
    assert not caplog.records
    for version in ("0.33.0", "0.3", "0.320.0", "dev"):
        warn_of_version(version)
    assert [record.args[0] for record in caplog.records] == ["0.33.0", "0.3", "0.320.0", "dev"]
    assert "pip install 'ratchet-rl[vllm]'" in caplog.text


# --- the section

ROUTES = {"arguments": {"enable_return_routed_experts": True}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": "sync", "tensor_parallel": 2},
        {"block_size": 24},
        {"kv_cache_gib": 0.0},
        {"dtype": "int8"},
        {**ROUTES, "engine": "sync"},
        {**ROUTES, "pipeline_parallel": 2},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValidationError):
        VLLMConfig(**wrong)


SHAPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "hidden_size": 64,
}


@pytest.mark.parametrize(
    ("keys", "shape", "reason"),
    [
        ({}, {}, None),
        ({"tensor_parallel": 4}, {}, None),  # a KV head is then held twice
        ({"tensor_parallel": 3}, {}, "tensor_parallel=3"),
        ({"pipeline_parallel": 3}, {}, "2 layers"),
        ({"pipeline_parallel": 2}, {}, "on a CPU"),
        ({}, {"head_dim": 16}, "head_dim=16"),
        ({}, {"head_dim": None}, "head_dim=16"),
        ({"block_size": 48}, {}, "block_size=48"),
        (ROUTES, {}, "needs Triton"),
        ({"lora_rank": 8}, {"num_experts": 4}, "with Triton"),
        ({"tensor_parallel": 3}, {"num_attention_heads": None}, None),
    ],
)
def test_a_model_that_vllm_cannot_run_is_refused(keys, shape, reason):
    found = explain_misfit(VLLMConfig(**keys), {**SHAPE, **shape}, on_cpu=True)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found
    assert explain_misfit(VLLMConfig(pipeline_parallel=2), SHAPE, on_cpu=False) is None
    assert (
        explain_misfit(VLLMConfig(), {"text_config": {**SHAPE, "head_dim": 16}}, on_cpu=False)
        is None
    )


RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
generator: {kind: vllm}
algorithm: {kind: grpo}
environment: {kind: arithmetic}
device: cpu
"""


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.overrides.head_dim=16", "head_dim=16"),
        ("generator.tensor_parallel=3", "tensor_parallel=3"),
        ("generator.engine=fast", "engine"),
    ],
)
def test_what_cannot_work_is_refused_with_the_recipe(tmp_path, override, named):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    assert load_config(recipe).stages[0].generator == VLLMConfig()
    with pytest.raises(ConfigError, match=named):
        load_config(recipe, [override])


def test_filters_are_refused_where_vllm_does_not_report_the_kept_mass(tmp_path, generation):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    overrides = ["sampling.top_p=0.9", "algorithm.correction={}"]
    load_config(recipe, overrides)
    speculation = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    with pytest.raises(ConfigError, match="if speculative decoding is off"):
        load_config(recipe, [*overrides, f"generator.arguments={speculation}"])

    def ask():
        asyncio.run(generation.generate([1], Sampling(top_p=0.9, max_new_tokens=1)))

    generation.core.llm.worker.prepare_sampler = lambda: False
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        ask()
    generation.config = VLLMConfig(arguments=speculation)
    with pytest.raises(ConfigError, match="speculative decoding"):
        ask()


def test_the_section_says_what_vllm_is_told(tmp_path):
    config = VLLMConfig(kv_cache_gib=0.5, tensor_parallel=2, dtype="bfloat16", block_size=64)
    dtype = choose_dtype(config, on_cpu=True)
    told = make_engine_arguments(config, tmp_path, dtype, 160, on_cpu=True)
    assert told["kv_cache_memory_bytes"] == 2**29
    assert (told["dtype"], told["max_model_len"], told["tensor_parallel_size"]) == (
        "bfloat16",
        160,
        2,
    )
    assert told["logprobs_mode"] == "processed_logprobs"
    on_gpu = make_engine_arguments(config, tmp_path, dtype, 160, on_cpu=False)
    assert on_gpu["gpu_memory_utilization"] < 0.1, "the learner's weights are there already"
    assert choose_dtype(VLLMConfig(), on_cpu=True) is torch.float32
    assert choose_dtype(VLLMConfig(), on_cpu=False) is torch.bfloat16


def test_settings_of_the_environment_end_with_the_start(monkeypatch):
    import os

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    before = dict(os.environ)
    with env_vars.set_env_defaults(VLLMConfig(engine="sync").environment):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG", "what the user has set goes first"
        os.environ["LD_PRELOAD"] = "libfast.so"
    assert dict(os.environ) == before


def test_without_vllm_the_extra_is_named(monkeypatch, decoder):
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"ratchet-rl\[vllm\]"):
        VLLMGenerator(VLLMConfig(), DecoderPolicy(decoder))


# --- a push


def test_a_push_arrives_restore_torch_state_sent_with_a_tied_head_twice(outbox):
    outbox.add(shards())
    inbox = PushReader.open(outbox.build_manifest())
    assert inbox.list_damaged() == []
    arrived = dict(inbox.weights())
    assert list(arrived) == [*SHAPES, "lm_head.weight"]
    for shard in shards():
        assert torch.equal(arrived[shard.name], shard.tensor)
    assert torch.equal(arrived["lm_head.weight"], arrived["model.embed_tokens.weight"])
    outbox.clear()
    assert not list(outbox.carrier.directory.iterdir())


def test_a_push_in_pieces_and_in_another_precision(outbox):
    outbox.carrier.dtype = torch.bfloat16
    for rank in range(2):
        outbox.add(
            Shard(
                s.name, s.shape, (rank * s.shape[0] // 2, *s.offsets[1:]), s.tensor.chunk(2)[rank]
            )
            for s in shards()
        )
    arrived = dict(PushReader.open(outbox.build_manifest()).weights())
    for shard in shards():
        assert torch.equal(arrived[shard.name], shard.tensor.bfloat16())


def test_an_incomplete_or_wrong_push_is_refused(outbox):
    assert outbox.build_manifest() is None
    embedding, norm = shards()
    outbox.add(iter([embedding]))
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        outbox.build_manifest()
    for wrong, reason in [
        (embedding, "twice"),
        (replace(norm, name="other"), "none of that name"),
        (replace(norm, shape=(5,)), "shape"),
    ]:
        with pytest.raises(ModelError, match=reason):
            outbox.add(iter([wrong]))
    outbox.clear()
    outbox.add(iter([replace(norm, tensor=norm.tensor[:2])]))
    with pytest.raises(ModelError, match="incomplete"):
        outbox.build_manifest()


class FakeTransferEngine:
    """As much of the engine of weight transfers as needs no vLLM."""

    checked_push = mapped_n = None

    def receive(self, manifest):
        self.checked_push = PushReader.open_checked(manifest, self.mapped_n)


class Loads(VLLMWorkerExtension):
    """Beside it, a worker of vLLM with one layer of experts."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        self.loaded = {}
        self.repacked = []
        self.weight_transfer_engine = FakeTransferEngine()
        self._weight_update_active = False
        self.experts = torch.nn.Linear(1, 1)
        self.experts.w13_weight = None
        fused = SimpleNamespace(process_weights_after_loading=self.repacked.append)
        self.experts.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=fused))
        self.model_runner = SimpleNamespace(
            get_model=lambda: torch.nn.Sequential(self.experts, torch.nn.Linear(1, 1)),
            reset_encoder_cache=lambda: None,
            reset_mm_cache=lambda: None,
        )

    def prepare_sampler(self):
        """It has no sampler."""

    def init_weight_transfer_engine(self, info):
        self.weight_transfer_engine.mapped_n = device_memory.map_offered(info["offer"])

    def start_weight_update(self):
        assert not self._weight_update_active, "vLLM refuses a second one"
        self._weight_update_active = True

    def update_weights(self, info):
        try:
            self.weight_transfer_engine.receive(info["manifest"])
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self):
        assert self._weight_update_active
        push, self.weight_transfer_engine.checked_push = (
            self.weight_transfer_engine.checked_push,
            None,
        )
        self._weight_update_active = False
        if push is not None:
            self.loaded = dict(push.weights())


def test_a_worker_loads_what_it_has_checked(outbox):
    worker = Loads()
    outbox.add(shards())
    assert "no push" in worker.apply_push(1)
    assert worker.check_push(outbox.build_manifest()) == ""
    assert not worker.loaded
    assert worker.apply_push(4) == ""
    assert torch.equal(worker.loaded["model.norm.weight"], torch.arange(4.0))
    assert worker.repacked == [worker.experts]
    assert worker.pushed_version == 4
    assert "no push" in worker.apply_push(5), "a push is loaded once"


def test_a_worker_drops_a_push_that_another_refused(outbox):
    worker = Loads()
    outbox.add(shards())
    assert worker.check_push(outbox.build_manifest()) == ""
    outbox.clear()
    outbox.add(shards(2.0))
    assert worker.check_push(outbox.build_manifest()) == ""
    assert not worker.loaded
    assert worker.apply_push(2) == ""
    assert torch.equal(worker.loaded["model.norm.weight"], 2 * torch.arange(4.0))


# --- the memory of an accelerator


@pytest.fixture
def device(monkeypatch):
    """Main memory in place of an accelerator's, which a worker in this process maps as it is."""
    buffers = []

    def allocate(n_bytes, device):
        buffers.append(torch.zeros(n_bytes, dtype=torch.uint8))
        return buffers[-1]

    monkeypatch.setattr(device_memory, "can_export", lambda tensor: True)
    monkeypatch.setattr(device_memory, "allocate_memory", allocate)
    monkeypatch.setattr(device_memory, "export_memory", lambda bytes_n: {"n_bytes": len(bytes_n)})
    monkeypatch.setattr(device_memory, "map_memory", lambda handle: buffers[-1])
    return buffers


class OneWorker:
    """The core of a generator with a worker in this process."""

    def __init__(self):
        self.worker = Loads()

    async def call(self, method, *arguments):
        return [getattr(self.worker, method)(*arguments)]


def test_a_push_through_memory_that_workers_map_is_compared_and_loaded(device, tmp_path):
    core = OneWorker()
    weights = {shard.name: shard.tensor for shard in shards()}
    n_bytes = transfer.count_push_bytes(weights, torch.bfloat16)
    choice = transfer.CarrierChoice("ipc", FileCarrier(tmp_path, torch.bfloat16), n_bytes)
    writer = PushWriter(choice.file, SHAPES)
    for scale in (1.0, 2.0):
        writer.clear()
        writer.carrier = asyncio.run(choice.choose(core, next(shards()).tensor))
        writer.add(shards(scale))
        assert core.worker.check_push(writer.build_manifest()) == ""
        assert core.worker.apply_push(1) == ""
        assert core.worker.loaded.keys() == {*SHAPES, "lm_head.weight"}
        for shard in shards(scale):
            assert torch.equal(core.worker.loaded[shard.name], shard.tensor.bfloat16())
    assert [len(buffer) for buffer in device] == [n_bytes], "it is allocated and mapped once"
    device[0][3] ^= 1
    assert "1 weights" not in core.worker.check_push(writer.build_manifest()), "the head is tied"
    assert "checksum" in core.worker.check_push(writer.build_manifest())
    assert not list(tmp_path.iterdir())


def test_memory_that_workers_can_not_map_gives_way_to_a_file_unless_ipc_is_set(
    device, tmp_path, monkeypatch, caplog
):
    tensor = next(shards()).tensor

    def choose(kind):
        choice = transfer.CarrierChoice(kind, FileCarrier(tmp_path, torch.float32), 1024)
        return choice, asyncio.run(choice.choose(OneWorker(), tensor))

    def is_invisible(handle):
        raise ModelError("the learner's accelerator GPU-1 isn't visible to vLLM's worker")

    monkeypatch.setattr(device_memory, "map_memory", is_invisible)
    choice, carrier = choose("auto")
    assert carrier is choice.file
    assert choice.kind == "file", "it is not tried again"
    assert "GPU-1 isn't visible" in caplog.text
    assert "through files" in caplog.text
    with pytest.raises(ModelError, match=r"GPU-1 .*Set generator\.weight_transfer=file"):
        choose("ipc")
    # What is mapped is not what the sender sees.
    monkeypatch.setattr(
        device_memory, "map_memory", lambda handle: torch.zeros(handle["n_bytes"]).byte()
    )
    with pytest.raises(ModelError, match="checksum"):
        choose("ipc")
    monkeypatch.setattr(device_memory, "can_export", lambda tensor: False)
    choice, carrier = choose("auto")
    assert (carrier, choice.kind) == (choice.file, "auto"), "a colocated learner is elsewhere"
    with pytest.raises(ModelError, match=r"in main memory\. Set generator\.weight_transfer=file"):
        choose("ipc")


def test_a_handle_has_all_that_torch_maps_memory_with(monkeypatch):
    """As far as it goes without an accelerator: the arguments of torch's own functions."""
    sent = [torch.Tensor, (8,), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0]
    sent += [b"memory", 512, 64, False, b"counter", 7, b"event", True]
    signature = inspect.signature(rebuild_cuda_tensor)
    received = []

    def rebuild(*arguments, **keywords):
        received.extend(signature.bind(*arguments, **keywords).args)

    uuids = {torch.device("cpu"): "GPU-b", 0: "GPU-a", 1: "GPU-b"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device])
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device_memory, "reduce_tensor", lambda _: (rebuild_cuda_tensor, sent))
    monkeypatch.setattr(device_memory, "rebuild_cuda_tensor", rebuild)
    handle = device_memory.export_memory(torch.zeros(8, dtype=torch.uint8))
    device_memory.map_memory(handle)
    sent[6] = 1  # the accelerator's index in the worker
    assert received == sent
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match="GPU-b isn't visible to vLLM's worker, which sees GPU-a"):
        device_memory.map_memory(handle)


@pytest.mark.parametrize(
    ("keys", "on_cpu", "chosen"),
    [
        ({}, False, "auto"),
        ({}, True, "file"),
        ({"engine": "sync"}, False, "file"),
        ({"lora_rank": 4}, False, "file"),
        ({"quantise": "float8"}, False, "file"),
        ({"weight_transfer": "file"}, False, "file"),
        ({"weight_transfer": "ipc", "quantise": "float8"}, False, "ipc"),
    ],
)
def test_memory_of_an_accelerator_is_used_where_it_may_be(device, decoder, keys, on_cpu, chosen):
    config = VLLMConfig(**keys)
    assert transfer.choose_transfer(config, DecoderPolicy(decoder), on_cpu=on_cpu) == chosen


def test_weights_in_main_memory_and_models_of_transformers_go_through_files(
    decoder, monkeypatch, twins
):
    assert transfer.choose_transfer(VLLMConfig(), DecoderPolicy(decoder), on_cpu=False) == "file"
    monkeypatch.setattr(device_memory, "can_export", lambda tensor: True)
    model = TransformersPolicy(twins("qwen3")[1])
    assert transfer.choose_transfer(VLLMConfig(), model, on_cpu=False) == "file"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["generator.weight_transfer=ipc"], "remove weight_transfer"),
        (["generator.weight_transfer=ipc", "generator.engine=sync"], "set engine to async"),
        (
            ["device=cuda", "generator.weight_transfer=ipc", "cluster.colocated=true"],
            r"set generator\.weight_transfer=auto",
        ),
        (
            ["device=cuda", "generator.weight_transfer=ipc", "learner.kind=dtensor"],
            "backend=nccl, or generator.weight_transfer=file",
        ),
        (
            [
                "device=cuda",
                "generator={kind: workers, worker: {kind: vllm, weight_transfer: ipc}}",
            ],
            r"or generator\.worker\.weight_transfer=file",
        ),
    ],
)
def test_ipc_is_refused_where_weights_do_not_come_from_an_accelerator(tmp_path, overrides, reason):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(ConfigError, match=reason):
        load_config(recipe, overrides)


def test_ipc_is_accepted_behind_nccl(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    overrides = ["device=cuda", "generator.weight_transfer=ipc"]
    load_config(recipe, overrides)
    network = "weight_sync={kind: collective, backend: nccl}"
    load_config(recipe, [*overrides, "learner.kind=dtensor", network])


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "stale"])
def test_a_worker_refuses_a_damaged_push(outbox, damage):
    worker = Loads()
    outbox.add(shards())
    manifest = outbox.build_manifest()
    content = bytearray(outbox.carrier.path.read_bytes())
    if damage == "bit":
        content[17] ^= 1
    outbox.carrier.path.write_bytes(content[:40] if damage == "cut" else content)
    if damage == "gone":
        outbox.carrier.path.unlink()
    if damage == "stale":
        outbox.carrier.path.write_bytes(
            b"".join((2 * s.tensor).numpy().tobytes() for s in shards())
        )
    assert worker.check_push(manifest) != ""
    assert "no push" in worker.apply_push(1)
    worker.vllm_config.parallel_config.data_parallel_size = 2  # whose answers nobody sees
    with pytest.raises(RuntimeError):
        worker.check_push(manifest)


# --- answers


def request(**keys):
    return GenerationRequest(np.array([1, 2]), Sampling(max_new_tokens=4, **keys), 6, print, print)


def piece(tokens, finish=None, stop=None, spans=None, logprob=-0.5, filtered=None):
    """filtered: the logprob after filters, as the second entry of each token."""
    entries = [{token: SimpleNamespace(logprob=logprob)} for token in tokens]
    if filtered is not None:
        entries = [
            entry | {token + 1: SimpleNamespace(logprob=filtered)}
            for token, entry in zip(tokens, entries, strict=True)
        ]
    return SimpleNamespace(
        token_ids=tokens,
        logprobs=entries,
        finish_reason=finish,
        stop_reason=stop,
        weight_versions=spans,
    )


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        ("length", None, StopReason.LENGTH),
        ("length", 9, StopReason.STOP_TOKEN),  # both: some versions look at the limit first
        ("stop", 9, StopReason.STOP_TOKEN),
        ("abort", None, StopReason.ABORTED),
    ],
)
def test_reasons_are_translated(finish, stop, expected):
    answer = PartialCompletion(request(stop_ids=(9,) if stop else ()))
    answer.add(piece([8]))
    assert answer.stop is None
    answer.add(piece([9], finish, stop))
    answer.request.version_starts += [(0, 3)]
    completion = answer.build_completion()
    assert completion.stop is expected
    assert completion.tokens.tolist() == [8, 9]
    assert completion.logprobs.tolist() == [-0.5, -0.5]
    assert completion.versions.tolist() == [3, 3]
    assert not completion.log_kept_mass.any()


def test_the_kept_mass_is_the_quotient_of_the_logprobs_before_and_after_filters():
    answer = PartialCompletion(request(top_p=0.9))
    answer.add(piece([8], logprob=-0.5, filtered=-0.25))
    answer.add(piece([9], "length", logprob=-0.5, filtered=-0.5000001))  # rounding
    answer.request.version_starts += [(0, 3)]
    completion = answer.build_completion()
    assert completion.logprobs.tolist() == [-0.5, -0.5]
    assert completion.log_kept_mass.tolist() == [-0.25, 0.0]


def test_routes_are_those_of_the_layers_with_experts_and_the_last_token_has_none():
    """vLLM has rows for all layers, and one row less than tokens (or more, if some are dropped)."""
    experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)  # 4 tokens, 2 layers, 2 experts
    answer = PartialCompletion(request(routes=True), sparse_layers=(1,))
    answer.add(piece([8]))
    answer.add(SimpleNamespace(**vars(piece([9], "length")), routed_experts=experts))
    answer.request.version_starts += [(0, 3)]
    assert answer.build_completion().routes.tolist() == [
        [[2, 3]], [[6, 7]], [[10, 11]], [[-1, -1]]
    ]  # fmt: skip
    answer.experts = experts[:2]
    with pytest.raises(RequestFailed, match="experts of 2 of 3 tokens"):
        answer.build_completion()
    answer.tokens, answer.logprobs, answer.experts = [], [], None  # aborted at once
    assert answer.build_completion().routes is None


def test_tokens_after_a_stop_string_are_dropped():
    class Numbers:
        def decode(self, ids):
            return "".join(f"{i}," for i in ids)

    asked = request()
    asked.stop_strings = StopStrings(("8,9,",), Numbers())
    answer = PartialCompletion(asked)
    answer.add(piece([8, 9, 5]))
    answer.add(piece([6], "abort"))
    asked.version_starts += [(0, 1), (1, 2)]
    completion = answer.build_completion()
    assert completion.tokens.tolist() == [8, 9]
    assert completion.stop is StopReason.STOP_STRING
    assert completion.versions.tolist() == [1, 2]


def test_logits_that_are_not_finite_and_errors_of_vllm_are_raised():
    answer = PartialCompletion(request())
    answer.add(piece([8], "length", logprob=float("nan")))
    answer.request.version_starts += [(0, 2)]
    with pytest.raises(RequestFailed, match=r"aren't finite \(token 0, weights version 2\)"):
        answer.build_completion()
    with pytest.raises(TrainingError, match="'error'"):
        PartialCompletion(request()).add(piece([8], "error"))


# --- the generator on a stand-in for vLLM's engine


class FakeLLM:
    """Answers with tokens that count up from the seed; a worker is beside it."""

    def __init__(self):
        self.worker, self.version, self.paused, self.log = Loads(), "default", asyncio.Event(), []
        self.paused.set()

    async def generate(self, prompt, parameters, request_id, lora_request):
        await self.paused.wait()
        tokens = [(parameters["seed"] + i) % 50 for i in range(parameters["max_tokens"])]
        stops = [i for i, token in enumerate(tokens) if token in parameters["stop_token_ids"]]
        tokens = tokens[: stops[0] + 1] if stops else tokens
        spans = [SimpleNamespace(version=self.version, start=0, end=len(tokens))]
        done = piece(tokens, "stop" if stops else "length", tokens[-1] if stops else None, spans)
        yield SimpleNamespace(outputs=[done], prompt_token_ids=prompt["prompt_token_ids"])

    async def collective_rpc(self, method, args=()):
        self.log.append(method)
        return [getattr(self.worker, method)(*args)]

    async def pause_generation(self, mode, clear_cache):
        self.log.append(f"pause {mode} {clear_cache}")
        self.paused.clear()

    async def resume_generation(self):
        self.log.append("resume")
        self.paused.set()

    async def update_weight_version(self, version):
        self.version = version


@pytest.fixture
def generation(monkeypatch, decoder):
    """The generator on a fake of vLLM."""

    def make(core):
        def of(arguments, on_files_read):
            made = object.__new__(core)
            made.llm, made.version, made._running, made._requests = FakeLLM(), 0, {}, {}
            made._ids, made._preparation, made.loras = map(str, range(1000)), None, LoRARequests()
            made._on_files_read = on_files_read
            made.close = lambda: None
            return made

        return of

    monkeypatch.setattr(vllm, "find_spec", lambda name: True)
    monkeypatch.setattr(
        vllm,
        "import_module",
        lambda name: SimpleNamespace(
            __version__=vllm.VERSION, current_platform=SimpleNamespace(is_cpu=lambda: True)
        ),
    )
    monkeypatch.setattr(vllm, "CORES", {"async": make(MultiprocessCore)})

    def parameters(request, *, streams):
        sampling = request.sampling
        return {
            "seed": sampling.seed,
            "max_tokens": request.limit - len(request.prompt),
            "stop_token_ids": sampling.stop_ids,
        }

    monkeypatch.setattr("ratchet.generators.vllm.engines.make_sampling_params", parameters)
    made = VLLMGenerator(VLLMConfig(), DecoderPolicy(decoder))
    yield made
    asyncio.run(made.close())
    assert not made._directory.exists()


def test_it_conforms(generation):
    asyncio.run(check_generator(generation, [[1, 2, 3], [4] * 9]))


@pytest.mark.parametrize("first", ["a request", "a push"])
def test_the_models_files_stay_until_the_engine_has_answered(generation, decoder, first):
    policy, start = DecoderPolicy(decoder), generation._directory / "start"
    there = []

    def tie_to_driver(host, driver):
        there.append((start / "model.safetensors").exists())
        return []

    generation.core.llm.worker.tie_to_driver = tie_to_driver
    if first == "a request":
        asyncio.run(generation.generate([1], Sampling(max_new_tokens=2)))
    else:
        asyncio.run(
            DirectWeightSync(SimpleNamespace(weights=lambda: shards_of(policy)), generation).push(3)
        )
    assert there == [True]
    assert not start.exists()


def shards_of(policy):
    return (
        Shard(name, tuple(weight.shape), (0,) * weight.dim(), weight)
        for name, weight in policy.canonical_weights()
    )


def test_a_push_is_checked_before_the_engine_halts(generation, decoder):
    policy = DecoderPolicy(decoder)
    learner = SimpleNamespace(weights=lambda: shards_of(policy))
    llm = generation.core.llm

    async def run():
        await DirectWeightSync(learner, generation).push(3)
        assert llm.log[:2] == ["tie_to_driver", "prepare_sampler"]
        assert llm.log[2:] == ["check_push", "pause keep True", "apply_push", "resume"]
        assert generation.version == 3
        assert set(llm.worker.loaded) == {"lm_head.weight", *dict(policy.canonical_weights())}
        llm.log.clear()
        await generation.pause()
        await DirectWeightSync(learner, generation).push(4)
        assert "resume" not in llm.log, "a push must not resume what its owner has paused"
        await generation.resume()

        llm.worker.check_push = lambda manifest: "a bit fell over"
        llm.log.clear()
        llm.worker.loaded = {}
        with pytest.raises(ModelError, match="a bit fell over"):
            await DirectWeightSync(learner, generation).push(5)
        assert not any("pause" in line for line in llm.log)
        assert not llm.worker.loaded
        assert generation.version == 4
        assert (await generation.generate([1], Sampling(max_new_tokens=2))).versions.tolist() == [
            4,
            4,
        ]
        assert [path.name for path in generation._directory.iterdir()] == [OWNER_FILE]

    asyncio.run(run())


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=0.9), Sampling(top_k=3), Sampling(min_p=0.1), Sampling(temperature=0.001)],
)
def test_sampling_that_vllm_does_otherwise_is_refused(generation, sampling):
    with pytest.raises(ConfigError, match=r"sampling\."):
        asyncio.run(generation.generate([1], sampling))


def test_a_generator_with_weights_of_its_own_is_sent_them(generation):
    learner = SimpleNamespace()
    sharing = SimpleNamespace(shares_weights=True)
    generators = {
        generation: SharedMemoryWeightSync,
        FakeGenerator(lambda tokens, sampling: [1]): SharedMemoryWeightSync,
    }
    for generator, kind in [*generators.items(), (sharing, SharedWeightSync)]:
        assert isinstance(
            make_weight_sync(resolve("weight_sync", {}), SyncEndpoints(learner, generator)), kind
        )


def test_who_waits_for_an_engine_that_is_closed_is_told(generation):
    core = generation.core
    core.llm.shutdown, core._children = lambda: None, set()

    async def run():
        core.llm.paused.clear()
        started = asyncio.create_task(generation.generate([1, 2], Sampling(max_new_tokens=4)))
        for _ in range(4):
            await asyncio.sleep(0)
        unstarted = asyncio.create_task(generation.generate([1, 3], Sampling(max_new_tokens=4)))
        await asyncio.sleep(0)
        assert len(core._running) == 2
        MultiprocessCore.close(core)
        return await asyncio.wait_for(asyncio.gather(started, unstarted), timeout=30)

    assert [completion.stop for completion in asyncio.run(run())] == [StopReason.ABORTED] * 2
    assert core._running == core._requests == {}


def test_requests_of_an_engine_that_broke_are_given_back_though_it_can_not_be_told():
    def broken(names):
        raise RuntimeError(f"the engine is dead, and {names} with it")

    core, lost = object.__new__(InProcessCore), request()
    core.llm, core._partials = SimpleNamespace(abort_request=broken), {"7": PartialCompletion(lost)}
    assert core.reset() == [lost]
    assert not core.busy
    assert core.reset() == []


@pytest.mark.fault("R16")
def test_an_answer_of_vllm_that_breaks_costs_its_request_alone():
    """In this process: its logits, its end, text that can't be decoded; the fourth is delivered."""

    class Undecodable:
        def decode(self, ids):
            raise KeyError(ids[0])

    core, told, aborted = object.__new__(InProcessCore), [], []
    requests = [
        replace(request(), deliver=told.append, fail=told.append, version_starts=[(0, 0)])
        for _ in range(4)
    ]
    requests[2].stop_strings = StopStrings(("x",), Undecodable())
    pieces = [
        piece([8], "length", logprob=float("nan")),
        piece([8], "error"),
        piece([8]),
        piece([8], "length"),
    ]
    outputs = [
        SimpleNamespace(request_id=str(i), outputs=[each], prompt_token_ids=[1, 2])
        for i, each in enumerate(pieces)
    ]
    core.llm = SimpleNamespace(step=lambda: outputs, abort_request=aborted.extend)
    core._partials = {str(i): PartialCompletion(each) for i, each in enumerate(requests)}
    core.step()
    assert [type(each) for each in told[:3]] == [RequestFailed, TrainingError, RequestFailed]
    assert told[3].tokens.tolist() == [8]
    assert not core.busy
    assert aborted == ["2"], "the others had ended"


def test_an_abort_of_the_engine_in_this_process_tells_all_though_the_logits_of_one_were_broken():
    core, found = object.__new__(InProcessCore), []
    broken, whole = (replace(request(), deliver=found.append, fail=found.append) for _ in range(2))
    core.llm, core._partials = (
        SimpleNamespace(abort_request=lambda names: None),
        {"1": PartialCompletion(broken), "2": PartialCompletion(whole)},
    )
    core._partials["1"].add(piece([8], None, logprob=float("nan")))
    broken.version_starts.append((0, 0))
    core.abort()
    assert isinstance(found[0], RequestFailed)
    assert found[1].stop is StopReason.ABORTED
    assert not core.busy


def test_it_starts_for_adapters_of_the_next_rank_that_vllm_knows():
    dtype = choose_dtype(VLLMConfig(), on_cpu=True)
    asked = make_engine_arguments(VLLMConfig(lora_rank=9), Path("m"), dtype, 64, on_cpu=False)
    assert {key: asked[key] for key in asked if "lora" in key} == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
        "enable_mixed_moe_lora_format": True,
    }
    several = make_engine_arguments(
        VLLMConfig(lora_rank=9, lora_others=3), Path("m"), dtype, 64, on_cpu=True
    )
    assert several["max_loras"] == 5, "on a CPU one place is left empty"
    assert "enable_lora" not in make_engine_arguments(
        VLLMConfig(), Path("m"), dtype, 64, on_cpu=True
    )


@pytest.mark.needs("peft")
def test_adapters_that_it_was_not_started_for_or_that_do_not_fit_are_refused(
    generation, decoder, tmp_path
):
    def written(name, shape=None, **lora):
        policy = DecoderPolicy(Decoder(shape or decoder.config).init_weights(1))
        policy.attach(Adapter(LoRAConfig(**lora)))
        save_adapter(
            tmp_path / name,
            policy.adapter,
            policy.resolve_adapter_layers(policy.adapter.lora),
            dict(policy.adapter_weights()),
        )
        return tmp_path / name

    def refused(match, *arguments):
        with pytest.raises(ModelError, match=match):
            asyncio.run(generation.add_adapter(*arguments))

    small = written("small", rank=2)
    refused(
        r"started for 0 adapters beside the policy's, so it can't add 'one': set "
        r"generator\.lora_others=1",
        "one",
        small,
    )
    generation.config = VLLMConfig(lora_rank=2, lora_others=1)
    refused("the name 'base' is taken by another adapter", "base", small)
    refused(
        r"rank 3, but vLLM was started for ranks up to 2: set generator\.lora_rank=3",
        "one",
        written("large", rank=3),
    )
    wide = replace(decoder.config, intermediate_size=2 * decoder.config.intermediate_size)
    refused("but the base model", "one", written("wide", wide, rank=2))
    fused = pushed(tmp_path / "fused")[1]
    refused("adapter 'one' is for fused experts .* --merge-lora", "one", fused)
    with pytest.raises(ConfigError, match="no adapter 'one': it serves base"):
        asyncio.run(generation.generate([1], Sampling(adapter="one")))
    with pytest.raises(ValidationError, match="set lora_rank too"):
        VLLMConfig(lora_others=1)


@pytest.mark.parametrize(
    ("gate", "up", "down"), [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")]
)
def test_an_adapter_of_some_matrices_of_experts_is_refused(gate, up, down):
    def names(*matrices):
        paths = [f"mlp.experts.{expert}.{name}" for expert in range(2) for name in matrices]
        return [
            f"base_model.model.model.layers.0.{path}.lora_{factor}.weight"
            for path in ["self_attn.q_proj", *paths]
            for factor in "AB"
        ]

    check_expert_matrices(names())
    check_expert_matrices(names(gate, up, down))
    with pytest.raises(ModelError, match=f"has no {up} and no {down} of its experts"):
        check_expert_matrices(names(gate))
