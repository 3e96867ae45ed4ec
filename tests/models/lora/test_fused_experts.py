"""Adapters of fused experts, in models that transformers runs: `lora.target_parameters`."""

import asyncio
import json
from functools import cache, partial

import pytest
import torch
from commands.convert.test_command import run as convert
from learners.spread_cases import OPTIMIZER, VOCAB, alone, first, unrounded, weighed
from transformers import AutoConfig, AutoModelForCausalLM

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.errors import ConfigError, ModelError
from ratchet.generators.config import HFConfig
from ratchet.generators.hf import HFGenerator
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.load import init_policy
from ratchet.models.lora.decoder import Adapter, count_adapter_parameters
from ratchet.models.lora.files import load_adapter, save_adapter
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.types import Sampling
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver, WeightSender
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

pytestmark = [pytest.mark.needs("peft"), pytest.mark.medium]
RANK, EXPERTS = 2, 4
PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LORA = LoRAConfig(
    rank=RANK, alpha=4.0, target_modules=("q_proj", "o_proj"), target_parameters=PARAMETERS
)
ADAPTER = Adapter(LORA, seed=5)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
MODELS = {
    # [E, outputs, inputs], and a dense layer.
    "qwen3_moe": {
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "num_experts": EXPERTS,
        "mlp_only_layers": [0],
    },
    # [E, inputs, outputs], of which the shape of down_proj doesn't tell: it is square.
    "gpt_oss": {"intermediate_size": 16, "num_local_experts": EXPERTS, "sliding_window": 4},
}
TOKENS = torch.arange(12) * 5 % VOCAB


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @cache
    def make(kind):
        path = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **SHAPE, **MODELS[kind])
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.double().save_pretrained(path)
        character_tokenizer("0123456789+-*/=() abcd"[: VOCAB - 3]).save(path)
        return compute_without_groups(path)

    return make


def compute_without_groups(path):
    """The grouped matrix products of experts have no float64."""
    config = json.loads((path / "config.json").read_text())
    config["experts_implementation"] = "eager"
    (path / "config.json").write_text(json.dumps(config))
    return path


@unrounded()
def logits(policy):
    hidden = policy.hidden(TOKENS, torch.arange(len(TOKENS)), [len(TOKENS)])
    return policy.logits(hidden)


def adapted(path, dtype=torch.float64, adapter=ADAPTER):
    """A policy whose adapter changes what it computes."""
    policy = TransformersPolicy.load(path, dtype=dtype)
    policy.attach(adapter)
    torch.manual_seed(1)
    with torch.no_grad():
        for _, weight in policy.adapter_weights():
            weight.add_(torch.randn(weight.shape) * 0.2)
    return policy


