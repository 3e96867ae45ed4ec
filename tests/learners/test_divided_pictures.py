"""Models that read pictures, divided over ranks by more than rows, compute what one process does."""

import json
import pickle
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from learners.picture_cases import check_ranks, close, local
from learners.ranks import run_ranks
from learners.test_pictures import batch_of, row
from pictures import dialogues, model_directory

from ratchet.config.lora import LoRAConfig
from ratchet.data.packing import pack
from ratchet.learners.config import DTensorConfig
from ratchet.learners.distributed.topology import build_topology
from ratchet.learners.export import export_saved
from ratchet.models.load import load_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.testing.builders import make_group
from ratchet.types import Medium, PlacedMedium, Scored, Trajectory

pytestmark = pytest.mark.slow

ADAPTER = Adapter(LoRAConfig(rank=2, alpha=4.0, target_modules=("q_proj", "down_proj")), seed=5)
PATTERNS = (
    "model.visual.patch_embed",
    "model.language_model.embed_tokens",
    "*.input_layernorm.weight",
)


class Case(NamedTuple):
    family: str
    options: dict  # keys of the learner
    train_encoders: bool = True
    losses: str = "sft"
    adapter: Adapter | tuple[str, ...] | None = None  # or what is frozen
    layers: int = 2  # a model of more has features of images after two of them


SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
CHUNKS = {"pipeline_parallel": 2, "pipeline_chunks": 2}
CASES = {
    "tp2": Case("qwen2_5_vl", {"tensor_parallel": 2}),
    "tp2 of norms of heads": Case("qwen3_vl", {"tensor_parallel": 2}, losses="grpo"),
    "tp2 of experts": Case("qwen3_vl_moe", {"tensor_parallel": 2}, losses="grpo"),
    "tp2 with an adapter": Case("qwen2_5_vl", {"tensor_parallel": 2}, False, "grpo", ADAPTER),
    "tp2 sequence": Case("qwen2_5_vl", SEQUENCE),
    "tp2 sequence of features": Case(
        "qwen3_vl", {**SEQUENCE, "activation_checkpointing": True}, losses="grpo", layers=5
    ),
    "tp2 sequence of experts": Case("qwen3_vl_moe", SEQUENCE),
    "tp2 sequence with an adapter": Case("qwen3_vl", SEQUENCE, False, "grpo", ADAPTER),
    "cp2": Case("qwen2_5_vl", {"context_parallel": 2}),
    "cp2 with checkpointing": Case(
        "qwen3_vl", {"context_parallel": 2, "activation_checkpointing": True}, losses="grpo"
    ),
    "cp2 with an adapter": Case("qwen3_vl", {"context_parallel": 2}, False, "sft", ADAPTER),
    "ep2": Case("qwen3_vl_moe", {"dp_shard": 2, "expert_parallel": 2}, losses="grpo"),
    "cp2 of films": Case("qwen3_vl", {"context_parallel": 2}, losses="sft of films"),
    "cp2 of whole films": Case("qwen2_5_vl", {"context_parallel": 2}, losses="sft of films"),
    "cp2 x ep2": Case("qwen3_vl_moe", {"context_parallel": 2, "expert_parallel": 2}),
    "pp2": Case(
        "qwen3_vl", {"pipeline_parallel": 2, "activation_checkpointing": True}, losses="grpo"
    ),
    "pp2 of films": Case("qwen3_vl", {"pipeline_parallel": 2}, losses="sft of films", layers=5),
    "pp2 interleaved": Case("qwen2_5_vl", CHUNKS, losses="grpo", layers=5),
    "pp2 interleaved of features": Case(
        "qwen3_vl", {**CHUNKS, "stage_layers": [2, 1, 1, 1]}, layers=5
    ),
    "pp2 with an adapter": Case("qwen3_vl", {"pipeline_parallel": 2}, False, "sft", ADAPTER),
    "pp2 with frozen weights": Case(
        "qwen3_vl", {"pipeline_parallel": 2}, losses="grpo", adapter=PATTERNS
    ),
    "pp2 with frozen encoders": Case("qwen2_5_vl", {"pipeline_parallel": 2}, False, "grpo"),
    "cp4": Case("qwen3_vl", {"context_parallel": 4}),
    "cp2 x tp2": Case("qwen3_vl", {"context_parallel": 2, "tensor_parallel": 2}),
    "cp2 x tp2 sequence": Case("qwen3_vl", {"context_parallel": 2, **SEQUENCE}),
    "fsdp2 x cp2": Case("qwen2_5_vl", {"dp_shard": 2, "context_parallel": 2}, losses="grpo"),
    "fsdp2 x tp2": Case("qwen3_vl", {"dp_shard": 2, "tensor_parallel": 2}),
    "pp2 x fsdp2": Case("qwen3_vl", {"pipeline_parallel": 2, "dp_shard": 2}, losses="grpo"),
    "pp2 x tp2 sequence": Case(
        "qwen3_vl", {"pipeline_parallel": 2, **SEQUENCE, "stage_layers": [3, 2]}, layers=5
    ),
    "pp2 x cp2": Case("qwen3_vl", {"pipeline_parallel": 2, "context_parallel": 2}, losses="grpo"),
    "pp2 x ep2": Case(
        "qwen3_vl_moe", {"pipeline_parallel": 2, "dp_shard": 2, "expert_parallel": 2}
    ),
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
            by_rank = run_ranks(
                world, "learners.picture_cases:ranked_each", [_arguments(n) for n in names]
            )
            found.update(zip(names, zip(*by_rank, strict=True), strict=True))
        return found[name]

    return results


def _arguments(name):
    case = CASES[name]
    batches = pickle.dumps(batches_of(case.family, case.losses))
    directory = model_directory(case.family, case.layers)
    return case.options, directory, case.train_encoders, batches, None, case.losses, case.adapter


def _ranks(name):
    return build_topology(DTensorConfig(**CASES[name].options)).world_size


def expected_of(case, batches):
    return local(
        model_directory(case.family, case.layers),
        case.train_encoders,
        batches,
        losses=case.losses,
        adapter=case.adapter,
    )


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_what_one_process_does(name, together):
    case = CASES[name]
    batches = batches_of(case.family, case.losses)
    check_ranks(together(name), case.options, expected_of(case, batches), batches[-1])


def test_a_pipeline_goes_on_from_a_checkpoint_of_one_process(tmp_path):
    """And one process reads what the pipeline saves."""
    case = CASES["pp2"]
    directory = model_directory(case.family)
    first, *later = batches_of(case.family, "sft")
    saved = [tmp_path / "one", tmp_path / "two"]
    run_ranks(
        1, "learners.picture_cases:ranked", {}, directory, True, pickle.dumps([first]), saved[0]
    )
    results = run_ranks(
        2,
        "learners.picture_cases:ranked",
        case.options,
        directory,
        True,
        pickle.dumps(later),
        saved[1],
        "sft",
        None,
        saved[0],
    )
    whole = local(directory, True, [first, *later])
    check_ranks(results, case.options, (whole[0][1:], *whole[1:]), later[-1])
    policy = load_policy(directory, dtype=torch.float64, train_encoders=True)
    export_saved(policy, saved[1], tmp_path / "exported")
    exported = load_policy(tmp_path / "exported", train_encoders=True)
    close(
        dict(exported.canonical_weights()),
        {name: weight.float() for name, weight in whole[1].items()},
    )


def test_a_division_that_changes_what_a_model_sees_is_refused():
    for said in run_ranks(
        2, "learners.picture_cases:refused_features", model_directory("qwen3_vl")
    ):
        assert "computes something else when its tokens are divided over ranks" in said
