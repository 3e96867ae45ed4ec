"""Structured output: what is sampled follows the grammar, with the exact logprobs under the mask,
which the learner computes again."""

import asyncio
import json
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ratchet.checkpoint.serialization import load_state, save_state
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.chat.builtin_tokenizers import byte_bpe_tokenizer, character_tokenizer
from ratchet.data.codec import from_plain, to_plain
from ratchet.data.packing import pack
from ratchet.errors import ConfigError, RequestFailed
from ratchet.generators.config import EngineConfig, HFConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.generators.hf import HFGenerator
from ratchet.learners.compute.forward import Forward
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy
from ratchet.structured_output import StructuredOutput
from ratchet.types import Group, Owner, Sampling, Task, Trajectory

TOKENIZER = byte_bpe_tokenizer(['{"name": "abc", "n": [1, 2, 3]}, true, null'] * 8, 320)
VOCAB = 331  # more logits than the tokenizer has tokens, and no multiple of 32
PROMPT = TOKENIZER.encode("Answer in JSON:")
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
        "kind": {"enum": ["cat", "dog", "é"]},
    },
    "required": ["n", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def sampling_under(max_new_tokens=80, seed=0, **structured):
    return Sampling(
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop_ids=TOKENIZER.eos_ids,
        structured=structured or None,
    )


@pytest.fixture(scope="module")
def policy():
    shape = DecoderConfig(VOCAB, 32, 2, 4, 2, 8, 48, max_positions=256, init_std=0.3)
    return DecoderPolicy(Decoder(shape).init_weights(0))


@pytest.fixture
def engine(policy):
    return EmbeddedEngine(EngineConfig(), policy, TOKENIZER)


def compute_logits(policy, tokens):
    """[T, V] in float32, the row of each token predicts the next."""
    with torch.no_grad():
        ids = torch.tensor(tokens)
        hidden = policy(ids, torch.arange(len(ids)), [len(ids)], None)
        return policy.logits(hidden)


def find_allowed(completion, position):
    row = completion.allowed.masks[completion.allowed.index[position]]
    return np.flatnonzero(np.unpackbits(row, bitorder="little"))


def make_trajectory(prompt, completion, temperature):
    tokens = np.concatenate([prompt, completion.tokens])
    sampled = np.arange(len(tokens)) >= len(prompt)
    logprobs, versions = np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)
    logprobs[sampled], versions[sampled] = completion.logprobs, completion.versions
    unconstrained = np.full(len(prompt), -1, np.int32)
    return Trajectory(
        tokens,
        np.where(sampled, Owner.POLICY, Owner.PROMPT).astype(np.int8),
        sampled,
        logprobs,
        versions,
        temperature=temperature,
        allowed=completion.allowed
        and replace(
            completion.allowed, index=np.concatenate([unconstrained, completion.allowed.index])
        ),
    )


@pytest.mark.medium
def test_completions_follow_their_grammars_and_others_are_unchanged(engine):
    grammars = [
        {"json": SCHEMA},
        {"regex": "[ab]{2,5}c"},
        {"choice": ["yes", "no", "naïve"]},
        {"grammar": 'start: "<" WORD ">"\nWORD: /[a-c]{1,4}/'},
        {},
    ]
    samplings = [sampling_under(seed=i, **grammars[i % 5]) for i in range(20)]
    together = engine.generate_all([PROMPT] * 20, samplings)
    alone = [engine.generate_all([PROMPT], [sampling])[0] for sampling in samplings]
    for i, (completion, single) in enumerate(zip(together, alone, strict=True)):
        assert completion.tokens.tolist() == single.tokens.tolist()
        np.testing.assert_array_equal(completion.logprobs, single.logprobs)
        text = TOKENIZER.decode(completion.tokens.tolist())
        if i % 5 == 4:
            assert completion.allowed is None
            continue
        assert completion.stop.finished
        assert completion.tokens[-1] in TOKENIZER.eos_ids
        if i % 5 == 0:
            assert sorted(json.loads(text)) == ["kind", "n"]
            assert json.loads(text)["kind"] in ("cat", "dog", "é")
        elif i % 5 == 1:
            assert text.endswith("c")
            assert set(text[:-1]) <= set("ab")
        elif i % 5 == 2:
            assert text in ("yes", "no", "naïve")
        else:
            assert text[0] + text[-1] == "<>"
            assert set(text[1:-1]) <= set("abc")
    free = engine.generate_all([PROMPT], [sampling_under(seed=4)])[0]
    np.testing.assert_array_equal(free.logprobs, together[4].logprobs)


