"""An adapter over a base that rests quantised (QLoRA, arXiv:2305.14314): less memory, the
reference, parity with what samples, checkpoints and files."""

import asyncio

import pytest
import torch
from learners.test_local import ALGORITHMS, VOCAB, groups, prepared
from weight_sync.components import ENGINE
from weight_sync.test_adapters import furthest

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.learners.lora_reference import LoRAReference
from ratchet.models.load import init_policy, load_policy
from ratchet.models.lora.decoder import Adapter, is_adapter_parameter
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver, WeightSender
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

SHAPE = DecoderConfig(VOCAB, 32, 2, 2, 1, 16, 48, init_std=0.15)
FORMS = ["float8", pytest.param("nf4", marks=pytest.mark.needs("bitsandbytes"))]
# of the bytes of float32: codes, and a scale for 128 or 64 numbers
RELATIVE = {"float8": 0.26, "nf4": 0.15}
pytestmark = pytest.mark.parametrize("form", FORMS)


def adapter(form):
    return Adapter(LoRAConfig(rank=4, alpha=8.0, base=form), seed=5)


def learner(form, seed=0, **options):
    net = init_policy(SHAPE, seed=seed)
    net.attach(adapter(form))
    return LocalLearner(
        LocalConfig(**options), net, optimizer=OptimizerConfig(lr=2e-2), total_steps=30
    )


def learn(made, steps, kind="sft"):
    batch, terms = prepared(ALGORITHMS[kind])
    return [asyncio.run(made.update(batch, terms))["loss"] for _ in range(steps)]


def logprobs(made):
    return asyncio.run(made.score(pack(groups()), ["logprobs"]))["logprobs"]


def test_the_base_takes_its_bits_and_nothing_keeps_the_plain_one(form):
    net = init_policy(DecoderConfig(VOCAB, 128, 2, 4, 2, 32, 256), seed=0)
    engine = EmbeddedEngine(ENGINE, net)  # made before the adapter, as in a run
    maps = [linear for _, linear in net.decoder.layer_linears]
    plain, gone = (
        sum(linear.weight.nbytes for linear in maps),
        [linear.weight.data_ptr() for linear in maps],
    )
    net.attach(adapter(form))
    assert (
        sum(b.nbytes for linear in maps for b in linear.quantised.buffers())
        <= RELATIVE[form] * plain
    )
    assert not {parameter.data_ptr() for parameter in net.parameters()} & set(gone)
    assert not engine._staging._open_views


@pytest.mark.medium
def test_the_adapter_learns_over_a_base_that_rests(form):
    made = learner(form)
    base = {name: tensor.clone() for name, tensor in made.model.canonical_weights()}
    first = logprobs(made)
    reference = init_policy(SHAPE, seed=0)
    for _, linear in reference.decoder.layer_linears:
        linear.quantise(form)
    assert torch.equal(first, logprobs(LocalLearner(LocalConfig(), reference)))
    losses = learn(made, 30)
    assert losses[-1] < 0.7 * losses[0]
    assert torch.equal(logprobs(LoRAReference(made)), first)
    assert all(torch.equal(tensor, base[name]) for name, tensor in made.model.canonical_weights())
    assert all(map(is_adapter_parameter, made.optimizer.state))


def test_several_workers_and_recomputed_activations_have_the_same_gradients(form):
    batch, terms = prepared(ALGORITHMS["grpo"])
    made = [
        learner(form),
        learner(form, activation_checkpointing=True),
        learner(form, workers=2, micro_batch_tokens=20),
    ]
    for each in made:
        each._accumulate(batch, terms)
    for other in made[1:]:
        for (name, a), (_, b) in zip(
            made[0].model.trained_parameters(), other.model.trained_parameters(), strict=True
        ):
            torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.medium
def test_what_samples_has_the_learners_probabilities(form):
    """In this process it reads the same codes; elsewhere it is sent what they are restored to."""
    made = learner(form)
    shared, apart = (
        EmbeddedEngine(ENGINE, made.model),
        EmbeddedEngine(ENGINE, init_policy(SHAPE, seed=9)),
    )
    link = SharedMemoryWeightSync(
        LocalRank(WeightSender(made)), LocalRank(WeightReceiver(apart)), adapter=made.model.adapter
    )
    for version in (1, 2, 3):
        asyncio.run(link.push(version))
        assert asyncio.run(link.audit()) == []
        for engine in (shared, apart):
            assert furthest(made, engine) < 1e-4
        learn(made, 2, "grpo")
    asyncio.run(link.close())


def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_been(form, tmp_path):
    made = learner(form)
    learn(made, 2)
    made.save(tmp_path)
    learn(made, 1)
    again = learner(form)
    again.load(tmp_path)
    learn(again, 1)
    for (name, ours), (_, theirs) in zip(
        made.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_the_exported_model_is_the_restored_base_with_the_adapter(form, tmp_path):
    made = learner(form)
    learn(made, 2)
    made.export(tmp_path / "all")
    made.export(tmp_path / "base", part="base")
    merged, base = (
        LocalLearner(LocalConfig(), load_policy(tmp_path / name)) for name in ("all", "base")
    )
    torch.testing.assert_close(logprobs(merged), logprobs(made), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logprobs(base), logprobs(LoRAReference(made)), rtol=1e-5, atol=1e-5)
    learned = logprobs(made)
    made.model.merge()
    torch.testing.assert_close(
        logprobs(LocalLearner(LocalConfig(), made.model)), learned, rtol=1e-5, atol=1e-5
    )
    assert all(parameter.requires_grad for parameter in made.model.parameters())