def save(policy, directory):
    lora = policy.adapter.lora
    weights = dict(policy.adapter_weights())
    save_adapter(directory, policy.adapter, policy.resolve_adapter_layers(lora), weights)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_computes_what_the_merged_weights_do(directory, kind, tmp_path):
    whole = logits(TransformersPolicy.load(directory(kind), dtype=torch.float64))
    policy = TransformersPolicy.load(directory(kind), dtype=torch.float64)
    policy.attach(ADAPTER)
    assert torch.equal(logits(policy), whole)
    policy = adapted(directory(kind))
    expected = logits(policy)
    assert float((expected - whole).abs().max()) > 0.01
    with policy.without_adapter():
        assert torch.equal(logits(policy), whole)
    policy.save(tmp_path / "base")
    policy.save(tmp_path / "merged", policy.merged_weights())
    for name, wanted in (("base", whole), ("merged", expected)):
        path = compute_without_groups(tmp_path / name)
        again = logits(TransformersPolicy.load(path, dtype=torch.float64))
        torch.testing.assert_close(again, wanted, rtol=0, atol=1e-12)
    policy.merge()
    torch.testing.assert_close(logits(policy), expected, rtol=0, atol=1e-12)
    base = TransformersPolicy.load(directory(kind))
    assert list(policy.model.state_dict()) == list(base.model.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_modules": (), "rslora": True},
        {"target_parameters": ("experts.down_proj",)},
        {"target_parameters": ("model.layers.1.mlp.experts.gate_up_proj",)},
    ],
)
def test_peft_computes_what_its_files_say(directory, kind, changes, tmp_path):
    from peft import PeftModel

    policy = adapted(directory(kind), torch.float32, Adapter(LORA.model_copy(update=changes)))
    save(policy, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(directory(kind), dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path).eval()(input_ids=TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(policy), theirs, rtol=0, atol=1e-5)
    stored = load_adapter(tmp_path)
    assert stored.target_modules == tuple(sorted(policy.adapter.lora.target_modules))
    assert set(stored.adapter.lora.target_parameters) == set(policy.adapter.lora.target_parameters)
    lora, weights = policy.adapter.lora, dict(policy.canonical_weights())
    n_parameters = count_adapter_parameters(
        weights, lora.target_modules, lora.rank, policy.resolve_expert_factors(lora)
    )
    assert n_parameters == sum(weight.numel() for _, weight in policy.adapter_weights())


def expert_factors(policy, path):
    """The (name, parameter) of A [E, r, inputs] and of B [E, outputs, r], as peft has them: rows of
    one expert after those of another, and the columns of all experts for each rank."""
    named = {
        name.removeprefix("base_model.model."): parameter
        for (name, _), (_, parameter) in zip(
            policy.adapter_weights(), policy.trained_parameters(), strict=True
        )
    }
    return named[f"{path}.lora_A.weight"], named[f"{path}.lora_B.weight"]


def by_expert(a, b):
    for e in range(EXPERTS):
        yield a[e * RANK : (e + 1) * RANK], b[:, [k * EXPERTS + e for k in range(RANK)]]


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_that_the_merged_matrix_implies(directory, kind):
    policy, merged = adapted(directory(kind)), adapted(directory(kind))
    merged.merge()
    weights = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)
    for model in (policy, merged):
        (logits(model).log_softmax(-1) * weights).sum().backward()
    module = "model.layers.1.mlp.experts"
    for path, name in ((f"{module}.base_layer", "gate_up_proj"), (module, "down_proj")):
        whole = merged.model.get_parameter(f"{module}.{name}").grad
        a, b = expert_factors(policy, path)
        pairs = zip(by_expert(a, b), by_expert(a.grad, b.grad), strict=True)
        for e, ((a_e, b_e), (a_grad, b_grad)) in enumerate(pairs):
            gradient = whole[e].T if kind == "gpt_oss" else whole[e]
            scale = LORA.scale
            torch.testing.assert_close(a_grad, scale * b_e.T @ gradient, rtol=1e-6, atol=1e-12)
            torch.testing.assert_close(b_grad, scale * gradient @ a_e.T, rtol=1e-6, atol=1e-12)
        assert a.grad.any()
        assert b.grad.any()


def test_workers_with_copies_of_the_model_take_the_steps_of_one(directory):
    results = [alone(directory("gpt_oss"), 2, adapter=ADAPTER, workers=n) for n in (1, 2)]
    for name, weight in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], weight, rtol=1e-9, atol=1e-12)
        assert weight.any() or ".lora_B." not in name


@torch.no_grad()
def test_a_forward_sees_no_tensor_of_another_one(directory):
    """As of other threads. peft's own forward keeps what it computes until all forwards end."""
    policy, other = adapted(directory("gpt_oss")), adapted(directory("gpt_oss"))
    meanwhile = []

    def compute_twice(*_):
        if not meanwhile:
            meanwhile.append(logits(other))
            for _, weight in other.adapter_weights():
                weight.mul_(2)
            meanwhile.append(logits(other))

    experts = policy.model.get_submodule("model.layers.1.mlp.experts").get_base_layer()
    experts.register_forward_pre_hook(compute_twice)
    logits(policy)
    assert torch.equal(meanwhile[1], logits(other))
    assert not torch.equal(meanwhile[0], meanwhile[1])


def learner(path):
    policy, _ = first(path, torch.float32, ADAPTER)
    return LocalLearner(
        LocalConfig(micro_batch_tokens=40, activation_checkpointing=True),
        policy,
        optimizer=OPTIMIZER,
        total_steps=10,
    )


def step(made, number):
    batch, terms = weighed(number)
    terms = [term for term in terms if "values" not in term.needs]
    return dict(asyncio.run(made.update(batch, terms)))


