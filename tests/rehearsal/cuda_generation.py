"""Generators on the accelerator draw the CPU's tokens, with every sampling option: in float32, but
where a test has `rounding`."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from generators.engine.test_engine import mixed_samplings, prompts_of

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.kernels import bfloat16
from ratchet.models.load import init_policy, load_transformers_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.types import Sampling

DEVICES = ("cpu", "cuda:1")
TOKENIZER = character_tokenizer("0123456789+-=")
SHAPE = DecoderConfig(TOKENIZER.vocab_size, 64, 2, 4, 2, 32, 96, max_positions=160, init_std=0.2)
EXPERTS = replace(
    SHAPE, family="qwen3_moe", n_experts=4, experts_per_token=2, expert_intermediate_size=48
)
COUNT = 12
PROMPTS = [[token % SHAPE.vocab_size for token in prompt] for prompt in prompts_of(COUNT)]
SAMPLINGS = {
    "filters and temperatures": mixed_samplings(COUNT, longest=24),
    "stop ids": [
        Sampling(max_new_tokens=24, seed=i, stop_ids=tuple(range(i % 3, 9))) for i in range(COUNT)
    ],
    "stop strings": [Sampling(max_new_tokens=24, seed=i, stop=("1", "23")) for i in range(COUNT)],
    "equal prompts": [Sampling(max_new_tokens=24, seed=i) for i in range(COUNT)],
}


@pytest.fixture
def rounding():
    """Products in bfloat16, as in runs on the accelerator; `torch_kernels` turns them off."""
    bfloat16.set_enabled(True, on_cpu=False)


def generate(device, samplings, *, shape=SHAPE, prompts=PROMPTS, **keys):
    policy = init_policy(shape, seed=0, device=device)
    config = EngineConfig(kv_cache_gib=0.01, **keys)
    engine = EmbeddedEngine(config, policy, TOKENIZER)
    return engine.generate_all(prompts, samplings)


def assert_same(completions, expected):
    assert len(completions) == len(expected)
    for completion, reference in zip(completions, expected, strict=True):
        assert completion.tokens.tolist() == reference.tokens.tolist()
        assert completion.stop is reference.stop
        for name in ("logprobs", "log_kept_mass"):
            np.testing.assert_allclose(
                getattr(completion, name), getattr(reference, name), rtol=0, atol=1e-5
            )
        if reference.routes is not None:
            assert completion.routes.tolist() == reference.routes.tolist()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_engine_draws_the_cpus_tokens(name):
    prompts = [PROMPTS[0]] * COUNT if name == "equal prompts" else PROMPTS
    # Fewer slots than requests: some wait, and fill the slots of those that have ended.
    results = [
        generate(device, SAMPLINGS[name], prompts=prompts, max_running=5) for device in DEVICES
    ]
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", [*SAMPLINGS, "routes of experts"])
def test_replayed_steps_give_the_bits_of_steps_that_are_not_captured(name, rounding):
    """In bfloat16. A capture refuses every wait and every copy to or from the host."""
    # Requests may leave a step later, and rows of the CPU's products must not depend on others.
    shape, samplings, sizes = SHAPE, SAMPLINGS.get(name), {"max_running": 5, "row_multiple": 16}
    if samplings is None:
        shape, sizes = EXPERTS, {}
        samplings = [Sampling(max_new_tokens=24, seed=i, routes=True) for i in range(COUNT)]
    results = []
    for captures in (False, True):
        policy = init_policy(shape, seed=0, device="cuda:1")
        config = EngineConfig(kv_cache_gib=0.01, **sizes)
        engine = EmbeddedEngine(config, policy, TOKENIZER)
        graphs = engine.core.graphs
        assert graphs is not None
        if not captures:
            engine.core.graphs = None
        results.append(engine.generate_all(PROMPTS, samplings))
        assert (graphs.replays > 10) == captures
    for completion, reference in zip(*results, strict=True):
        assert completion.tokens.tolist() == reference.tokens.tolist()
        assert completion.stop is reference.stop
        assert completion.logprobs.tolist() == reference.logprobs.tolist()
        if reference.routes is not None:
            assert completion.routes.tolist() == reference.routes.tolist()


def test_the_cache_leaves_room_for_the_learner():
    budgets = []
    for is_trained in (False, True):
        policy = init_policy(SHAPE, seed=0, device="cuda:1").requires_grad_(is_trained)
        budgets.append(EmbeddedEngine(EngineConfig(), policy).core.limits.kv_bytes)
    count = sum(parameter.numel() for parameter in policy.parameters())
    # Gradients and moments, 12 bytes; half of what remains is for activations.
    assert budgets[0] - budgets[1] == pytest.approx(6 * count, rel=0.5)


def test_a_step_in_float32_with_experts_is_not_captured():
    policy = init_policy(EXPERTS, seed=0, device="cuda:1")
    engine = EmbeddedEngine(EngineConfig(kv_cache_gib=0.01), policy)
    assert engine.core.graphs is None


def test_the_bfloat16_engine_and_the_learners_autocast_agree(rounding):
    policy = init_policy(SHAPE, seed=0, device="cuda:1")
    engine = EmbeddedEngine(EngineConfig(kv_cache_gib=0.01), policy)
    assert engine.core.runner.cast is not None
    # The parity check would name another format as the cause of any difference.
    assert engine.precision is None
    completion = engine.generate_all([PROMPTS[0]], [Sampling(max_new_tokens=24, seed=1)])[0]
    tokens = torch.tensor([*PROMPTS[0], *completion.tokens.tolist()])
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        hidden = policy.hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
    scores = policy.logits(hidden).detach().log_softmax(-1)[len(PROMPTS[0]) - 1 : -1].cpu()
    expected = scores.gather(1, tokens[len(PROMPTS[0]) :, None])[:, 0].numpy()
    assert np.abs(completion.logprobs - expected).mean() < 0.02


def test_the_engine_records_the_routes_of_experts():
    samplings = [Sampling(max_new_tokens=9, seed=i, routes=i % 2 == 0) for i in range(COUNT)]
    results = [generate(device, samplings, shape=EXPERTS) for device in DEVICES]
    assert results[1][0].routes is not None
    assert_same(results[1], results[0])


def test_the_engine_goes_on_with_new_weights():
    """With keys computed anew, an abort, and an adapter that is trained."""

    async def run(device):
        policy = init_policy(SHAPE, seed=0, device=device)
        policy.attach(Adapter(LoRAConfig(rank=2, alpha=4.0), seed=1))
        config = EngineConfig(kv_cache_gib=0.01, keep_kv=False)
        engine = EmbeddedEngine(config, policy, TOKENIZER)
        running = asyncio.gather(
            *(engine.generate(prompt, Sampling(max_new_tokens=24, seed=3)) for prompt in PROMPTS)
        )
        for _ in range(4):
            await asyncio.sleep(0)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(0.9)
        await engine.commit(1)
        return await running

    expected, completions = (asyncio.run(run(device)) for device in DEVICES)
    assert_same(completions, expected)
    assert any(set(completion.versions.tolist()) == {0, 1} for completion in completions)


def test_a_model_of_transformers_draws_the_cpus_tokens(tmp_path):
    from ratchet.generators.config import HFConfig
    from ratchet.generators.hf import HFGenerator

    init_policy(SHAPE, seed=0).save(tmp_path)
    samplings = mixed_samplings(COUNT, longest=8)

    async def run(device):
        policy = load_transformers_policy(tmp_path, device=device)
        generator = HFGenerator(HFConfig(), policy, TOKENIZER)
        pairs = zip(PROMPTS, samplings, strict=True)
        return await asyncio.gather(*(generator.generate(*pair) for pair in pairs))

    expected, completions = (asyncio.run(run(device)) for device in DEVICES)
    assert_same(completions, expected)
