"""Clusters that a recipe can't have: each refused with the key and the smallest fix, before
anything starts where it can be."""

import socket
import sys

import pytest
import yaml

from ratchet.cli.main import main

RECIPE = {
    "name": "probe",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny"},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"tasks": 0},
    "learner": {"kind": "dtensor"},
    "algorithm": {"kind": "sft"},
    "steps": 1,
    "batch_size": 2,
}
EXPERTS = "model.preset=tiny-moe"

REFUSED = [
    (
        "learner.tensor_parallel=3",
        "learner.tensor_parallel=3 doesn't divide the model's 2 query heads: set it to 2",
    ),
    (
        "learner.dp_shard=2 learner.expert_parallel=2",
        "learner.expert_parallel=2 doesn't divide the model's 0 experts: set it to 1",
    ),
    (
        f"{EXPERTS} learner.dp_shard=3 learner.expert_parallel=3",
        "learner.expert_parallel=3 doesn't divide the model's 4 experts: set it to 2",
    ),
    (
        f"{EXPERTS} learner.dp_shard=2 learner.expert_parallel=4",
        "learner.expert_parallel=4 must divide dp_shard x context_par",
    ),
    (
        "learner.pipeline_parallel=3",
        "3 pipeline stages are more than 2 layers: set learner.pipeline_parallel",
    ),
    ("learner.dp_shard=0", "learner.dp_shard: 0 must be at least 1"),
    (
        "learner.sequence_parallel=true",
        "learner.sequence_parallel divides tokens among the ranks of learner.tensor_parallel",
    ),
    ("device=cuda", "device=cuda, but torch finds no CUDA accelerator here. Set device=cpu"),
    (
        "learner.dp_shard=2 cluster.devices=[0,1]",
        "cluster.devices lists [0, 1], but this process sees none (device=cpu)",
    ),
    ("cluster.devices=[0,0]", "cluster.devices: must list at least one device, and each only once"),
    (
        "cluster.ports=[2222,2221]",
        "cluster.ports: the first port, 2222, is above the last, 2221: swap them",
    ),
    ("cluster.ports=[80,90]", "cluster.ports.0: 80 must be at least 1024"),
    ("cluster.silence_s=1", "cluster.silence_s: 1 must be at least 5"),
    ("cluster.nodes=2", "cluster.nodes: unknown key"),
    (
        "cluster.kind=ray learner.kind=local",
        "cluster.kind=ray places worker processes, and learner.kind=local trains in the main",
    ),
    (
        "cluster.kind=torchrun",
        "needs several processes that torchrun started: start the run as torchrun --nproc-per-node N",
    ),
    ("cluster.kind=slurm", "cluster.kind"),
    ("generator.kind=workers generator.worker.kind=workers", "'workers' is unknown"),
    (
        "generator.kind=workers generator.worker.kind=engine generator.max_restarts=2",
        "set recovery=restart, or remove ",
    ),
    (
        "generator.kind=workers generator.worker.kind=vllm sampling.top_p=0.9 "
        'generator.worker.arguments={"spec_method":"ngram"}',
        "sampling.top_p=0.9 truncates the distribution",
    ),
    (
        "generator.kind=workers generator.worker.kind=vllm generator.worker.tensor_parallel=3",
        "generator vllm can't run this model",
    ),
]
MEGATRON = "learner.kind=megatron"
REFUSED += [
    (
        f"{MEGATRON} learner.tensor_parallel=3",
        "learner.tensor_parallel=3 doesn't divide the model's 2 query heads: set it to 2",
    ),
    (
        f"{MEGATRON} learner.tensor_parallel=2 model.overrides.n_kv_heads=1",
        "learner.tensor_parallel=2 doesn't divide the model's 1 KV heads: set it to 1",
    ),
    (
        f"{MEGATRON} learner.first_stage_layers=1",
        "learner.first_stage_layers=1: a pipeline of one rank has all layers",
    ),
    (
        f"{MEGATRON} learner.pipeline_parallel=2 learner.last_stage_layers=2",
        "can't divide the model's 2 layers over 2 pipeline ranks. Set learner.last_stage_layers=1.",
    ),
    (
        f"{MEGATRON} learner.pipeline_parallel=2 learner.pipeline_chunks=2 "
        "learner.first_stage_layers=1 model.overrides.n_layers=4",
        "learner.first_stage_layers is less than learner.pipeline_chunks=2",
    ),
    (
        f"{MEGATRON} learner.pipeline_parallel=2 learner.stage_layers=[1,2]",
        "learner.stage_layers=[1, 2] has 3 layers, but the model has 2. Set numbers that add up to 2.",
    ),
    (
        f"{MEGATRON} learner.stage_layers=[1,1]",
        "has 2 stages, but pipeline_parallel x pipeline_chunks is 1: give 1 numbers, or none",
    ),
    (
        f"{MEGATRON} learner.pipeline_parallel=2 learner.pipeline_chunks=2 "
        "learner.stage_layers=[1,3]",
        "has 2 stages, but pipeline_parallel x pipeline_chunks is 4: give 4 numbers, or none",
    ),
    (
        f"{MEGATRON} learner.pipeline_parallel=2 learner.stage_layers=[1,1] "
        "learner.first_stage_layers=1",
        "remove first_stage_layers and last_stage_layers",
    ),
    (
        f"{MEGATRON} learner.pipeline_parallel=3",
        "3 pipeline stages are more than 2 layers: set learner.pipeline_parallel",
    ),
    (
        f"{MEGATRON} learner.pipeline_chunks=2",
        "pipeline_chunks=2 divides the stages of a pipeline: set",
    ),
    (
        f"{MEGATRON} {EXPERTS} learner.data_parallel=3 learner.expert_parallel=3",
        "learner.expert_parallel=3 doesn't divide the model's 4 experts: set it to 2",
    ),
    (
        f"{MEGATRON} {EXPERTS} learner.tensor_parallel=2",
        "experts under tensor parallelism need learner.sequence_parallel",
    ),
    (
        f"{MEGATRON} optimizer.ema_decay=0.9",
        "learner.kind=megatron keeps none: remove optimizer.ema_decay",
    ),
    (f"{MEGATRON} learner.dp_shard=2", "learner.dp_shard: unknown key"),
]
REFUSED_ON_RAY = [
    ("cluster.gpus_per_node=4", "cluster.gpus_per_node=4, but node "),
    ("cluster.cpus_per_node=4096", "cluster.cpus_per_node=4096, but node "),
    ("cluster.address=127.0.0.1:1", "cluster.address=127.0.0.1:1: nothing answers there"),
    ("cluster.devices=[0]", "cluster.devices: unknown key"),
]


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    def refusal(overrides, *, starts=False):
        """(exit status, standard error) of `ratchet train`; its errors come without a traceback, or
        not at all."""
        recipe = tmp_path / "probe.yaml"
        recipe.write_text(yaml.safe_dump(RECIPE))
        run = ["--run-dir", str(tmp_path / "run")]
        monkeypatch.setattr(
            sys, "argv", ["ratchet", "train", str(recipe), *overrides.split(), *run]
        )
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        if not starts:
            monkeypatch.setattr("ratchet.executors.local.ForkServer", None)
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code, capsys.readouterr().err

    return refusal


