"""Layers for multi-token prediction that a Megatron Core learner trains, against equations 21 to 25
of DeepSeek-V3 (arXiv:2412.19437) in one process, by transformers' layers in float64."""

import asyncio
from functools import cache
from pathlib import Path

import pytest
import torch
from learners.megatron_cases import MICRO, OPTIMIZER, TOTAL, wanted, weighed
from learners.ranks import run_ranks
from learners.spread_cases import VOCAB
from learners.test_megatron import SEQUENCE, STEPS, by_case, check_alike
from models.conftest import reference as reference
from models.convert.cases import BASE, MODELS
from models.convert.conftest import save_reference
from models.convert.mtp_reference import compute_mtp_states, list_mtp_weights, load_mtp
from safetensors.torch import load_file

from ratchet.commands.convert.command import convert
from ratchet.learners.compute.forward import Forward
from ratchet.learners.compute.microbatching import select_weighted_rows
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.load import load_policy
from ratchet.models.weights.hf_weights import read_json

pytestmark = [pytest.mark.slow, pytest.mark.needs("megatron")]

FACTOR, FIRST = 0.3, BASE["num_hidden_layers"]
LAYERS = {"deepseek_v3": 2, "glm4_moe": 1}
PP2 = {"pipeline_parallel": 2}
# Megatron's distributed optimizer takes no float64.
EXACT = {"mtp_loss_scaling_factor": FACTOR, "distributed_optimizer": False}
CASES = {
    ("deepseek_v3", "sft", "tp2"): SEQUENCE,
    ("deepseek_v3", "grpo", "pp2"): {**PP2, "recompute": "full"},
    ("deepseek_v3", "grpo", "ep2"): {"data_parallel": 2, "expert_parallel": 2},
    ("deepseek_v3", "sft", "cp2"): {"context_parallel": 2},
    ("glm4_moe", "grpo", "tp2"): SEQUENCE,
    ("glm4_moe", "sft", "pp2 unequal"): {**PP2, "stage_layers": (3, 1)},
    ("glm4_moe", "sft", "pp2 interleaved"): {**PP2, "pipeline_chunks": 2},
}


class EquationForward(Forward):
    """Adds the loss of equations 24 and 25, token by token."""

    def losses(self, micro, hidden_Td, terms, monitor=None):
        total, metrics = super().losses(micro, hidden_Td, terms, monitor)
        model, lengths = self.model.model, micro.lengths_S.tolist()
        nll = 0.0 * total
        for tokens_T, is_trained_T, states_Td in zip(
            *(x.split(lengths) for x in (micro.tokens_T, micro.trainable_T, hidden_Td)), strict=True
        ):
            embedding = model.get_input_embeddings()
            depths = compute_mtp_states(self.mtp, embedding, states_Td, tokens_T)
            for k, states in enumerate(depths, start=1):
                logprobs = model.lm_head(states).log_softmax(-1)
                for j in range(k + 1, len(tokens_T)):
                    if is_trained_T[j]:
                        nll = nll - logprobs[j - k - 1, tokens_T[j]] / self.counts[k]
        nll = nll / len(self.mtp.layers)
        total = total + FACTOR * nll
        return total, {**metrics, "mtp_nll": nll.detach(), "loss": total.detach()}


def count(batch, terms, layers):
    """How many tokens each depth predicts in a step."""
    batch = batch.take(select_weighted_rows(batch, terms))
    rows = batch.trainable_T.split(batch.lengths_S.tolist())
    return {k: sum(int(row[k + 1 :].sum()) for row in rows) for k in range(1, layers + 1)}


def by_equations(directory, kind, dtype=torch.float64):
    """(what one process makes of it, as of `alone`; its MTP layers by their names in files)"""
    policy, mtp = load_policy(Path(directory)).to(dtype), load_mtp(directory).to(dtype)
    for model in (policy.model, mtp):  # grouped products take no float64
        model.set_experts_implementation("eager")
    policy.mtp = mtp.layers  # so that they are trained
    section = LocalConfig(micro_batch_tokens=MICRO)
    learner = LocalLearner(section, policy, optimizer=OPTIMIZER, total_steps=TOTAL)
    (forward,) = learner.forwards
    forward.__class__, forward.mtp, metrics = EquationForward, mtp, []
    for step in range(STEPS):
        batch, terms = weighed(kind, step, dtype)
        forward.counts = count(batch, terms, len(mtp.layers))
        metrics.append(dict(asyncio.run(learner.update(batch, terms))))
    weights = {name: tensor.clone() for name, tensor in policy.canonical_weights()}
    columns = asyncio.run(learner.score(weighed(kind, 0, dtype)[0], wanted(kind)))
    return (metrics, weights, columns), list_mtp_weights(mtp, FIRST)


