"""Models that read images: packed as alone, encoded once, at rest or trained, and what is written
of them."""

from functools import partial

import numpy as np
import pytest
import torch
from pictures import FAMILIES, asked, dialogues, model_directory, picture, renderer
from safetensors.torch import load_file

from ratchet.config.lora import LoRAConfig
from ratchet.data.packing import pack
from ratchet.errors import ConfigError, ModelError
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.learners.compute.forward import Forward
from ratchet.learners.config import DTensorConfig, MegatronConfig
from ratchet.learners.distributed.checks import check_dtensor
from ratchet.models.load import load_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.models.media import join_media_inputs, make_probe_images
from ratchet.models.transformers.language_inputs import divide_language_inputs
from ratchet.models.transformers.multimodal_policy import MultimodalPolicy
from ratchet.testing.builders import make_group
from ratchet.types import Trajectory
from ratchet.utils.thread_pool import ThreadPool


def row(family, messages, number=0):
    made = renderer(family)
    tokens, trainable = made.supervised(messages, train="all")
    return Trajectory.supervised(
        tokens, trainable, media=made.media(tokens, messages), attempt=number
    )


def batch_of(family, order=(0, 1, 2)):
    rows = [row(family, dialogues()[i], number) for number, i in enumerate(order)]
    return pack([make_group("g", rows)])


def policy_of(family, dtype=torch.float32, **options):
    found = load_policy(model_directory(family), dtype=dtype, **options)
    assert isinstance(found, MultimodalPolicy)
    return found


def hidden_of(policy, batch):
    return policy(batch.tokens_T, batch.positions_T, batch.lengths_S.tolist(), None, batch.media_S)


def reference_logits(policy, trajectory):
    """transformers' own forward of one sequence: it encodes each occurrence, and finds positions,
    by itself."""
    config = policy.model.config
    given = {
        name: torch.from_numpy(
            np.concatenate([one.medium.inputs[name] for one in trajectory.media])
        )
        for name in (trajectory.media[0].medium.inputs if trajectory.media else ())
    }
    tokens = torch.from_numpy(trajectory.tokens)
    types = (tokens == config.image_token_id).long()
    return policy.model(
        input_ids=tokens[None], mm_token_type_ids=types[None], use_cache=False, **given
    ).logits[0]


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_packed_logits_are_the_model_s_own_of_each_sequence_alone(family, dtype, tolerance):
    policy = policy_of(family, dtype)
    assert policy.packs
    with torch.no_grad():
        expected = [reference_logits(policy, row(family, messages)) for messages in dialogues()]
        for order in ((0, 1, 2), (2, 0), (1,), (2, 1, 0)):
            found = policy.logits(hidden_of(policy, batch_of(family, order)))
            assert torch.allclose(
                found, torch.cat([expected[i] for i in order]), rtol=0, atol=tolerance
            )
    assert max(float(logits.std()) for logits in expected) > 0.1


def test_an_encoder_keeps_an_attention_of_its_own():
    model = policy_of(FAMILIES[0]).model
    encoder = model.config.vision_config
    encoder._attn_implementation = "eager"
    MultimodalPolicy(model)
    assert (model.config._attn_implementation, encoder._attn_implementation) == ("sdpa", "eager")


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_does_not_pack_runs_each_sequence_alone(family):
    policy, batch = policy_of(family, torch.float64), batch_of(family)
    with torch.no_grad():
        packed = hidden_of(policy, batch)
        policy.packs = False
        assert torch.allclose(hidden_of(policy, batch), packed, rtol=0, atol=1e-10)