@pytest.mark.medium
@pytest.mark.parametrize(("overrides", "message"), REFUSED)
@pytest.mark.fault("C4", "C5")
def test_refused_before_anything_starts(refusal, overrides, message):
    status, said = refusal(overrides)
    assert status == 2
    assert message in said
    assert "Traceback" not in said


@pytest.mark.medium
@pytest.mark.needs("ray")
@pytest.mark.parametrize(("overrides", "message"), REFUSED_ON_RAY)
def test_refused_before_ray_starts(refusal, overrides, message, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", None)
    status, said = refusal(f"learner.dp_shard=2 cluster.kind=ray {overrides}")
    assert status == 2
    assert message in said


def test_megatron_is_not_installed(refusal, monkeypatch):
    monkeypatch.setattr("ratchet.models.parallel.megatron_sizes.find_spec", lambda name: None)
    status, said = refusal(MEGATRON, starts=True)
    assert status == 1
    assert (
        "learner.kind=megatron needs the package 'megatron-core': pip install 'ratchet-rl[megatron]'"
        in said
    )


def test_a_model_that_transformers_runs_has_no_map_to_megatron():
    from transformers import AutoConfig, AutoModelForCausalLM

    from ratchet.errors import ModelError
    from ratchet.learners.config import MegatronConfig
    from ratchet.learners.distributed.checks import check_megatron
    from ratchet.models.transformers.policy import TransformersPolicy

    config = AutoConfig.for_model(
        "gpt2", vocab_size=23, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    with pytest.raises(
        ModelError,
        match=r"this model: its model_type is 'gpt2'\. Set learner\.kind=dtensor",
    ):
        check_megatron(
            MegatronConfig(), TransformersPolicy(AutoModelForCausalLM.from_config(config))
        )


@pytest.mark.slow
@pytest.mark.fault("P17")
def test_a_busy_port(refusal):
    """Known only where the ranks are: they have started, and end."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, said = refusal(f"learner.dp_shard=2 cluster.ports=[{port},{port}]", starts=True)
    assert status == 1
    assert f"PortBusy: none of the ports {port} to {port} is free" in said
    assert "or set cluster.ports" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_other_versions(refusal, monkeypatch):
    monkeypatch.setattr(
        "ratchet.executors.worker_handle.get_versions",
        lambda: {"protocol": 0, "ratchet": "0", "python": "3"},
    )
    status, said = refusal("learner.dp_shard=2", starts=True)
    assert status == 1
    assert (
        "VersionMismatch: learner rank 0 of 2 on " in said
        or "VersionMismatch: learner rank 1 of 2 on " in said
    )
    assert "install the same version on all hosts" in said


LAYER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("kind", "shape", "overrides", "message"),
    [
        ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2}, {"dp_shard": 4}, None),
        (
            "gpt2",
            {"n_embd": 16, "n_layer": 1, "n_head": 2},
            {"tensor_parallel": 2},
            "GPT2LMHeadModel has no plan for tensor parallelism: set learner.tensor_parallel to 1, and "
            "learner.dp_shard to the number of",
        ),
        ("gemma2", {}, {"tensor_parallel": 2}, None),
        (
            "gemma2",
            {},
            {"tensor_parallel": 4},
            "learner.tensor_parallel=4 doesn't divide the model's 2 KV heads: set it to 2",
        ),
        (
            "gemma2",
            {"intermediate_size": 25},
            {"tensor_parallel": 2},
            "learner.tensor_parallel=2 doesn't divide the model's 25 outputs of "
            "model.layers.0.mlp.gate_proj: set it to 1",
        ),
        (
            "mixtral",
            {"num_local_experts": 2, "intermediate_size": 12, "num_key_value_heads": 8}
            | {"num_attention_heads": 8},
            {"tensor_parallel": 8},
            "8 doesn't divide .* 12 columns of an expert .model.layers.0.mlp.experts.gate_up_proj.: ",
        ),
        (
            "mixtral",
            {"num_local_experts": 2},
            {"tensor_parallel": 2, "expert_parallel": 2, "dp_shard": 2},
            None,
        ),
        ("gemma2", {"num_hidden_layers": 4}, {"pipeline_parallel": 2, "pipeline_chunks": 2}, None),
        ("olmo", {"num_hidden_layers": 2}, {"pipeline_parallel": 2}, None),
        (
            "gemma2",
            {"num_hidden_layers": 3},
            {"pipeline_parallel": 2, "stage_layers": (1, 1)},
            r"learner.stage_layers=.1, 1. has 2 layers, but the model has 3\. Set numbers that add",
        ),
        (
            "gemma2",
            {"num_hidden_layers": 3},
            {"pipeline_parallel": 2, "pipeline_chunks": 2},
            "4 pipeline stages are more than 3 layers: set learner.pipeline_parallel x .* at most 3",
        ),
        (
            "gpt2",
            {"n_embd": 16, "n_layer": 2, "n_head": 2},
            {"pipeline_parallel": 2},
            "GPT2LMHeadModel computes something else in pipeline stages .hidden states.: set learner.p",
        ),
        (
            "gpt2",
            {"n_embd": 18, "n_layer": 2, "n_head": 2},
            {"pipeline_parallel": 2},
            "GPT2LMHeadModel can't compute in pipeline stages .The size of .*: set learner.pipeline",
        ),
        (
            "bloom",
            {"num_hidden_layers": 2},
            {"pipeline_parallel": 2},
            "can't pack sequences, so its layers can't be divided over ranks: set learner.pipeline",
        ),
        ("mixtral", {"num_local_experts": 6}, {"expert_parallel": 3}, None),
        (
            "mixtral",
            {"num_local_experts": 6},
            {"expert_parallel": 4},
            "4 doesn't divide .* 6 .* it to 3",
        ),
        (
            "llama",
            {},
            {"expert_parallel": 2},
            "LlamaForCausalLM has no experts that learner.expert_parallel=2 can divide .* set learner",
        ),
        ("gemma2", {}, {"tensor_parallel": 2, "sequence_parallel": True}, None),
        (
            "mixtral",
            {"num_local_experts": 2},
            {"tensor_parallel": 2, "sequence_parallel": True},
            None,
        ),
    ],
)
def test_how_a_model_that_transformers_runs_can_be_divided(kind, shape, overrides, message):
    from transformers import AutoConfig, AutoModelForCausalLM

    from ratchet.errors import RatchetError
    from ratchet.learners.config import DTensorConfig
    from ratchet.learners.distributed.checks import check_dtensor
    from ratchet.models.transformers.policy import TransformersPolicy

    tokens = {"vocab_size": 23, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **tokens, **({} if kind == "gpt2" else LAYER) | shape)
    model = TransformersPolicy(AutoModelForCausalLM.from_config(config))
    if message is None:
        check_dtensor(DTensorConfig(**overrides), model)
        return
    with pytest.raises(RatchetError, match=message):
        check_dtensor(DTensorConfig(**overrides), model)
