"""What `test_vllm_real.py` does with vLLM's sampler and its further arguments, each in a process of
its own: `python vllm_sampling_play.py NAME [ARGUMENT...]`."""

import asyncio
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from direct_link import DirectWeightSync
from vllm_play import Weights, all_of, furthest, main, policy, shake, started

from ratchet.errors import ConfigError
from ratchet.generators.vllm.arguments import KEYS, REASONS, parse_arguments
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
        ({"speculative_config": 3}, "is no mapping"),
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
    model, draft = policy(), policy()
    with tempfile.TemporaryDirectory() as folder:
        shake(draft, 9)
        draft.save(Path(folder))
        settings = {
            "ngram": NGRAM,
            "draft_model": {"method": "draft_model", "model": folder, "num_speculative_tokens": 2},
        }[method]
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


def moments(model, prompt, tokens, temperature):
    """Of the logprob of a token drawn at each position: expectation and variance."""
    whole = torch.tensor([*prompt, *tokens.tolist()])
    with torch.no_grad():
        hidden = model.hidden(whole, torch.arange(len(whole)), [len(whole)])
        logprobs = (model.logits(hidden)[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    mean = (logprobs.exp() * logprobs).sum(-1)
    return mean.numpy(), ((logprobs.exp() * logprobs.square()).sum(-1) - mean.square()).numpy()


if __name__ == "__main__":
    main(globals())
