"""Learners of models that read pictures: whatever a micro-batch holds, and however many ranks, one
gradient."""

import pickle
from dataclasses import replace

import pytest
import torch
from learners.picture_cases import close, local
from learners.ranks import run_ranks
from pictures import FAMILIES, dialogues, model_directory, renderer

from ratchet.data.packing import pack
from ratchet.errors import CheckpointError
from ratchet.learners.compute.microbatch_dispatch import strip_media
from ratchet.models.load import load_policy
from ratchet.testing.builders import make_group
from ratchet.types import Trajectory


def row(family, messages):
    made = renderer(family)
    tokens, trainable = made.supervised(messages, train="all")
    return Trajectory.supervised(tokens, trainable, media=made.media(tokens, messages))


def batch_of(family, *numbers):
    return pack(
        [
            make_group(f"g{place}", [row(family, dialogues()[number])])
            for place, number in enumerate(numbers)
        ]
    )


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("train_encoders", [False, True])
def test_micro_batches_change_nothing(family, train_encoders):
    batches = [batch_of(family, 0, 1, 2), batch_of(family, 1, 2)]
    first = {
        name: weight.clone()
        for name, weight in load_policy(
            model_directory(family), dtype=torch.float64
        ).canonical_weights()
    }
    together, alone = (
        local(model_directory(family), train_encoders, batches, tokens=tokens)
        for tokens in (4096, 1)
    )
    close(alone[1], together[1])
    torch.testing.assert_close(alone[2], together[2], rtol=1e-6, atol=1e-7)
    assert [m["loss"] for m in alone[0]] == pytest.approx(
        [m["loss"] for m in together[0]], rel=1e-7
    )
    still = {name for name in first if torch.equal(first[name], together[1][name])}
    visual = {name for name in first if name.startswith("model.visual.")}
    assert still == (visual if not train_encoders else set())


@pytest.mark.medium
def test_a_batch_in_float32_is_scored_as_one_row_after_the_other():
    batch = batch_of("qwen2_5_vl", 0, 1, 2, 0)
    *_, together, learner = local(
        model_directory(), False, [batch], tokens=4096, dtype=torch.float32
    )
    *_, alone, _ = local(model_directory(), False, [batch], tokens=1, dtype=torch.float32)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
    assert learner.forwards[0].model.packs


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl_moe"])
@pytest.mark.parametrize("train_encoders", [False, True])
def test_fsdp2_on_two_ranks_is_one_process(family, train_encoders, tmp_path):
    """In the first step one rank has pictures and the other has none; in the second nobody has."""
    batches = [batch_of(family, 0, 1), batch_of(family, 1, 1), batch_of(family, 0, 1, 2, 1, 2)]
    expected = local(model_directory(family), train_encoders, batches)
    results = run_ranks(
        2,
        "learners.picture_cases:ranked",
        {"dp_shard": 2},
        model_directory(family),
        train_encoders,
        pickle.dumps(batches),
        tmp_path / "saved",
    )
    assert sorted(map(sum, (pictures[0] for _, _, pictures, _ in results))) == [0, 3]
    assert [sum(pictures[1]) for _, _, pictures, _ in results] == [0, 0]
    for metrics, *_ in results:
        for step, wanted in enumerate(expected[0]):
            assert metrics[step] == pytest.approx(wanted, rel=1e-6)
    found, resting = {}, set()
    for _, blocks, *_ in results:
        for name, shape, offsets, tensor, rests in blocks:
            whole = found.setdefault(name, torch.full(shape, float("nan"), dtype=tensor.dtype))
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] = (
                tensor
            )
            resting |= {name} if rests else set()
    close(found, expected[1])
    assert resting == (
        {name for name in found if name.startswith("model.visual.")}
        if not train_encoders
        else set()
    )


@pytest.mark.medium
def test_a_checkpoint_leaves_towers_at_rest_out_and_knows_them(tmp_path):
    batches = [batch_of("qwen2_5_vl", 0, 1)]
    *_, learner = local(model_directory(), False, batches)
    learner.save(tmp_path / "saved")
    again = local(model_directory(), False, batches, checkpoint=tmp_path / "saved")
    whole = local(model_directory(), False, batches * 2)
    close(again[1], whole[1], bound=1e-12)
    with torch.no_grad():
        for _, parameter in learner.model.tower_parameters():
            parameter.add_(1.0)
    learner.__dict__.pop("_base_fingerprint")
    with pytest.raises(CheckpointError, match="another base model"):
        learner.load(tmp_path / "saved")
    rests = {shard.name for shard in learner.weights() if shard.is_frozen}
    assert rests == {name for name, _ in learner.model.tower_parameters()}


def test_a_rank_gets_each_picture_once_without_its_file():
    batch = batch_of("qwen2_5_vl", 0, 1, 2)
    copies = [pickle.loads(pickle.dumps(batch.take([number]))) for number in (0, 1, 2, 0)]
    sent = strip_media(copies)
    media = [one.medium for part in sent for placed in part.media_S for one in placed]
    assert len(media) == 3 + 2 + 3
    assert len({id(medium) for medium in media}) == len({medium.key for medium in media}) == 3
    assert all(medium.source == b"" for medium in media)
    assert [[one.start for one in placed] for part in sent for placed in part.media_S] == [
        [one.start for one in placed] for part in copies for placed in part.media_S
    ]
    written = pickle.dumps(sent)
    assert all(
        written.count(medium.inputs["pixel_values"].tobytes()) == 1
        for medium in {id(m): m for m in media}.values()
    )
    assert strip_media([replace(batch, media_S=())])[0].media_S == ()
