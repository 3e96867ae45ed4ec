"""Models that transformers runs, divided by the plans of their architectures, compute what one
process computes."""

import json
import shutil
from functools import cache

import pytest
import torch
from learners.ranks import run_ranks
from learners.spread_cases import MUON, OPTIMIZER, VOCAB, Together, alone, check_alike
from transformers import AutoConfig, AutoModelForCausalLM

from ratchet.checkpoint.sharded import BlockFiles
from ratchet.config.lora import LoRAConfig
from ratchet.errors import ModelError
from ratchet.learners.distributed.topology import Topology
from ratchet.learners.export import export_saved
from ratchet.models.lora.decoder import Adapter
from ratchet.models.parallel.sharding import StageIndex
from ratchet.models.transformers.division import check_layer_division, check_token_division
from ratchet.models.transformers.policy import TransformersPolicy

pytestmark = pytest.mark.slow

STEPS = 2
SHAPE = {
    "vocab_size": VOCAB,  # odd: ranks have unequal parts of it
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
GEMMA2 = {
    "head_dim": 8,
    "final_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
}
MODELS = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},  # norms of heads
    "gemma2": GEMMA2,  # tied, and ours can't run it
    "gpt_neox": {"num_key_value_heads": None},  # fused and biased
    "olmo2": {},  # gathers queries and keys, and splits what follows
}
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "n_routed_experts": 4}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
# Families that are divided by rows, weights and tokens here, but not by their plans.
OTHERS = {
    "gemma3_text": {
        "num_hidden_layers": 5,  # odd: pipeline stages have unequal numbers of them
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "layer_types": [*(2 * WINDOWS["layer_types"]), "full_attention"],
    },
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "glm4_moe": {"head_dim": 8, "first_k_dense_replace": 1, "use_qk_norm": True, **EXPERTS},
    # Attention has sinks.
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        **DELTA,
    },
    # Keys and values have different sizes.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        **LATENT,
        **EXPERTS,
    },
    # Keys of all heads share a rotary part.
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        **LATENT,
        **EXPERTS,
    },
    "mixtral": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # gathers queries and keys
    # The plan leaves experts whole.
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12,
    },
}
TOPOLOGIES = {
    "fsdp2": ({"shards": 2}, {}),
    "tp2": ({"tensor": 2}, {}),
    "fsdp2 x tp2": (
        {"shards": 2, "tensor": 2},
        {"activation_checkpointing": True, "logprob_chunk_mib": 1},
    ),
    "hsdp2 x tp2": ({"replicas": 2, "tensor": 2}, {}),
}
SEQUENCE = {"sequence_parallel": True}
BY_SEQUENCE = {
    "tp2 sequence": ({"tensor": 2}, SEQUENCE),
    "fsdp2 x tp2 sequence": (
        {"shards": 2, "tensor": 2},
        {"activation_checkpointing": True, **SEQUENCE},
    ),
    "cp2 x tp2 sequence": ({"context": 2, "tensor": 2}, SEQUENCE),
}
BY_TOKENS = {
    "cp2": ({"context": 2}, {}),
    "cp2 x fsdp2": ({"context": 2, "shards": 2}, {"activation_checkpointing": True}),
}
# Routed rows travel to the ranks of their experts.
BY_EXPERTS = {
    "ep2": ({"shards": 2, "experts": 2}, {}),
    "ep4": ({"shards": 4, "experts": 4}, {}),
    "ep2 x fsdp2": ({"shards": 4, "experts": 2}, {"activation_checkpointing": True}),
    "ep2 x hsdp2": ({"replicas": 2, "shards": 2, "experts": 2}, {}),
    "ep2 x cp2": ({"context": 2, "shards": 2, "experts": 2}, {}),
}
# Each rank has some of the layers.
BY_LAYERS = {
    "pp2": ({"pipeline": 2}, {"activation_checkpointing": True}),
    "pp2 interleaved": ({"pipeline": 2}, {"pipeline_chunks": 2}),
    "pp2 x fsdp2": ({"pipeline": 2, "shards": 2}, {}),
    "pp2 x tp2": ({"pipeline": 2, "tensor": 2}, SEQUENCE),
    "pp2 x cp2": ({"pipeline": 2, "context": 2}, {"activation_checkpointing": True}),
    "pp2 x ep2": ({"pipeline": 2, "shards": 2, "experts": 2}, {}),
}
BY_MORE = {"cp3": ({"context": 3}, {}), "cp2 x tp2": ({"context": 2, "tensor": 2}, {})}
# Each rank has some columns of every expert.
OF_MIXTURES = {
    "tp2": ({"tensor": 2}, {}),
    "fsdp2 x tp2": TOPOLOGIES["fsdp2 x tp2"],
    "ep2 x tp2": ({"shards": 2, "experts": 2, "tensor": 2}, {"activation_checkpointing": True}),
    "ep2 of hsdp2 x tp2": ({"replicas": 2, "shards": 2, "experts": 2, "tensor": 2}, {}),
    "cp2 x tp2": ({"context": 2, "tensor": 2}, {}),
    "ep2 x tp2 sequence": ({"shards": 2, "experts": 2, "tensor": 2}, SEQUENCE),
}
# Three models in all topologies; of the others, what differs in them.
ALL = [
    *((model, name) for model in ("llama", "gemma2", "gpt_neox") for name in TOPOLOGIES),
    *((model, name) for model in ("qwen3", "olmo2") for name in ("tp2", "fsdp2 x tp2")),
    *((model, name) for model in ("llama", "gemma2", "gpt_neox") for name in BY_SEQUENCE),
    *((model, "tp2 sequence") for model in ("qwen3", "olmo2")),
    *((model, name) for model in ("llama", "gemma2", "gpt_neox") for name in BY_TOKENS),
    *(("gemma2", name) for name in BY_MORE),
    *((model, "pp2") for model in ("llama", "gemma2", "gemma3_text", "glm4", "gpt_neox")),
    ("gemma3_text", "pp2 interleaved"),
    *(("gemma2", name) for name in ("pp2 x fsdp2", "pp2 x tp2", "pp2 x cp2")),
    ("qwen3_moe", "pp2 x ep2"),
    *((model, "cp2 x fsdp2") for model in OTHERS if not model.startswith("qwen3")),
    ("qwen3_5_text", "fsdp2"),
    *(("qwen3_moe", name) for name in BY_EXPERTS),
    *((model, "ep2 x fsdp2") for model in ("glm4_moe", "gpt_oss", "deepseek_v3")),
    *(("qwen3_moe", name) for name in OF_MIXTURES),
    *((model, "tp2") for model in ("mixtral", "qwen2_moe", "deepseek_v2")),
    ("olmoe", "fsdp2 x tp2"),
    ("deepseek_v3", "ep2 x tp2"),
    *(("qwen3_moe", name) for name in (*BY_SEQUENCE, "pp2 x tp2", "ep2 x tp2 sequence")),
    *((model, "tp2 sequence") for model in ("mixtral", "olmoe")),
    ("deepseek_v2", "fsdp2 x tp2 sequence"),  # a rotary part for all heads
    ("deepseek_v3", "ep2 x tp2 sequence"),  # the plan leaves attention whole
    ("qwen2_moe", "ep2 x tp2 sequence"),  # the plan leaves experts whole
]
MODELS |= OTHERS
TOPOLOGIES |= BY_LAYERS | BY_SEQUENCE | BY_TOKENS | BY_MORE | BY_EXPERTS | OF_MIXTURES


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @cache
    def directory(kind):
        shape = {key: value for key, value in (SHAPE | MODELS[kind]).items() if value is not None}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        made = tmp_path_factory.mktemp(kind)
        model.save_pretrained(made)
        # The grouped matrix products of experts have no float64.
        config = json.loads((made / "config.json").read_text())
        config["experts_implementation"] = "eager"
        (made / "config.json").write_text(json.dumps(config))
        return made

    return directory


