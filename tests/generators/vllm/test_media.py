"""Images on their way to vLLM and back, and the real one where it can load a model that reads
them."""

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ratchet.errors import ConfigError, ModelError
from ratchet.generators.request import GenerationRequest
from ratchet.generators.vllm.media import check_expanded, check_installed, collapse_placeholders
from ratchet.generators.vllm.requests import make_vllm_prompt
from ratchet.types import Medium, PlacedMedium, Sampling

PLAY = Path(__file__).parent / "vllm_media_play.py"
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


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
    given = make_vllm_prompt(TWO, 7)
    assert given["prompt_token_ids"] == [1, 9, 2, 9, 3]
    assert [one.size for one in given["multi_modal_data"]["image"]] == [(8, 8), (16, 16)]
    # Under other weights an image is encoded anew.
    assert given["multi_modal_uuids"] == {"image": ["a weights 7", "b weights 7"]}
    assert make_vllm_prompt(request([1, 9, 2]), 7) == {
        "prompt_token_ids": [1, 9, 2],
        "cache_salt": "weights 7",
    }


def test_two_images_side_by_side_stay_two():
    assert collapse_placeholders(
        request([9, 9, 9, 9], PlacedMedium(0, image("a", 2)), PlacedMedium(2, image("b", 2)))
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


def test_what_it_is_not_given_is_refused():
    with pytest.raises(ConfigError, match="kind audio, but the vLLM generator takes only images"):
        make_vllm_prompt(request([1, 9], PlacedMedium(1, Medium("a", "audio", 1, {}, b""))), 0)
    with pytest.raises(ModelError, match="differ from one another"):
        collapse_placeholders(request([1, 8, 9], PlacedMedium(1, image("a", 2))))


@pytest.mark.slow
@pytest.mark.needs("vllm")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_real_one_agrees_with_the_learner_or_says_why_not(family):
    if importlib.util.find_spec("torchvision") is not None:
        done = subprocess.run(
            [sys.executable, str(PLAY), family], capture_output=True, text=True, timeout=420
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        assert done.stdout.endswith("fine\n")
        return
    # vLLM 0.32's own module for the family reads transformers' image processor, which is written
    # with torchvision.
    module = f"vllm.model_executor.models.{family}"
    tried = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=300
    )
    assert "No module named 'torchvision'" in tried.stderr
    with pytest.raises(ModelError, match="need the package 'torchvision'"):
        check_installed()