@pytest.mark.medium
def test_the_probe_notices_a_model_whose_packed_sequences_see_each_other(monkeypatch):
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    forward = Qwen2_5_VLTextModel.forward

    def leaking(self, *args, position_ids=None, **kwargs):
        if position_ids is not None and position_ids.shape[0] == 4:
            position_ids = position_ids[1:]  # without the row that tells sequences apart
        return forward(self, *args, position_ids=position_ids, **kwargs)

    honest, batch = policy_of("qwen2_5_vl", torch.float64), batch_of("qwen2_5_vl")
    with torch.no_grad():
        expected = hidden_of(honest, batch)
        monkeypatch.setattr(Qwen2_5_VLTextModel, "forward", leaking)
        policy = policy_of("qwen2_5_vl", torch.float64)
        assert not policy.packs
        assert torch.allclose(hidden_of(policy, batch), expected, rtol=0, atol=1e-10)


def test_the_probe_notices_an_encoder_that_mixes_images(monkeypatch):
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    encode = Qwen2_5_VLModel.get_image_features

    def mixing(self, pixel_values, image_grid_thw=None, **kwargs):
        return encode(self, pixel_values + pixel_values.mean(), image_grid_thw, **kwargs)

    monkeypatch.setattr(Qwen2_5_VLModel, "get_image_features", mixing)
    assert not policy_of("qwen2_5_vl").packs


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_packed_batch_are_those_of_its_sequences_added_up(family):
    policy = policy_of(family, torch.float64, train_encoders=True)
    rows = [row(family, messages) for messages in dialogues()]
    slope = torch.randn(
        policy.vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )

    def gradients():
        found = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in policy.model.named_parameters()
        }
        policy.zero_grad()
        return found

    for trajectory in rows:
        (reference_logits(policy, trajectory) @ slope).sum().backward()
    alone = gradients()
    (policy.logits(hidden_of(policy, batch_of(family))) @ slope).sum().backward()
    packed = gradients()
    policy.checkpointing = True
    (policy.logits(hidden_of(policy, batch_of(family))) @ slope).sum().backward()
    recomputed = gradients()
    for name, expected in alone.items():
        # transformers turns what a tower attends to in float32
        bound = 1e-6 * float(expected.abs().max())
        assert float((packed[name] - expected).abs().max()) <= bound, name
        assert float((recomputed[name] - expected).abs().max()) <= bound, name
    assert float(alone["model.visual.patch_embed.proj.weight"].abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_that_several_sequences_show_is_encoded_once(family, monkeypatch):
    policy = policy_of(family)
    seen = []
    policy.model.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    batch = batch_of(family, (0, 1, 2, 0))  # nine places, three pictures of 16, 24 and 32 patches
    with torch.no_grad():
        hidden_of(policy, batch)
        assert seen == [16 + 24 + 32]
        hidden_of(policy, batch_of(family, (1,)))
    assert len(seen) == 1, "text alone has nothing to encode"


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
def test_towers_rest_unless_they_are_asked_to_train(family):
    frozen, trained = policy_of(family), policy_of(family, train_encoders=True)
    towers = {name for name, _ in frozen.tower_parameters()}
    assert towers == {
        name for name, _ in frozen.model.named_parameters() if name.startswith("model.visual.")
    }
    assert frozen.frozen_names() == towers
    assert trained.frozen_names() == frozenset()
    names = {name.partition(".")[2] for name, _ in frozen.trained_parameters()}
    assert names == {name for name, _ in frozen.model.named_parameters()} - towers
    assert {name.partition(".")[2] for name, _ in trained.trained_parameters()} == names | towers
    for policy in (frozen.requires_grad_(True), trained):
        policy.logits(hidden_of(policy, batch_of(family))).square().sum().backward()
    assert all(p.grad is None for _, p in frozen.tower_parameters())
    assert all(p.grad is not None for _, p in trained.tower_parameters())
    trained.zero_grad()
    policy.logits(hidden_of(trained, batch_of(family, (1,)))).sum().backward()
    assert all(float(p.grad.abs().max()) == 0 for _, p in trained.tower_parameters()), (
        "0 where no picture was seen, not none"
    )


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_of_the_language_model_alone(family):
    policy, batch = policy_of(family, torch.float64), batch_of(family)
    with torch.no_grad():
        base = hidden_of(policy, batch)
    policy.attach(Adapter(LoRAConfig(rank=2)))
    names = {name for name, _ in policy.adapter_weights()}
    assert len(names) == 2 * 2 * 7, "A and B, two layers, seven maps"
    assert all(".language_model.layers." in name for name in names)
    assert all(p.requires_grad for _, p in policy.trained_parameters())
    assert sum(p.requires_grad for p in policy.parameters()) == len(names)
    with torch.no_grad():
        for name, p in policy.trained_parameters():
            p.copy_(
                torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(len(name)), dtype=p.dtype
                )
                * 0.3
            )
        own = hidden_of(policy, batch)
        assert not torch.allclose(own, base, atol=1e-3)
        with policy.without_adapter():
            assert torch.equal(hidden_of(policy, batch), base)
        policy.merge()
        assert torch.allclose(hidden_of(policy, batch), own, atol=1e-10)
    assert all(not p.requires_grad for _, p in policy.tower_parameters()), "merging wakes no tower"


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_the_model_with_its_processor(family, tmp_path):
    from transformers import AutoModelForImageTextToText

    policy, batch = policy_of(family), batch_of(family)
    policy.save(tmp_path)
    written, given = (
        load_file(tmp_path / "model.safetensors"),
        load_file(model_directory(family) / "model.safetensors"),
    )
    assert {name: weight.tolist() for name, weight in written.items()} == {
        name: w.tolist() for name, w in given.items()
    }
    assert len(written) == len(list(policy.canonical_weights())), (
        "the head is the embedding, and there is one of them"
    )
    again = load_policy(tmp_path)
    assert isinstance(again, MultimodalPolicy)
    assert again.packs
    with torch.no_grad():
        assert torch.equal(hidden_of(again, batch), hidden_of(policy, batch))
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, local_files_only=True)
    assert all(
        torch.equal(theirs.get_parameter(name), weight)
        for name, weight in policy.canonical_weights()
    )
    assert [one.span for one in make_probe_images(tmp_path, theirs)] == [24, 12]