@pytest.fixture(scope="module")
def expected(directory):
    return cache(lambda kind: alone(directory(kind), STEPS))


@pytest.fixture(scope="module")
def plain(directory):
    def make(case):
        topology, options = TOPOLOGIES[case[1]]
        return topology, directory(case[0]), STEPS, options, torch.float64

    return Together({case: TOPOLOGIES[case[1]][0] for case in ALL}, make)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_ranks_compute_what_one_process_does(plain, expected, kind, name):
    check_alike(plain.results((kind, name)), TOPOLOGIES[name][0], expected(kind))


ADAPTER = Adapter(LoRAConfig(rank=2, alpha=4.0), seed=5)
ADAPTED = [  # what a plan does to a linear layer
    ("llama", {"tensor": 2}, {}),  # divides outputs and inputs
    ("llama", {"tensor": 2}, SEQUENCE),
    ("olmo2", {"tensor": 2}, {}),  # gathers outputs, and splits inputs
    ("olmo2", {"tensor": 2}, SEQUENCE),
    ("gemma2", {"shards": 2}, {"activation_checkpointing": True}),
    ("qwen3", {"shards": 2, "tensor": 2}, {}),
    ("gpt_oss", {"shards": 2, "experts": 2}, {}),  # attention alone
    ("deepseek_v2", {"shards": 2, "experts": 2, "tensor": 2}, {}),  # a rotary part for all heads
    ("deepseek_v2", {"tensor": 2}, SEQUENCE),
    ("gemma2", {"pipeline": 2}, {"activation_checkpointing": True}),
    ("llama", {"pipeline": 2, "shards": 2}, {}),
    ("olmo2", {"pipeline": 2, "tensor": 2}, SEQUENCE),
]
OF_LATENTS = LoRAConfig(
    rank=2, alpha=4.0, target_modules=("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
)


@pytest.mark.parametrize(("kind", "topology", "options"), ADAPTED)
def test_ranks_train_the_adapter_that_one_process_does(
    directory, kind, topology, options, tmp_path
):
    adapter = Adapter(OF_LATENTS, seed=5) if kind == "deepseek_v2" else ADAPTER
    expected = alone(directory(kind), STEPS, adapter=adapter)
    arguments = (topology, directory(kind), STEPS, options, torch.float64, tmp_path, False, adapter)
    world = Topology(**topology).world_size
    results = run_ranks(world, "learners.spread_cases:spread", *arguments)
    check_alike(results, topology, expected)
    names = BlockFiles(tmp_path).blocks_by_name
    assert all("lora_" in name or name.endswith("head.weight") for name in names)
    moved = [name for name, weight in expected[1].items() if ".lora_B." in name and weight.any()]
    assert len(moved) == (8 if kind in ("gpt_oss", "deepseek_v2") else 14)


EP2 = {"shards": 2, "experts": 2}
OF_EXPERTS = LoRAConfig(
    rank=2,
    alpha=4.0,
    target_modules=("q_proj", "o_proj"),
    target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)


@pytest.mark.parametrize(
    ("kind", "topology", "options", "later"),
    [
        ("qwen3_moe", {"shards": 2}, {"activation_checkpointing": True}, {"shards": 2}),
        ("gpt_oss", {"context": 2, "shards": 2}, {}, {"context": 2, "shards": 2, "experts": 4}),
        # One stage has no experts.
        ("qwen3_moe", {"pipeline": 2}, {"activation_checkpointing": True}, {"pipeline": 2}),
        ("gpt_oss", EP2, {"activation_checkpointing": True}, EP2),
        ("qwen3_moe", {"shards": 4, "experts": 2}, {}, {"replicas": 2, **EP2}),
        ("qwen3_moe", {"pipeline": 2, **EP2}, {}, {"pipeline": 2, "shards": 2}),
        ("qwen3_moe", {"tensor": 2}, {"activation_checkpointing": True}, EP2),
        ("qwen3_moe", {"tensor": 2, **EP2}, SEQUENCE, {"tensor": 2, **EP2}),
    ],
)
def test_ranks_train_the_adapters_of_experts_that_one_process_does(
    directory, kind, topology, options, later, tmp_path
):
    """And go on from a checkpoint, which one process reads too."""
    adapter = Adapter(OF_EXPERTS, seed=5)
    expected = alone(directory(kind), STEPS, adapter=adapter)
    saved, world = (tmp_path, False, adapter), Topology(**topology).world_size
    arguments = (topology, directory(kind), STEPS, options, torch.float64, *saved)
    results = run_ranks(world, "learners.spread_cases:spread", *arguments, OPTIMIZER, later)
    check_alike(results, later, expected)
    moved = [name for name in expected[1] if "experts" in name and ".lora_B." in name]
    assert len(moved) == (4 if kind == "gpt_oss" else 2)
    assert all(expected[1][name].any() for name in moved)
    policy = TransformersPolicy.load(directory(kind), dtype=torch.float64)
    policy.attach(adapter)
    export_saved(policy, tmp_path, tmp_path / "exported")
    merged = dict(TransformersPolicy.load(tmp_path / "exported").canonical_weights())
    base = dict(policy.canonical_weights())
    name = "model.layers.1.mlp.experts.down_proj"
    assert not torch.allclose(merged[name], base[name].float())


PATTERNS = ("model.embed_tokens", "model.layers.0", "*.input_layernorm.weight")


@pytest.mark.parametrize(
    ("kind", "topology"), [("llama", {"tensor": 2}), ("gemma2", {"pipeline": 2, "shards": 2})]
)
def test_ranks_freeze_what_one_process_does(directory, kind, topology):
    """The first stage of a pipeline trains nothing."""
    arguments = (topology, directory(kind), STEPS, {}, torch.float64, None, False, PATTERNS)
    world = Topology(**topology).world_size
    results = run_ranks(world, "learners.spread_cases:spread", *arguments)
    check_alike(results, topology, alone(directory(kind), STEPS, adapter=PATTERNS))


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_a_divided_model_is_loaded_with_frozen_norms(directory, options):
    frozen = [
        run_ranks(2, "learners.spread_cases:frozen_names", directory("llama"), own, PATTERNS)
        for own in (options, {"dp_shard": 2})
    ]
    assert set().union(*frozen[0]) == set(frozen[1][0])


def test_an_adapter_of_stacked_experts_is_refused(directory):
    policy = TransformersPolicy.load(directory("qwen3_moe"))
    with pytest.raises(ModelError, match=r"which Qwen3Moe.* k_proj") as caught:
        policy.attach(ADAPTER)
    assert "gate_proj" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "topology"),
    [("gpt_neox", {"shards": 2, "tensor": 2}), ("gpt_oss", {"shards": 2, "experts": 2})],
)
def test_muon_on_ranks_takes_the_steps_of_one_process(directory, kind, topology):
    arguments = (topology, directory(kind), STEPS, {}, torch.float64, None, False, None, MUON)
    world = Topology(**topology).world_size
    results = run_ranks(world, "learners.spread_cases:spread", *arguments)
    check_alike(results, topology, alone(directory(kind), STEPS, optimizer=MUON))