@pytest.fixture(scope="module")
def directory(reference, tmp_path_factory):
    @cache
    def write(family, mtp_layers):
        made = tmp_path_factory.mktemp(family)
        fields = {**MODELS[family][1], "vocab_size": VOCAB}
        model = reference(family, shape={**BASE, "vocab_size": VOCAB}, **fields)
        save_reference(model, made, mtp_layers)
        return str(made)

    return lambda family: write(family, LAYERS[family])


@pytest.fixture(scope="module")
def expected(directory):
    return cache(lambda family, kind: by_equations(directory(family), kind))


def check_exported(exported, weights, rtol=1e-6):
    """Against the MTP layers in float64, and the copies against what they are copies of."""
    found = load_file(Path(exported) / "model.safetensors")
    for name, tensor in weights.items():
        atol = rtol * float(tensor.abs().max())
        mine = found[name].to(tensor.dtype)
        torch.testing.assert_close(mine, tensor, rtol=rtol, atol=atol, msg=name)
    layers = read_json(Path(exported) / "config.json")["num_nextn_predict_layers"]
    for layer in range(FIRST, FIRST + layers):
        for copy, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            copied = found[f"model.layers.{layer}.{copy}.weight"]
            assert torch.equal(copied, found[f"{name}.weight"])
    return found


def test_ranks_train_what_the_equations_say(directory, expected, tmp_path):
    cases = [
        {
            "shape": directory(family),
            "kind": kind,
            "options": {**EXACT, **options},
            "dtype": torch.float64,
            "exported_to": str(tmp_path / f"{family}-{kind}-{name}"),
        }
        for (family, kind, name), options in CASES.items()
    ]
    results = by_case(run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=900))
    for (family, kind, name), case, found in zip(CASES, cases, results, strict=False):
        answers = [1] if name.startswith("pp2") else [0, 1]
        one_process, mtp_weights = expected(family, kind)
        check_alike(found, answers, one_process, kind, rtol=1e-6)
        exported = check_exported(case["exported_to"], mtp_weights)
        start = load_file(f"{case['shape']}/model.safetensors")
        assert exported.keys() == start.keys()
        kept = [n for n in mtp_weights if torch.equal(exported[n].double(), start[n].double())]
        assert len(kept) == LAYERS[family], kept
        assert all(name.endswith("e_score_correction_bias") for name in kept)
    assert len(results) == len(cases)


def test_what_tp2_saved_goes_on_at_pp2_and_is_converted(directory, expected, tmp_path):
    family, factor = "deepseek_v3", {"mtp_loss_scaling_factor": FACTOR}
    saved, exported = tmp_path / "saved", str(tmp_path / "exported")
    case = {"shape": directory(family), "kind": "sft"}
    last = {"first": 2, "steps": 1, "loaded_from": str(saved)}
    cases = [
        {**case, "options": {**SEQUENCE, **factor}, "steps": 2, "saved_to": str(saved)},
        {**case, "options": {**PP2, **factor}, **last, "exported_to": exported},
    ]
    results = by_case(run_ranks(2, "learners.megatron_cases:run", cases))
    one_process, mtp_weights = expected(family, "sft")
    check_alike(results[-1], [1], to_float32(one_process), "sft", first=2)
    check_exported(exported, mtp_weights, rtol=1e-5)
    convert(
        str(saved / "megatron"),
        tmp_path / "converted",
        to="hf",
        config=Path(case["shape"]),
        verify=False,
        say=lambda line: None,
    )
    assert load_file(tmp_path / "converted" / "model.safetensors").keys() >= mtp_weights.keys()


def to_float32(one_process):
    metrics, *columns = one_process
    return metrics, *({n: x.float() for n, x in named.items()} for named in columns)


def test_a_critic_keeps_the_layers_and_files_without_them_are_refused(
    reference, directory, tmp_path
):
    without = tmp_path / "without"
    fields = MODELS["deepseek_v3"][1]
    save_reference(reference("deepseek_v3", shape={**BASE, "vocab_size": VOCAB}, **fields), without)
    options = {"mtp_loss_scaling_factor": FACTOR}
    exported = tmp_path / "exported"
    cases = [
        {
            "shape": directory("glm4_moe"),
            "kind": "ppo",
            "options": options,
            "exported_to": str(exported),
        },
        {"shape": str(without), "kind": "sft", "options": options},
    ]
    ((_, refused),) = run_ranks(1, "learners.megatron_cases:run", cases)
    assert "which the model's files lack. Set learner.mtp_loss_scaling_factor=0." in refused
    start = load_file(f"{directory('glm4_moe')}/model.safetensors")
    found = load_file(exported / "model.safetensors")
    mtp = [n for n in start if n.startswith(f"model.layers.{FIRST}.") and "embed" not in n]
    assert mtp
    assert all(torch.equal(found[name], start[name]) for name in mtp)