@pytest.mark.medium
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}])
def test_logprobs_are_exact_under_the_mask_and_the_learner_computes_them(
    engine, policy, filters, monkeypatch, tmp_path
):
    base = replace(sampling_under(json=SCHEMA), **filters)
    samplings = [*(replace(base, seed=seed) for seed in range(4)), sampling_under(max_new_tokens=9)]
    completions = engine.generate_all([PROMPT] * 5, samplings)
    temperature = base.temperature or 1.0
    for completion in completions[:4]:
        logits = compute_logits(policy, [*PROMPT, *completion.tokens.tolist()]).double()
        for i, token in enumerate(completion.tokens.tolist()):
            # An independent matcher says which tokens may follow. Of the ways to write a text that
            # the grammar forces, llguidance allows only the tokenizer's own.
            valid = [t for t in range(VOCAB) if may_follow(completion.tokens[:i].tolist(), t)]
            allowed = find_allowed(completion, i).tolist()
            assert allowed == valid or (len(allowed) == 1 and allowed[0] in valid)
            scaled = logits[len(PROMPT) + i - 1, allowed] / temperature
            expected = scaled.log_softmax(-1)[allowed.index(token)]
            assert abs(completion.logprobs[i] - expected) < 1e-5
    trajectories = [
        make_trajectory(PROMPT, completion, s.temperature)
        for completion, s in zip(completions, samplings, strict=True)
    ]
    # As a checkpoint's replay buffer holds them.
    save_state(tmp_path, to_plain(tuple(trajectories)))
    trajectories = from_plain(load_state(tmp_path))
    batch = pack([Group("g", Task("t", ()), trajectories)])
    # Rows in another order, and chunks of a few predictions.
    monkeypatch.setattr("ratchet.learners.compute.forward.count_rows_per_chunk", lambda *_: 7)
    forward = Forward(policy, None, chunk_mib=1, autocast=False, shared_vocab=None)
    for part in (batch, batch.take([4, 2]), batch.take([4])):
        columns = forward.score(part, ("logprobs", "entropy"))
        mask = part.trainable_T
        np.testing.assert_allclose(
            columns["logprobs"][mask], part.rollout_logprobs_T[mask], rtol=0, atol=1e-5
        )
        assert columns["entropy"][mask].isfinite().all()
        assert (columns["entropy"][mask] >= -1e-6).all()


def may_follow(tokens, token):
    """Brute force: a fresh matcher takes the tokens one by one."""
    from llguidance import LLMatcher, LLTokenizer

    if not hasattr(may_follow, "start"):
        tokenizer = LLTokenizer(TOKENIZER.to_json(), n_vocab=VOCAB, eos_token=TOKENIZER.eos_ids[0])
        may_follow.start = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(SCHEMA))
    matcher = may_follow.start.deep_copy()
    assert matcher.consume_tokens(tokens)
    if token in TOKENIZER.eos_ids:
        return matcher.is_accepting()
    return matcher.validate_tokens([token]) == 1


def test_an_interrupted_completion_continues_under_its_grammar(engine):
    sampling = sampling_under(seed=3, json=SCHEMA)
    whole = engine.generate_all([PROMPT], [sampling])[0]
    n_drawn = len(whole.tokens) // 2
    rest = engine.generate_all(
        [[*PROMPT, *whole.tokens[:n_drawn].tolist()]], [replace(sampling, drawn=n_drawn)]
    )[0]
    assert rest.tokens.tolist() == whole.tokens[n_drawn:].tolist()
    assert find_allowed(rest, 0).tolist() == find_allowed(whole, n_drawn).tolist()


def test_a_stop_id_inside_the_grammar_ends_no_part_of_a_text(engine):
    two = TOKENIZER.encode("2")[0]
    sampling = replace(sampling_under(regex="[12]{8}"), stop_ids=(two, *TOKENIZER.eos_ids))
    for seed in range(4):
        completion = engine.generate_all([PROMPT], [replace(sampling, seed=seed)])[0]
        assert TOKENIZER.decode(completion.tokens[:8].tolist()) == "11111111"


def test_a_truncated_completion_ends_by_length(engine):
    completion = engine.generate_all([PROMPT], [sampling_under(4, json=SCHEMA)])[0]
    assert (completion.stop, len(completion.allowed.index)) == ("length", 4)


