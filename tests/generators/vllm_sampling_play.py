"""What `test_vllm_real.py` does with vLLM's sampler and its further arguments, each in a process of
its own."""

import asyncio
import json
import re
import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from generators.direct_link import DirectWeightSync
from generators.vllm_play import RECIPE, Weights, all_of, furthest, play, policy, shake, started
from models.convert.conftest import save_reference
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ratchet.config.loader import load_config
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.errors import ConfigError
from ratchet.generators.engine.sampler import SamplingSettings, count_kept
from ratchet.generators.vllm.arguments import KEYS, REASONS, parse_arguments
from ratchet.generators.vllm.sampler import report_unfiltered
from ratchet.models.decoder import Decoder
from ratchet.models.load import load_policy
from ratchet.models.policy import DecoderPolicy
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run
from ratchet.types import Sampling

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
LOOPS = [[1, 2, 3] * 5, [4] * 40, list(range(5, 60)), [7, 7, 8]]


async def knows_the_refused_arguments():
    """Every argument that Ratchet refuses is one of vLLM's, so that none is refused by a slip."""
    from vllm.engine.arg_utils import EngineArgs

    assert not {*KEYS, *REASONS} - {*EngineArgs.__dataclass_fields__}
    assert parse_arguments({"kv_cache_dtype": None, "enable_prefix_caching": False}) == {
        "enable_prefix_caching": False
    }
    assert parse_arguments({"max_num_batched_tokens": "4k"}) == {"max_num_batched_tokens": 4000}
    assert parse_arguments({"speculative_config": NGRAM}) == {"speculative_config": NGRAM}
    for arguments, reason in [
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype: vLLM refuses 'fp9'"),
        ({"kv_cache_dtyp": "fp8"}, "did you mean 'kv_cache_dtype'"),
        ({"max_num_batched_tokens": "a"}, "human_readable_int"),
        ({"enable_expert_parallel": 3}, "ignored explicit argument '3'"),
        ({"compilation_config": {"level": 3}}, "Unexpected keyword argument"),
        ({"speculative_config": 3}, "is not a mapping"),
        ({"speculative_config": {"metod": "ngram"}}, "did you mean 'method'"),
        ({"speculative_config": {"method": "ngrm"}}, "method: vLLM refuses 'ngrm'"),
        ({"speculative_config": {"num_speculative_tokens": "x"}}, "valid integer"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            parse_arguments(arguments)


async def takes_arguments(engine):
    """Prompts that have more tokens together than a step may have wait for the next step."""
    model = policy()
    arguments = {"enable_prefix_caching": False, "max_num_batched_tokens": 256}
    prompts = [[i, *range(1, 60)] for i in range(12)]
    async with started(model, engine, arguments=arguments) as generator:
        config = generator.core.llm.vllm_config
        assert config.scheduler_config.max_num_batched_tokens == 256
        assert not config.cache_config.enable_prefix_caching
        completions = await all_of(generator, Sampling(max_new_tokens=24, seed=3), prompts)
        assert furthest(model, prompts, completions) < 1e-4


async def speculates(engine, method):
    """Drafted tokens have the learner's logprobs at every temperature, before and after a push, and
    are as frequent as their probabilities say."""
    with tempfile.TemporaryDirectory() as folder:
        model = {"mtp": save_glm, "draft_model": save_draft}.get(method, lambda _: policy())(folder)
        settings = (
            NGRAM
            if method == "ngram"
            else {"method": method, "model": folder, "num_speculative_tokens": 2}
        )
        async with started(model, engine, arguments={"speculative_config": settings}) as generator:
            steps = count_steps(generator)
            await drafts_as_the_learner_scores(generator, model)
            shake(model, 1)
            await DirectWeightSync(Weights(model), generator).push(1)
            await drafts_as_the_learner_scores(generator, model)
            steps.clear()
            greedy = await generator.generate([4] * 40, Sampling(temperature=0, max_new_tokens=64))
            if engine == "sync":
                assert len(steps) < len(greedy.tokens), "no drafted token was accepted"


def save_draft(folder):
    """A policy, beside another that drafts."""
    draft = policy()
    shake(draft, 9)
    draft.save(Path(folder))
    return policy()


def save_glm(folder):
    """A GLM-4-MoE whose layer for multi-token prediction predicts the token before once more."""
    config = AutoConfig.for_model(
        "glm4_moe",
        vocab_size=67,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    save_reference(AutoModelForCausalLM.from_config(config), Path(folder), mtp_layers=1)
    file = Path(folder) / "model.safetensors"
    weights = load_file(file)
    prefix = "model.layers.2."
    for name in weights:
        if name.startswith(prefix) and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
        if name.startswith(prefix) and name.endswith("norm.weight"):
            weights[name].fill_(1)
    weights[f"{prefix}eh_proj.weight"] = torch.cat([torch.zeros(64, 64), torch.eye(64)], dim=1)
    save_file(weights, file, metadata={"format": "pt"})
    return load_policy(Path(folder))


async def follows_grammars(engine):
    """Each text follows its grammar, others are free, and logprobs are those under the mask."""
    tokenizer = byte_tokenizer()
    shape = DecoderConfig(
        tokenizer.vocab_size, 64, 2, 4, 2, 32, 96, max_positions=256, init_std=0.2
    )
    model = DecoderPolicy(Decoder(shape).init_weights(0))
    prompt, stop_ids = tokenizer.encode("Say:"), tokenizer.eos_ids
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}  # fmt: skip
    sampling = Sampling(max_new_tokens=40, seed=3, stop_ids=stop_ids)
    async with started(model, engine, tokenizer=tokenizer) as generator:
        one, two, three, free = await asyncio.gather(
            generator.generate(prompt, replace(sampling, structured={"json": schema})),
            generator.generate(prompt, replace(sampling, structured={"choice": ["yes", "no"]})),
            generator.generate(
                prompt, replace(sampling, structured={"grammar": 'start: "x" /[ab]/'})
            ),
            generator.generate(prompt, sampling),
        )
        texts = [tokenizer.decode(c.tokens.tolist()) for c in (one, two, three)]
        assert json.loads(texts[0])["a"] in (1, 2)
        assert texts[1] in ("yes", "no")
        assert texts[2] in ("xa", "xb")
        assert all(c.stop == "stop_token" for c in (one, two, three)), (one, two, three)
        assert one.logprobs[-1] == 0  # only the end is allowed
        assert (free.logprobs < 0).all()
        with pytest.raises(ConfigError, match="regular expression can't be followed"):
            await generator.generate(prompt, replace(sampling, structured={"regex": "(a"}))
        with pytest.raises(ConfigError, match="tokenizer's EOS"):
            await generator.generate(prompt, Sampling(structured={"regex": "a"}))


def count_steps(generator):
    """A list that gets an item with each step of an engine in this process."""
    steps = []
    if hasattr(generator.core, "step"):
        step = generator.core.step
        generator.core.step = lambda: (steps.append(1), step())[1]
    return steps


async def drafts_as_the_learner_scores(generator, model):
    for temperature in (0.0, 0.3, 1.0):
        sampling = Sampling(temperature=temperature, max_new_tokens=48, seed=3)
        completions = await all_of(generator, sampling, LOOPS)
        assert furthest(model, LOOPS, completions, temperature or 1.0) < 1e-4
    prompts = LOOPS * 32
    sampling = Sampling(temperature=0.3, max_new_tokens=48)
    completions = await asyncio.gather(
        *(generator.generate(prompt, sampling.seeded(seed)) for seed, prompt in enumerate(prompts))
    )
    surprises, variances = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        mean, variance = moments(model, prompt, completion.tokens, 0.3)
        surprises.append(completion.logprobs - mean)
        variances.append(variance)
    z = np.concatenate(surprises).sum() / np.sqrt(np.concatenate(variances).sum())
    sys.stdout.write(f"tokens' logprobs are {z:.2f} standard errors off their expectation\n")
    assert abs(z) < 4


def score(model, prompt, tokens, temperature):
    """The learner's logprobs of every token of the vocabulary, at each drawn position."""
    whole = torch.tensor([*prompt, *tokens.tolist()])
    with torch.no_grad():
        hidden = model.hidden(whole, torch.arange(len(whole)), [len(whole)])
        return (model.logits(hidden)[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def moments(model, prompt, tokens, temperature):
    """Of the logprob of a token drawn at each position: expectation and variance."""
    logprobs = score(model, prompt, tokens, temperature)
    mean = (logprobs.exp() * logprobs).sum(-1)
    return mean.numpy(), ((logprobs.exp() * logprobs.square()).sum(-1) - mean.square()).numpy()


# --- top-k, top-p and min-p

FILTERS = [
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.05},
]


async def filters(engine):
    """Logprobs are the learner's before filters, and the kept mass is what Ratchet's own filters
    keep of the learner's probabilities; so in a batch of different filters, and after a push."""
    model = policy()
    async with started(model, engine) as generator:
        for version in (0, 1):
            if version:
                shake(model, version)
                await DirectWeightSync(Weights(model), generator).push(version)
            for temperature in (0.7, 1.0):
                await filters_as_the_learner(generator, model, temperature)


async def filters_as_the_learner(generator, model, temperature):
    samplings = [Sampling(temperature=temperature, max_new_tokens=40, **keys) for keys in FILTERS]
    samplings += [Sampling(temperature=temperature, max_new_tokens=40)] * 2
    asked = [(prompt, s.seeded(i)) for i, s in enumerate(samplings) for prompt in LOOPS]
    greedy, *completions = await asyncio.gather(
        generator.generate(LOOPS[0], Sampling(temperature=0, top_p=0.5, max_new_tokens=40)),
        *(generator.generate(*one) for one in asked),
    )
    assert not greedy.log_kept_mass.any()
    assert furthest(model, LOOPS[:1], [greedy]) < 1e-4
    prompts = [prompt for prompt, _ in asked]
    assert furthest(model, prompts, completions, temperature) < 1e-4
    worst = 0.0
    for (prompt, sampling), completion in zip(asked, completions, strict=True):
        if not sampling.has_filters:
            assert not completion.log_kept_mass.any()
            continue
        probs_TV = score(model, prompt, completion.tokens, temperature).exp()
        kept_TV = keep(probs_TV, [sampling] * len(probs_TV))
        drawn_T = torch.from_numpy(completion.tokens)[:, None]
        assert kept_TV.gather(1, drawn_T).all(), "a token was drawn that the filters remove"
        mass_T = torch.where(kept_TV, probs_TV, 0.0).sum(-1)
        assert float(mass_T.min()) < 0.99, "the filters removed nothing"
        worst = max(worst, float(np.abs(mass_T.log().numpy() - completion.log_kept_mass).max()))
    sys.stdout.write(f"log of the kept mass is {worst:.1e} off the learner's\n")
    assert worst < 1e-4


def keep(probs_NV, samplings):
    """The tokens that the embedded engine's filters keep."""
    settings = SamplingSettings.from_samplings(samplings, probs_NV.shape[1], torch.device("cpu"))
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    count_N = count_kept(sorted_NV, sorted_NV.cumsum(-1), settings.filters)
    ranks = torch.arange(probs_NV.shape[1])
    return torch.zeros_like(probs_NV, dtype=torch.bool).scatter(
        1, order_NV, ranks < count_N[:, None]
    )


async def keeps_the_same_tokens():
    """vLLM's own filters keep what the embedded engine's keep, in whatever combination. A row may
    differ in the token at the edge of top-p, where a sum of float32 decides."""
    import_module("vllm.platforms").current_platform.import_kernels()
    module = import_module("vllm.v1.sample.sampler")
    sampler = module.Sampler(logprobs_mode="processed_logprobs")
    report_unfiltered(sampler)
    rng = np.random.default_rng(0)
    n_rows = n_different = 0
    for vocab_size, scale in [(67, 2.0), (1000, 3.0), (32000, 4.0)]:
        for _ in range(20):
            samplings = [
                Sampling(
                    temperature=float(rng.choice([0.3, 1.0, 1.7])),
                    top_k=int(rng.choice([1, 5, 40])),
                    top_p=float(rng.choice([0.1, 0.5, 0.9, 0.99, 1.0])),
                    min_p=float(rng.choice([0.0, 0.02, 0.3])),
                )
                for _ in range(48)
            ]
            logits_NV = torch.from_numpy(
                rng.normal(0, scale, (len(samplings), vocab_size)).astype(np.float32)
            )
            temperature_N = torch.tensor([s.temperature for s in samplings])
            scaled_NV = logits_NV / temperature_N[:, None]
            probs_NV = scaled_NV.softmax(-1)
            metadata = make_metadata(samplings, vocab_size)
            tokens_N, pair_N2V = sampler.sample(logits_NV.clone(), metadata)
            torch.testing.assert_close(pair_N2V[:, 0], scaled_NV.log_softmax(-1))
            kept_NV = pair_N2V[:, 1] > -torch.inf
            assert kept_NV.gather(1, tokens_N[:, None]).all()
            differs_NV = kept_NV != keep(probs_NV, samplings)
            assert int(differs_NV.sum(-1).max()) <= 1
            n_rows += len(samplings)
            n_different += int(differs_NV.any(-1).sum())
            outputs = sampler.gather_logprobs(pair_N2V, 1, token_ids=tokens_N)
            log_mass_N = outputs.logprobs[:, 0] - outputs.logprobs[:, 1]
            mass_N = torch.where(kept_NV, probs_NV, 0.0).sum(-1)
            torch.testing.assert_close(log_mass_N, mass_N.log(), rtol=0, atol=2e-5)
    sys.stdout.write(f"{n_different} of {n_rows} rows differ in a token at the edge\n")
    assert n_different <= n_rows / 500
    ties_NV = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    samplings = [Sampling(top_k=2)]
    _, pair_N2V = sampler.sample(ties_NV.clone(), make_metadata(samplings, 4))
    # vLLM keeps all that tie with the last, the embedded engine the first of them.
    assert (pair_N2V[0, 1] > -torch.inf).tolist() == [True, True, True, False]
    assert keep(ties_NV.softmax(-1), samplings)[0].tolist() == [True, True, False, False]


def make_metadata(samplings, vocab_size):
    """vLLM's metadata of a step, with its processor of min-p."""
    processor = object.__new__(
        import_module("vllm.v1.sample.logits_processor.builtin").MinPLogitsProcessor
    )
    processor.min_p_count = 1
    processor.min_p = torch.tensor([[s.min_p] for s in samplings])
    processors = import_module("vllm.v1.sample.logits_processor.state").LogitsProcessors
    metadata = import_module("vllm.v1.sample.metadata").SamplingMetadata
    values = dict.fromkeys(metadata.__dataclass_fields__)
    return metadata(
        **values
        | {
            "temperature": torch.tensor([s.temperature for s in samplings]),
            "all_greedy": False,
            "all_random": True,
            "top_p": torch.tensor([s.top_p for s in samplings]),
            "top_k": torch.tensor([s.top_k for s in samplings], dtype=torch.int32),
            "generators": {},
            "max_num_logprobs": 1,
            "no_penalties": True,
            "logitsprocs": processors([processor]),
        }
    )


async def trains_with_filters():
    """The parity gate and the correction get the learner's logprobs in every step, in evaluation
    too."""
    keys = [
        "generator.kind=vllm",
        "generator.kv_cache_gib=0.1",
        "generator.enforce_eager=true",
        "sampling={temperature: 0.7, max_new_tokens: 5, top_p: 0.9, top_k: 8, min_p: 0.01}",
        "parity={every: 1, threshold: 1e-4}",
        "stages.grpo.steps=3",
        "stages.grpo.algorithm.correction={weight_high: 10}",
        "evaluation={tasks: 16, samples: 2}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE)
        config = load_config(recipe, keys)
    steps = []
    made = build_policy(config)
    try:
        for index in range(len(config.stages)):
            run = build_run(
                config, index, made, observers=[lambda step, numbers: steps.append(dict(numbers))]
            )
            await train(run)
            await run.close()
    finally:
        await made.close()
    parity = [step["parity/max"] for step in steps if "parity/max" in step]
    kept = [
        step["batch/correction/weight_mean"]
        for step in steps
        if "batch/correction/weight_mean" in step
    ]
    sys.stdout.write(f"parity/max {parity}, correction/weight_mean {kept}\n")
    assert len(parity) == len(kept) == 3
    assert max(parity) < 1e-4
    assert all(0.85 < weight < 1 for weight in kept), "the weight is the kept mass"


def run(words):
    play(globals(), words)
