"""Images, videos and audio clips on their way to vLLM and back, and the real vLLM with them."""

import io
import os
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import call_in_fork
from PIL import Image
from safetensors.torch import load_file

from ratchet.errors import ConfigError, ModelError
from ratchet.generators.request import GenerationRequest
from ratchet.generators.vllm import media as vllm_media
from ratchet.generators.vllm.media import (
    MediaSettings,
    check_expanded,
    check_torchvision,
    collapse_placeholders,
    make_media_arguments,
)
from ratchet.generators.vllm.requests import make_vllm_prompt
from ratchet.generators.vllm.weight_names import make_rename, rewrite_start_weights
from ratchet.generators.vllm.weights import FileCarrier, PushWriter
from ratchet.protocols import Shard
from ratchet.types import Medium, PlacedMedium, Sampling

TESTS = Path(__file__).resolve().parents[2]
WITHOUT_OPERATORS = TESTS / "support" / "torchvision_without_operators"
TORCHVISION = TESTS.parent / ".venv" / "torchvision"
TEXT_ALONE = MediaSettings()
VIDEOS = MediaSettings(takes_videos=True, placeholders={"video": 9})


def image(key, span, side=8):
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(buffer, "PNG")
    return Medium(key, "image", span, {}, buffer.getvalue())


def request(tokens, *placed):
    return GenerationRequest(
        np.array(tokens), Sampling(max_new_tokens=4), len(tokens) + 4, print, print, media=placed
    )


TWO = request(
    [1, 9, 9, 9, 2, 9, 9, 3], PlacedMedium(1, image("a", 3)), PlacedMedium(5, image("b", 2, 16))
)


def test_each_image_is_one_placeholder_and_says_what_it_is():
    given = make_vllm_prompt(TWO, 7, TEXT_ALONE)
    assert given["prompt_token_ids"] == [1, 9, 2, 9, 3]
    assert [one.size for one in given["multi_modal_data"]["image"]] == [(8, 8), (16, 16)]
    # Under other weights an image is encoded anew.
    assert given["multi_modal_uuids"] == {"image": ["a weights 7", "b weights 7"]}
    assert make_vllm_prompt(request([1, 9, 2]), 7, TEXT_ALONE) == {
        "prompt_token_ids": [1, 9, 2],
        "cache_salt": "weights 7",
    }


def test_two_images_side_by_side_stay_two():
    assert collapse_placeholders(
        request([9, 9, 9, 9], PlacedMedium(0, image("a", 2)), PlacedMedium(2, image("b", 2))),
        TEXT_ALONE,
    ) == [
        9,
        9,
    ]


def test_what_vllm_makes_of_a_prompt_is_compared():
    check_expanded(TWO, TWO.prompt.tolist())
    check_expanded(request([1, 2]), None)
    for other in ([1, 9, 9, 2, 9, 9, 3], [1, 9, 9, 9, 2, 9, 9, 4], None):
        with pytest.raises(ModelError, match=r"vLLM expands .* set generator\.kind=hf"):
            check_expanded(TWO, other)


def video(frames, kept):
    images = [Image.new("RGB", (8, 8), (20 * i, 0, 0)) for i in range(frames)]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:])
    return Medium("v", "video", 4, {}, file.getvalue(), n_frames=kept)


def test_videos_have_the_frames_that_the_learner_s_processor_got():
    # Frames of Qwen3-VL have their times between them; vLLM takes one placeholder all the same.
    asked = request([1, 5, 9, 6, 9, 2], PlacedMedium(1, video(9, kept=4)))
    given = make_vllm_prompt(asked, 7, VIDEOS)
    assert given["prompt_token_ids"] == [1, 9, 2]
    ((frames, times),) = given["multi_modal_data"]["video"]
    assert frames.shape == (4, 8, 8, 3)
    assert (times["total_num_frames"], times["frames_indices"]) == (4, [0, 1, 2, 3])
    assert make_media_arguments({})["limit_mm_per_prompt"] == {"video": 0}
    limits = make_media_arguments({"limit_mm_per_prompt": {"image": 3, "video": 1}})
    assert limits["limit_mm_per_prompt"] == {"image": 3, "video": 1}
    assert limits["mm_hasher_algorithm"] == "sha256"
    recipe_arguments = {"mm_hasher_algorithm": "blake3"}
    assert make_media_arguments(recipe_arguments)["mm_hasher_algorithm"] == "blake3"
    with pytest.raises(ConfigError, match=r"limit_mm_per_prompt=\{video: 1\}"):
        make_vllm_prompt(request([9] * 4, PlacedMedium(0, video(1, 1))), 7, TEXT_ALONE)


@pytest.mark.needs("soundfile")
def test_clips_have_the_rate_of_the_learner_s_processor():
    file = io.BytesIO()
    with wave.open(file, "wb") as writing:
        writing.setnchannels(1)
        writing.setsampwidth(2)
        writing.setframerate(8000)
        writing.writeframes(bytes(1600))
    asked = request([9], PlacedMedium(0, Medium("a", "audio", 1, {}, file.getvalue())))
    given = make_vllm_prompt(asked, 7, MediaSettings(audio_rate_hz=16_000))
    ((samples, rate),) = given["multi_modal_data"]["audio"]
    assert (len(samples), rate) == (1600, 16_000)


def test_weights_have_the_names_that_vllm_reads(tmp_path):
    config = {"model_type": "qwen2_audio"}
    names = ("model.language_model.norm.weight", "lm_head.weight", "model.audio_tower.conv1.bias")
    shared = torch.zeros(1)  # two weights may share memory
    weights = list(zip(names, (shared, torch.ones(1), shared), strict=True))
    (tmp_path / "model-00001-of-00001.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").touch()
    rewrite_start_weights(tmp_path, config, weights)
    (path,) = tmp_path.iterdir()
    read = {name: weight.tolist() for name, weight in load_file(path).items()}
    assert read == {
        "language_model.model.norm.weight": [0],
        "language_model.lm_head.weight": [1],
        "audio_tower.conv1.bias": [0],
    }
    writer = PushWriter(
        FileCarrier(tmp_path, torch.float32), dict.fromkeys(names, (1,)), make_rename(config)
    )
    writer.add(Shard(name, (1,), (0,), weight) for name, weight in weights)
    assert writer.build_manifest()["entries"].keys() == read.keys()
    assert make_rename({"model_type": "qwen3"})("model.norm.weight") == "model.norm.weight"


def test_what_it_is_not_given_is_refused(monkeypatch):
    with pytest.raises(ModelError, match="differ from one another"):
        collapse_placeholders(request([1, 8, 9], PlacedMedium(1, image("a", 2))), VIDEOS)
    monkeypatch.setattr(vllm_media, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="need the package 'torchvision'"):
        check_torchvision()


@pytest.mark.slow
@pytest.mark.needs("vllm", "av", "soundfile", str(TORCHVISION / "installed"))
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2_audio"])
def test_the_real_one_agrees_with_the_learner(family):
    """On images and videos, or on audio clips, before and after a push."""
    paths = (WITHOUT_OPERATORS, TORCHVISION)
    done = call_in_fork(
        "generators.vllm_media_play:run",
        [family],
        environment={"PYTHONPATH": os.pathsep.join(map(str, paths))},
        timeout=420,
        preload=("support.vllm_preload", "generators.vllm_media_play"),
        paths=paths,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
