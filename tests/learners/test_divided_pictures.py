"""Models that read pictures, divided over ranks by more than rows, compute what one process does."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from learners.picture_cases import check_ranks, local
from learners.ranks import run_ranks
from learners.test_pictures import batch_of, row
from pictures import dialogues, model_directory

from ratchet.config.lora import LoRAConfig
from ratchet.data.packing import pack
from ratchet.learners.config import DTensorConfig
from ratchet.learners.distributed.topology import build_topology
from ratchet.models.lora.decoder import Adapter
from ratchet.testing.builders import make_group
from ratchet.types import Medium, PlacedMedium, Scored, Trajectory

pytestmark = pytest.mark.slow

ADAPTER = Adapter(LoRAConfig(rank=2, alpha=4.0, target_modules=("q_proj", "down_proj")), seed=5)
# Name: (family, keys of the learner, whether encoders train, losses, adapter).
CASES = {
    "tp2": ("qwen2_5_vl", {"tensor_parallel": 2}, True, "sft", None),
    "tp2 of norms of heads": ("qwen3_vl", {"tensor_parallel": 2}, True, "grpo", None),
    "tp2 of experts": ("qwen3_vl_moe", {"tensor_parallel": 2}, True, "grpo", None),
    "tp2 with an adapter": ("qwen2_5_vl", {"tensor_parallel": 2}, False, "grpo", ADAPTER),
    "cp2": ("qwen2_5_vl", {"context_parallel": 2}, True, "sft", None),
    "cp2 with checkpointing": (
        "qwen3_vl",
        {"context_parallel": 2, "activation_checkpointing": True},
        True,
        "grpo",
        None,
    ),
    "cp2 with an adapter": ("qwen3_vl", {"context_parallel": 2}, False, "sft", ADAPTER),
    "ep2": ("qwen3_vl_moe", {"dp_shard": 2, "expert_parallel": 2}, True, "grpo", None),
    "cp2 of films": ("qwen3_vl", {"context_parallel": 2}, True, "sft of films", None),
    "cp2 of whole films": ("qwen2_5_vl", {"context_parallel": 2}, True, "sft of films", None),
    "cp2 x ep2": ("qwen3_vl_moe", {"context_parallel": 2, "expert_parallel": 2}, True, "sft", None),
    "cp4": ("qwen3_vl", {"context_parallel": 4}, True, "sft", None),
    "cp2 x tp2": ("qwen3_vl", {"context_parallel": 2, "tensor_parallel": 2}, True, "sft", None),
    "fsdp2 x cp2": ("qwen2_5_vl", {"dp_shard": 2, "context_parallel": 2}, True, "grpo", None),
    "fsdp2 x tp2": ("qwen3_vl", {"dp_shard": 2, "tensor_parallel": 2}, True, "grpo", None),
}


def batches_of(family, losses):
    """Rows of unequal lengths with three pictures, one of them twice, and without; with examples
    two tokens, of which some ranks have none; then rows of which some have no picture."""
    if losses == "sft of films":
        groups = [make_group(str(i), [films]) for i, films in enumerate([filmed(family)] * 2)]
        return [pack(groups), pack(groups[:1])]
    if losses == "sft":
        short = pack([make_group("short", [Trajectory.supervised([5, 6], [False, True])])])
        return [batch_of(family, 0, 1, 2), short, batch_of(family, 1, 2, 1)]
    steps = []
    for numbers in ((0, 1, 2), (2, 1)):
        groups = [
            make_group(
                f"g{place}",
                [
                    replace(row(family, dialogues()[number]), attempt=i, outcome=Scored(reward))
                    for i, reward in enumerate((0.0, 1.0))
                ],
            )
            for place, number in enumerate(numbers)
        ]
        steps.append(pack(groups))
    return steps


def filmed(family):
    """A row with a film of two frames, whose tokens text separates as Qwen3-VL's processor does, between
    two pictures."""
    shown = row(family, dialogues()[0])
    config = json.loads((model_directory(family) / "config.json").read_text())
    image, first = config["image_token_id"], shown.media[0].medium
    numbers = torch.Generator().manual_seed(7)
    pixels = torch.rand(2 * 16, first.inputs["pixel_values"].shape[1], generator=numbers).numpy()
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": np.asarray([[2, 4, 4]])}
    frame = [config["video_token_id"]] * 4
    frames = [*frame, 3, *frame] if family == "qwen3_vl" else 2 * frame
    film = Medium("film", "video", len(frames), inputs, b"")
    tokens = [1, 2, *[image] * first.span, 6, *frames, 7, 8, *[image] * first.span, 9, 10]
    starts = (2, 3 + first.span, 5 + first.span + len(frames))
    placed = zip(starts, (first, film, first), strict=True)
    media = tuple(PlacedMedium(start, medium) for start, medium in placed)
    trainable = [place > 0 and token not in (image, frame[0]) for place, token in enumerate(tokens)]
    return Trajectory.supervised(tokens, trainable, media=media)


@pytest.fixture(scope="module")
def together():
    """The results by rank of each case, by its name; cases of as many ranks run together."""
    found = {}

    def results(name):
        world = _ranks(name)
        if name not in found:
            names = [other for other in CASES if _ranks(other) == world]
            arguments = []
            for other in names:
                family, options, train_encoders, losses, adapter = CASES[other]
                batches = pickle.dumps(batches_of(family, losses))
                directory = model_directory(family)
                arguments.append(
                    (options, directory, train_encoders, batches, None, losses, adapter)
                )
            by_rank = run_ranks(world, "learners.picture_cases:ranked_each", arguments)
            found.update(zip(names, zip(*by_rank, strict=True), strict=True))
        return found[name]

    return results


def _ranks(name):
    return build_topology(DTensorConfig(**CASES[name][1])).world_size


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_what_one_process_does(name, together):
    family, options, train_encoders, losses, adapter = CASES[name]
    batches = batches_of(family, losses)
    expected = local(
        model_directory(family), train_encoders, batches, losses=losses, adapter=adapter
    )
    check_ranks(together(name), options, expected, batches[-1])


def test_a_division_that_changes_what_a_model_sees_is_refused():
    for said in run_ranks(
        2, "learners.picture_cases:refused_features", model_directory("qwen3_vl")
    ):
        assert "computes something else when its tokens are divided over ranks" in said
