"""Models that transformers runs, divided by the plans of their architectures, compute what one
process computes."""

from functools import cache

import pytest
import torch
from learners.ranks import run_ranks
from learners.spread_cases import MUON, VOCAB, alone, check_alike
from transformers import AutoConfig, AutoModelForCausalLM

from ratchet.learners.distributed.topology import Topology

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
TOPOLOGIES = {
    "fsdp2": ({"shards": 2}, {}),
    "tp2": ({"tensor": 2}, {}),
    "fsdp2 x tp2": (
        {"shards": 2, "tensor": 2},
        {"activation_checkpointing": True, "logprob_chunk_mib": 1},
    ),
    "hsdp2 x tp2": ({"replicas": 2, "tensor": 2}, {}),
}
QUICK = {("llama", "tp2"), ("gemma2", "tp2")}
ALL = [(model, name) for model in MODELS for name in TOPOLOGIES]
CASES = [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in ALL]


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
        return made

    return directory


@pytest.fixture(scope="module")
def expected(directory):
    return cache(lambda kind: alone(directory(kind), STEPS))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_ranks_compute_what_one_process_does(directory, expected, kind, name):
    topology, options = TOPOLOGIES[name]
    world = Topology(**topology).world_size
    results = run_ranks(
        world,
        "learners.spread_cases:spread",
        topology,
        directory(kind),
        STEPS,
        options,
        torch.float64,
    )
    # Some norms of transformers round to float32 whatever comes.
    check_alike(results, topology, expected(kind), rtol=1e-6 if kind == "gpt_neox" else 1e-5)


@pytest.mark.slow
def test_muon_on_ranks_takes_the_steps_of_one_process(directory):
    topology = {"shards": 2, "tensor": 2}
    arguments = (topology, directory("gpt_neox"), STEPS, {}, torch.float64, None, False, None, MUON)
    results = run_ranks(4, "learners.spread_cases:spread", *arguments)
    check_alike(results, topology, alone(directory("gpt_neox"), STEPS, optimizer=MUON))


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


def test_a_plan_that_changes_the_model_is_refused(directory):
    rules, messages = zip(*CHANGES, strict=True)
    for said in run_ranks(2, "learners.spread_cases:refusals", directory("qwen3"), rules):
        for error, message in zip(said, messages, strict=True):
            assert message in error