@pytest.mark.medium
def test_threads_share_a_model_as_one_would_run_it():
    policy, batches = (
        policy_of("qwen3_vl"),
        [batch_of("qwen3_vl", order) for order in ((0,), (1, 2), (2, 0))],
    )
    forward = Forward(policy, None, chunk_mib=1, autocast=False, shared_vocab=None)
    with torch.no_grad():
        expected = [hidden_of(policy, batch) for batch in batches]
    hands = [forward, forward.copy_with_own_gradients(), forward.copy_with_own_gradients()]
    scored = ThreadPool(3).run(
        [
            partial(hand.score, batch, ["logprobs"])
            for hand, batch in zip(hands, batches, strict=True)
        ]
    )
    for batch, hidden, found in zip(batches, expected, scored, strict=True):
        again = forward.score(batch, ["logprobs"], hidden_Td=hidden)
        assert torch.equal(found["logprobs"], again["logprobs"])


def test_what_can_t_be_done_with_such_a_model_is_refused(tmp_path):
    policy = policy_of("qwen2_5_vl")
    for keys, words in (
        ({"tensor_parallel": 3}, "tensor_parallel=3 doesn't divide the model's 4 query heads"),
        ({"expert_parallel": 2, "dp_shard": 2}, "no experts that learner.expert_parallel=2 can"),
    ):
        with pytest.raises(ModelError, match=words):
            check_dtensor(DTensorConfig(**keys), policy)
    with pytest.raises(ModelError, match=r"set generator\.kind to hf"):
        EmbeddedEngine(EngineConfig(), policy)
    with pytest.raises(ConfigError, match="q_prok"):
        policy.resolve_adapter_layers(LoRAConfig(target_modules=("q_prok",)))
    with pytest.raises(ConfigError, match="qkv"):  # of the tower
        policy.resolve_adapter_layers(LoRAConfig(target_modules=("qkv",)))


