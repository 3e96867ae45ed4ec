"""Several adapters served at once: each request gets what it gets alone, over weights that the
learner shares."""

import asyncio
from dataclasses import replace

import pytest
import torch
from generators.vllm.test_fused_experts import pushed
from models.lora.test_decoder import SHAPE, shaken
from models.lora.test_experts import SPARSE

from ratchet.config.lora import LoRAConfig
from ratchet.errors import ConfigError, ModelError
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.models.load import init_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.files import save_adapter
from ratchet.types import Sampling

pytestmark = pytest.mark.needs("peft")
CONFIG = EngineConfig(kv_cache_gib=0.01)
PROMPTS = [[1, 2, 3], [1, 2, 3], [7] * 20, [4, 5]]
SAMPLING = Sampling(max_new_tokens=12, seed=4)


@pytest.fixture(autouse=True, params=[False, True], ids=["by PyTorch", "by compiled kernels"])
def operations(request, kernels):
    kernels(request.param)


def policy(seed=None, shape=SHAPE, **lora):
    made = init_policy(shape, seed=1)
    if seed is not None:
        made.attach(Adapter(LoRAConfig(**{"rank": 2, "alpha": 3.0, **lora}), seed=seed))
        shaken(made, seed)
    return made


def saved(made, directory):
    save_adapter(
        directory,
        made.adapter,
        made.resolve_adapter_layers(made.adapter.lora),
        dict(made.adapter_weights()),
    )
    return directory


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Of other ranks, scales and maps."""
    path = tmp_path_factory.mktemp("adapters")
    made = {
        "one": policy(5),
        "two": policy(6, rank=3, rslora=True, target_modules=("v_proj", "down_proj")),
    }
    return {name: (saved(each, path / name), each) for name, each in made.items()}


def ask(engine, names, prompts=PROMPTS):
    return engine.generate_all(prompts, [replace(SAMPLING, adapter=name) for name in names])


def assert_same(a, b, tolerance=0.0):
    assert a.tokens.tolist() == b.tokens.tolist()
    assert float(abs(a.logprobs - b.logprobs).max()) <= tolerance


def test_an_adapter_that_is_not_finite_is_refused(adapters, tmp_path):
    made = policy(5)
    with torch.no_grad():
        next(iter(dict(made.adapter_weights()).values()))[0] = float("inf")
    engine = EmbeddedEngine(CONFIG, policy())
    with pytest.raises(ModelError, match=r"adapter 'bad': its weight '.*' isn't finite"):
        engine.add_adapter("bad", saved(made, tmp_path))


@pytest.mark.medium
def test_adapters_at_once_give_what_each_gives_alone(adapters):
    engine = EmbeddedEngine(CONFIG, policy())
    for name, (directory, _) in adapters.items():
        engine.add_adapter(name, directory)
    names = ["one", "two", None, "one"]
    together = ask(engine, names)
    for name, prompt, completion in zip(names, PROMPTS, together, strict=True):
        assert_same(ask(engine, [name], [prompt])[0], completion, 1e-6)
        alone = EmbeddedEngine(
            CONFIG, policy() if name is None else adapters[name][1]
        ).generate_all([prompt], [SAMPLING])[0]
        assert_same(alone, completion, 1e-5)
    assert together[0].tokens.tolist() != together[1].tokens.tolist(), (
        "equal prompts, other adapters"
    )


@pytest.mark.medium
def test_a_request_without_one_has_the_same_bits_beside_others(adapters):
    engine = EmbeddedEngine(CONFIG, policy())
    alone = [ask(engine, [None], [prompt])[0] for prompt in PROMPTS]
    for name, (directory, _) in adapters.items():
        engine.add_adapter(name, directory)
    requests = [
        ("one", [9]),
        *((None, prompt) for prompt in PROMPTS[:2]),
        ("two", [8]),
        *((None, p) for p in PROMPTS[2:]),
    ]
    for chosen in ([request for request in requests if request[0] is None], requests):
        found = ask(engine, *zip(*chosen, strict=True))
        plain = [
            completion for completion, (name, _) in zip(found, chosen, strict=True) if name is None
        ]
        for one, other in zip(alone, plain, strict=True):
            assert_same(one, other)


def test_the_policys_own_adapter_stays_apart_and_follows_its_updates(adapters):
    trained = policy(8)
    engine = EmbeddedEngine(CONFIG, trained)
    engine.add_adapter("one", adapters["one"][0])
    names = [None, "base", "one"]
    own, base, one = ask(engine, names, PROMPTS[:1] * 3)
    assert_same(
        own, EmbeddedEngine(CONFIG, policy(8)).generate_all(PROMPTS[:1], [SAMPLING])[0], 1e-5
    )
    assert_same(
        base, EmbeddedEngine(CONFIG, policy()).generate_all(PROMPTS[:1], [SAMPLING])[0], 1e-5
    )
    with torch.no_grad():
        for _, parameter in trained.trained_parameters():
            parameter.mul_(-1.5)
    asyncio.run(engine.commit(1))
    again, base_again, one_again = ask(engine, names, PROMPTS[:1] * 3)
    assert (
        again.tokens.tolist() != own.tokens.tolist()
        or abs(again.logprobs - own.logprobs).max() > 1e-3
    )
    assert_same(base_again, base)
    assert_same(one_again, one)
    assert all(p.requires_grad == (".lora_" in name) for name, p in trained.named_parameters())


def test_a_request_that_moves_to_another_slot_keeps_its_adapter(adapters):
    engine = EmbeddedEngine(CONFIG, policy())
    for name, (directory, _) in adapters.items():
        engine.add_adapter(name, directory)
    samplings = [
        Sampling(max_new_tokens=n, seed=n, adapter=name)
        for n, name in [(2, "one"), (9, "two"), (12, None), (12, "one")]
    ]
    for prompt, sampling, found in zip(
        PROMPTS, samplings, engine.generate_all(PROMPTS, samplings), strict=True
    ):
        assert_same(engine.generate_all([prompt], [sampling])[0], found, 1e-6)


def test_names_that_are_not_there_and_adapters_that_do_not_fit(adapters, tmp_path):
    engine = EmbeddedEngine(CONFIG, policy())
    engine.add_adapter("one", adapters["one"][0])
    with pytest.raises(ConfigError, match="no adapter 'two': it serves base, one"):
        ask(engine, ["two"], PROMPTS[:1])
    with pytest.raises(ModelError, match="taken by another adapter"):
        engine.add_adapter("one", adapters["one"][0])
    wide = init_policy(replace(SHAPE, intermediate_size=32), seed=1)
    wide.attach(Adapter(LoRAConfig(rank=2)))
    with pytest.raises(ModelError, match="doesn't fit the model"):
        engine.add_adapter("wide", saved(wide, tmp_path))
    with pytest.raises(ModelError, match=r"adapter 'two' is for fused experts .* --merge-lora"):
        engine.add_adapter("two", pushed(tmp_path / "fused")[1])


@pytest.mark.medium
@torch.no_grad()
def test_adapters_of_experts_sample_with_the_learners_logprobs_alone_and_beside_others(tmp_path):
    """The policy's own, a named one, and the base, for equal and other prompts."""
    own, one = policy(8, SPARSE), policy(5, SPARSE, target_modules=("q_proj", "down_proj"))
    engine = EmbeddedEngine(CONFIG, own)
    engine.add_adapter("one", saved(one, tmp_path))
    by_name = {None: own, "base": policy(shape=SPARSE), "one": one}
    names = [None, "one", "base", "one"]
    together = ask(engine, names)
    for name, prompt, completion in zip(names, PROMPTS, together, strict=True):
        assert_same(ask(engine, [name], [prompt])[0], completion, 1e-6)
        tokens = torch.tensor([*prompt, *completion.tokens.tolist()])
        hidden = by_name[name].hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
        logprobs = by_name[name].logits(hidden)[len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(
            torch.as_tensor(completion.logprobs), expected, rtol=0, atol=1e-5, check_dtype=False
        )