def test_muon_leaves_stacked_biases_of_experts_alone(directory):
    matrices = TransformersPolicy.load(directory("gpt_oss")).matrices()
    assert not [name for name in matrices if ".experts." in name]
    assert "model.model.layers.0.mlp.router.weight" in matrices


@pytest.mark.parametrize(
    ("topology", "later"),
    [
        ({"shards": 4, "experts": 2}, {"shards": 4, "experts": 4}),
        ({"shards": 2, "experts": 2, "tensor": 2}, {"shards": 4, "experts": 4}),
    ],
)
def test_ranks_with_other_experts_go_on_from_a_checkpoint(directory, tmp_path, topology, later):
    source = directory("qwen3_moe")
    arguments = (topology, source, 2, {}, torch.float64, tmp_path, False, None, OPTIMIZER, later)
    results = run_ranks(4, "learners.spread_cases:spread", *arguments)
    check_alike(results, later, alone(source, 2))
    # One process reads it too.
    policy = TransformersPolicy.load(source, dtype=torch.float64)
    export_saved(policy, tmp_path, tmp_path / "exported")
    exported = TransformersPolicy.load(tmp_path / "exported")
    expected = alone(source, 1)[1]
    for name, weight in exported.canonical_weights():
        torch.testing.assert_close(weight, expected[name].float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("topology", [EP2, {"tensor": 2}])
def test_float32_agrees_to_rounding(directory, topology, tmp_path):
    """With grouped matrix products, which have no float64, and which tensor parallelism makes too
    narrow here."""
    source = shutil.copytree(directory("qwen3_moe"), tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    del config["experts_implementation"]
    (source / "config.json").write_text(json.dumps(config))
    results = run_ranks(2, "learners.spread_cases:spread", topology, source, 3, {}, torch.float32)
    check_alike(results, topology, alone(source, 3, dtype=torch.float32), rtol=1e-5)


CHANGES = [
    (
        {"model.layers.*.self_attn.q_norm": None},
        "changes what the model computes (model.layers.0.self_attn.q_norm.weight): set learner",
    ),
    ({"model.layers.*.mlp.down_proj": None}, "can't be followed ("),
    (
        {"lm_head": None, "model.embed_tokens": "embedding_rowwise"},
        "divides weights that other modules share: set",
    ),
]


STACKED = "model.layers.*.mlp.experts"
CHANGES_OF_EXPERTS = [
    ({STACKED: None}, "gate_up_proj in the style 'packed_colwise', which is not supported: set"),
    ({f"{STACKED}.down_proj": "colwise"}, "'colwise', which is not supported for experts: set"),
    (
        {f"{STACKED}.gate_up_proj": None, f"{STACKED}.down_proj": None},
        "divides model.layers.1.mlp.experts, but none of its parameters: set",
    ),
    ({f"{STACKED}.down_proj": None}, "can't compute model.layers.1.mlp.experts ("),
    # What the plan of GLM-4-MoE comes without.
    (
        {"model.layers.*.self_attn.q_norm": None},
        "changes what the model computes (model.layers.0.self_attn.q_norm.weight): set learner",
    ),
]


@pytest.mark.parametrize(
    ("kind", "changes"), [("qwen3", CHANGES), ("qwen3_moe", CHANGES_OF_EXPERTS)]
)
def test_a_plan_that_changes_the_model_is_refused(directory, kind, changes):
    rules, messages = zip(*changes, strict=True)
    for said in run_ranks(2, "learners.spread_cases:refusals", directory(kind), rules):
        for error, message in zip(said, messages, strict=True):
            assert message in error


def test_a_block_that_divided_tokens_change_is_refused(directory):
    """Its outputs stay whole where a rank has some tokens."""
    rules = {"model.layers.*.mlp.down_proj": "colwise_gather_output"}
    arguments = (
        directory("llama"),
        [
            rules
            | {"model.layers.*.mlp.gate_proj": "colwise_rep"}
            | {"model.layers.*.mlp.up_proj": "colwise_rep"}
        ],
        True,
    )
    for said in run_ranks(2, "learners.spread_cases:refusals", *arguments):
        assert "learner.sequence_parallel, c" in said[0]
        assert said[0].endswith("): remove learner.sequence_parallel")


def test_a_division_by_tokens_that_changes_the_model_is_refused(directory):
    for said in run_ranks(2, "learners.spread_cases:refused_tokens", directory("gemma2")):
        assert "computes something else when its tokens are divided over ranks" in said


def test_tokens_of_layers_that_remember_are_not_divided(directory):
    recurrent = TransformersPolicy.load(directory("qwen3_5_text"))
    with pytest.raises(ModelError, match="has layers of linear_attention, which can't be divided"):
        check_token_division(recurrent)
    stretched = TransformersPolicy.load(directory("llama"))
    check_token_division(stretched)
    stretched.text_config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(ModelError, match=r"\(dynamic\) depends on the length of the context"):
        check_token_division(stretched)


def test_layers_that_share_weights_stay_on_one_rank(directory):
    policy = TransformersPolicy.load(directory("llama"))
    halves = StageIndex(0, 2)
    check_layer_division(policy, halves)
    first, last = policy.layers()
    last.mlp = first.mlp
    with pytest.raises(ModelError, match=r"share weights: set learner\.pipeline_parallel=1, and"):
        check_layer_division(policy, halves)