def test_tokens_and_layers_are_divided_only_where_pictures_show_that_nothing_changes():
    section, policy = DTensorConfig(context_parallel=2), policy_of("qwen3_vl")
    check_dtensor(section, policy)
    layers, sequence = (
        DTensorConfig(pipeline_parallel=2),
        DTensorConfig(tensor_parallel=2, sequence_parallel=True),
    )
    check_dtensor(layers, policy)
    check_dtensor(sequence, policy)
    endings = {
        section: "so its tokens can't",
        layers: "so its layers can't",
        sequence: "which learn",
    }
    for keys, ending in endings.items():
        policy.packs = False
        with pytest.raises(ModelError, match=f"can't pack sequences with images, {ending}"):
            check_dtensor(keys, policy)
        policy.packs, images, policy.probe_images = True, policy.probe_images, ()
        with pytest.raises(ModelError, match=f"reads other media than images, {ending}"):
            check_dtensor(keys, policy)
        policy.probe_images = images


def test_layers_with_features_of_pictures_stay_in_the_first_stage():
    policy = load_policy(model_directory("qwen3_vl", 5))
    check_dtensor(DTensorConfig(pipeline_parallel=2, stage_layers=(2, 3)), policy)
    with pytest.raises(ModelError, match=r"its first 2 layers, which must .* but that has 1: set"):
        check_dtensor(DTensorConfig(pipeline_parallel=2, stage_layers=(1, 4)), policy)
    sequence = {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}
    with pytest.raises(ModelError, match="needs more layers than these, but it has 2: set learner"):
        check_dtensor(DTensorConfig(**sequence), policy)
    check_dtensor(DTensorConfig(**sequence, stage_layers=(3, 2)), policy)
    add = lambda _, args, named: (args, {**named, "token_type_ids": torch.ones(1)})  # noqa: E731
    policy.language.register_forward_pre_hook(add, with_kwargs=True)
    with pytest.raises(ModelError, match="gets token_type_ids of its multimodal model, which"):
        check_dtensor(DTensorConfig(pipeline_parallel=2), policy)


def test_a_language_model_with_other_inputs_keeps_its_tokens():
    language, index = torch.nn.Identity(), torch.tensor([0, 2])
    with (
        pytest.raises(ModelError, match="Identity gets token_type_ids of its multimodal model"),
        divide_language_inputs(language, index),
    ):
        language(inputs_embeds=torch.ones(1, 3, 2), token_type_ids=torch.ones(1, 3))
    with (
        pytest.raises(ModelError, match="the inputs of Identity can't be divided over ranks: set"),
        divide_language_inputs(language, index),
    ):
        pass


def test_media_of_one_kind_must_fit_together():
    from dataclasses import replace

    tokens = renderer().prompt([asked(picture(1))])
    medium = renderer().media(tokens, [asked(picture(1))])[0].medium
    other = replace(medium, inputs={name: value[:, :2] for name, value in medium.inputs.items()})
    with pytest.raises(ModelError, match="different shapes"):
        join_media_inputs([medium, other])


def test_a_model_of_text_alone_is_given_no_media(reference, tmp_path):
    reference("qwen3", head_dim=8).save_pretrained(tmp_path)
    text = load_policy(tmp_path, backend="transformers")
    assert not text.reads_media
    with pytest.raises(ModelError, match="only reads text"):
        load_policy(tmp_path, backend="transformers", train_encoders=True)
    with pytest.raises(ModelError, match="only reads text"):
        load_policy(tmp_path, train_encoders=True)
    batch = batch_of("qwen2_5_vl", (0,))
    with pytest.raises(ModelError, match="only reads text"):
        Forward(text, None, chunk_mib=1, autocast=False, shared_vocab=None).score(
            batch, ["logprobs"]
        )


def test_megatron_refuses_it():
    from ratchet.learners.distributed.checks import check_megatron

    with pytest.raises(ModelError, match="dtensor"):
        check_megatron(MegatronConfig(), policy_of("qwen2_5_vl"))