@pytest.mark.parametrize("kind", MODELS)
def test_a_resumed_learner_has_the_same_bits_above_the_same_base(directory, kind, tmp_path):
    made, again = learner(directory(kind)), learner(directory(kind))
    plain = LocalLearner(
        LocalConfig(micro_batch_tokens=40), first(directory(kind), torch.float32)[0]
    )
    step(made, 0)
    made.save(tmp_path)
    again.load(tmp_path)
    assert step(made, 1) == step(again, 1)
    weights = dict(made.model.adapter_weights())
    assert all(torch.equal(weights[name], w) for name, w in again.model.adapter_weights())
    batch = weighed(0)[0]
    base = asyncio.run(made.score_base(batch, ["logprobs"]))["logprobs"]
    assert torch.equal(base, asyncio.run(plain.score(batch, ["logprobs"]))["logprobs"])
    assert not torch.equal(base, asyncio.run(made.score(batch, ["logprobs"]))["logprobs"])


@pytest.mark.parametrize("kind", MODELS)
def test_a_generator_receives_the_adapter(directory, kind):
    made = learner(directory(kind))
    generator = HFGenerator(HFConfig(), TransformersPolicy.load(directory(kind)))
    ends = LocalRank(WeightSender(made)), LocalRank(WeightReceiver(generator))
    link = SharedMemoryWeightSync(*ends, adapter=ADAPTER)
    asyncio.run(link.push(1))
    step(made, 0)
    asyncio.run(link.push(2))
    assert link.sent_bytes <= sum(weight.nbytes for _, weight in made.model.adapter_weights())
    assert asyncio.run(link.audit()) == []
    (completion,) = generator.generate_all([TOKENS.tolist()], [Sampling(max_new_tokens=6, seed=1)])
    tokens = torch.cat([TOKENS, torch.from_numpy(completion.tokens)])
    with torch.no_grad():
        hidden = made.model.hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
        rows = made.model.logits(hidden)[len(TOKENS) - 1 : -1].log_softmax(-1)
    expected = rows.gather(1, tokens[len(TOKENS) :, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, rtol=0, atol=1e-5)
    asyncio.run(link.close())


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_convert_merges_it_into_the_weights_of_files(directory, kind, tmp_path):
    """Qwen3-MoE's files have a matrix for each expert, and GPT-OSS's the fused ones."""
    policy = adapted(directory(kind))
    save(policy, tmp_path / "adapter")
    into = partial(convert, adapter=tmp_path / "adapter")
    into(directory(kind), tmp_path / "merged", "hf")
    merged = TransformersPolicy.load(
        compute_without_groups(tmp_path / "merged"), dtype=torch.float64
    )
    torch.testing.assert_close(logits(merged), logits(policy), rtol=0, atol=1e-6)
    kinds = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}
    shape = {**SHAPE, **MODELS[kind], kinds[kind]: EXPERTS + 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).save_pretrained(
        tmp_path / "other"
    )
    character_tokenizer("0123").save(tmp_path / "other")
    with pytest.raises(ModelError, match=r"another base model|which this model doesn't have"):
        into(tmp_path / "other", tmp_path / "never", "hf")


def test_what_is_no_fused_expert_is_refused(directory):
    policy = TransformersPolicy.load(directory("qwen3_moe"))
    unknown = LORA.model_copy(update={"target_parameters": ("mlp.experts.gate_proj",)})
    with pytest.raises(ConfigError, match=r"has mlp.experts.gate_up_proj, mlp.experts.down_proj$"):
        policy.attach(Adapter(unknown))
    dense = init_policy(DecoderConfig(29, 16, 2, 4, 2, 8, 24), seed=1)
    with pytest.raises(ConfigError, match="own decoder, which this model has, fuses none"):
        dense.attach(ADAPTER)
    with pytest.raises(ModelError, match=r"target_modules=\[q_proj, k_proj, v_proj, o_proj\]"):
        policy.attach(Adapter(LoRAConfig(target_parameters=PARAMETERS)))
    with pytest.raises(ValueError, match="leaves nothing to adapt"):
        LoRAConfig(target_modules=())


def test_muon_leaves_stacked_factors_alone(directory):
    policy = adapted(directory("gpt_oss"))
    assert not [name for name in policy.matrices() if ".experts." in name]
    assert "model.model.layers.0.self_attn.q_proj.lora_A.default.weight" in policy.matrices()