def test_equal_grammars_are_compiled_once():
    first, second = (StructuredOutput.from_mapping({"json": SCHEMA}) for _ in range(2))
    assert first.compile() is second.compile()


def test_other_requests_are_answered_while_a_grammar_is_compiled(policy, monkeypatch):
    engine = EmbeddedEngine(EngineConfig(), policy, TOKENIZER)
    is_answered, compiled = threading.Event(), []
    compile_grammar = engine.validator.grammars._compile

    def compile_last(structured):
        assert is_answered.wait(60), "the event loop stood still"
        compiled.append(structured)
        return compile_grammar(structured)

    monkeypatch.setattr(engine.validator.grammars, "_compile", compile_last)

    async def run():
        sampling = sampling_under(regex="true|false")
        waiting = [asyncio.create_task(engine.generate(PROMPT, sampling)) for _ in range(3)]
        while not engine.validator.grammars._compiling:
            await asyncio.sleep(0)
        waiting[0].cancel()
        assert len((await engine.generate(PROMPT, sampling_under(4))).tokens) == 4
        is_answered.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        for completion in await asyncio.gather(*waiting[1:]):
            assert TOKENIZER.decode(completion.tokens.tolist()) in ("true", "false")
        with pytest.raises(ConfigError, match="regular expression"):
            await engine.generate(PROMPT, sampling_under(regex="("))

    asyncio.run(run())
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"json": {"type": "no such type"}}, "JSON schema can't be followed"),
        ({"json": {"type": "array", "contains": {}}}, "contains"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: nothing"}, "unknown name"),
    ],
)
def test_an_invalid_grammar_is_refused_for_its_request_alone(engine, structured, message):
    with pytest.raises(ConfigError, match=message):
        engine.generate_all([PROMPT], [sampling_under(**structured)])
    assert len(engine.generate_all([PROMPT], [sampling_under(3)])[0].tokens)


def test_a_grammar_that_the_tokenizer_can_not_write_fails_its_request():
    tokenizer = character_tokenizer("abc")
    shape = DecoderConfig(tokenizer.vocab_size, 32, 1, 4, 2, 8, 48, max_positions=64, init_std=0.3)
    engine = EmbeddedEngine(EngineConfig(), Decoder(shape).init_weights(0), tokenizer)
    prompt, fits = tokenizer.encode("abc"), Sampling(stop_ids=tokenizer.eos_ids, max_new_tokens=8)
    with pytest.raises(RequestFailed, match="no token of the tokenizer"):
        engine.generate_all([prompt], [replace(fits, structured={"regex": "ab[xyz]"})])
    completion = engine.generate_all([prompt], [replace(fits, structured={"regex": "ab[cx]"})])[0]
    assert tokenizer.decode(completion.tokens.tolist()) == "abc"


def test_transformers_models_are_masked_too():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=128,
    )
    generator = HFGenerator(HFConfig(), Qwen3ForCausalLM(config).eval(), TOKENIZER)
    free, structured = generator.generate_all(
        [PROMPT] * 2, [sampling_under(6), sampling_under(choice=["yes", "no"])]
    )
    assert free.allowed is None
    assert TOKENIZER.decode(structured.tokens.tolist()) in ("yes", "no")
    assert structured.logprobs[-1] == 0  # only the end is allowed


@pytest.mark.slow
def test_tensor_parallel_ranks_train_exactly_under_a_grammar(tmp_path):
    """Each rank has half of the vocabulary, and the generator is in a process of its own."""
    (tmp_path / "recipe.yaml").write_text(
        """
name: masked
threads: 1
model: {preset: tiny}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 2}
sampling: {max_new_tokens: 4, structured: {regex: "[0-4]{1,2}"}}
evaluation: {every: 2, tasks: 8}
algorithm: {kind: grpo, group_size: 4, correction: {weight: token}, kl: {coef: 0.1}}
learner: {kind: dtensor, tensor_parallel: 2}
generator: {kind: workers, workers: 1}
steps: 2
batch_size: 8
"""
    )
    command = [sys.executable, "-m", "ratchet", "train", "recipe.yaml", "run_dir=run"]
    subprocess.run(command, cwd=tmp_path, check=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][1:]
    assert [step["batch/correction/gap_mean"] < 1e-6 for step in steps] == [True, True]
