"""Sampling and training on videos, in a process of its own: `python video_play.py DIRECTORY`.

It writes result.json there. The process has a torchvision that is not the environment's: its compiled
part belongs to another build of torch, and the video processors do without it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

sys.modules["torchvision._meta_registrations"] = types.ModuleType("no compiled operators")
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from safetensors.torch import load_file  # noqa: E402

from ratchet.data.chat.renderer import Renderer  # noqa: E402
from ratchet.data.chat.tokenizer_loading import load_tokenizer  # noqa: E402
from ratchet.data.processor import load_processor  # noqa: E402
from ratchet.generators.config import HFConfig  # noqa: E402
from ratchet.generators.hf import HFGenerator  # noqa: E402
from ratchet.models.load import load_policy  # noqa: E402
from ratchet.testing.tiny_vlm import TinyVLM, write_tiny_vlm  # noqa: E402
from ratchet.training.start import resume_run, start_run  # noqa: E402
from ratchet.types import Message, Part, Sampling  # noqa: E402

RECIPE = """\
name: videos
model: {{path: {model}}}
generator: {{kind: hf}}
device: cpu
threads: 1
environment:
  {{kind: dataset, train: {rows}, media_root: {root}, test_share: 0.0, prompt: "<video>{{question}}"}}
rewards: [{{kind: "{function}"}}]
evaluation: {{tasks: 0}}
algorithm: {{kind: grpo, group_size: 3}}
sampling: {{max_new_tokens: 4}}
logging: {{progress: "off", tensorboard: false}}
checkpoint: {{every: 1, keep: 3}}
steps: 2
batch_size: 2
optimizer: {{lr: 1e-3, warmup_steps: 0}}
"""


# A model with random weights hardly ever answers rightly: the attempts of a group just differ.
REWARD = """\
from ratchet.types import Owner


def judge(trajectory, task):
    return int(trajectory.tokens[trajectory.owner == Owner.POLICY].sum()) % 5 / 4
"""


def make_mp4(seed: int, frames: int, width: int = 64, height: int = 48) -> bytes:
    """Return a video of noise, by PyAV."""
    file, random = io.BytesIO(), np.random.default_rng(seed)
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(frames):
            pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def ask(*parts: str | bytes) -> tuple[Message, ...]:
    def make(part: str | bytes) -> Part:
        if isinstance(part, str):
            return Part("text", part)
        return Part("video", f"data:video/mp4;base64,{base64.b64encode(part).decode()}")

    return (Message("user", tuple(map(make, parts))),)


def compare_logprobs(directory: Path) -> float:
    """Return the largest difference between the sampler's and the learner's log-probabilities."""
    policy: Any = load_policy(str(directory))
    renderer = Renderer(load_tokenizer(directory), processor=load_processor(directory))
    prompts = [
        ask("hello"),
        ask(make_mp4(1, 4), "what?"),
        ask("a", make_mp4(2, 6), "and", make_mp4(3, 2, 48, 64), "?"),
    ]
    requests = []
    for seed, messages in enumerate(prompts):
        tokens = renderer.prompt(messages)
        sampling = Sampling(max_new_tokens=8, temperature=0.8, seed=seed)
        requests.append((tokens, sampling, renderer.media(tokens, messages)))
    assert [len(media) for *_, media in requests] == [0, 1, 2]

    async def sample() -> list[Any]:
        generator = HFGenerator(HFConfig.model_validate({}), policy)
        return await asyncio.gather(*(generator.generate(*request) for request in requests))

    differences = []
    for (prompt, sampling, media), completion in zip(requests, asyncio.run(sample()), strict=True):
        tokens_T = torch.tensor([*prompt, *completion.tokens.tolist()])
        with torch.no_grad():
            hidden_Td = policy.hidden(
                tokens_T, torch.arange(len(tokens_T)), [len(tokens_T)], media=[media]
            )
            logprobs_TV = (policy.logits(hidden_Td) / sampling.temperature).log_softmax(-1)
        own_T = torch.arange(len(prompt) - 1, len(tokens_T) - 1)
        learned = logprobs_TV[own_T, tokens_T[len(prompt) :]].numpy()
        differences.append(float(np.abs(learned - completion.logprobs).max()))
    return max(differences)


def train(folder: Path, model: Path) -> dict[str, bool]:
    """Train two steps, then from the first step's checkpoint again. Compare the weights."""
    rows = []
    for seed in range(4):
        (folder / f"{seed}.mp4").write_bytes(make_mp4(seed, 4))
        rows.append({"question": f"what {seed}?", "answer": "noise", "videos": f"{seed}.mp4"})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = folder / "recipe.yaml"
    (folder / "judge.py").write_text(REWARD, encoding="utf-8")
    function = f"{folder}/judge.py:judge"
    recipe.write_text(
        RECIPE.format(model=model, rows=file, root=folder, function=function), encoding="utf-8"
    )
    assert start_run(recipe, [], folder / "whole", command="test") == 0
    assert start_run(recipe, ["steps=1"], folder / "cut", command="test") == 0
    assert resume_run(folder / "cut", ["steps=2"], command="test") == 0
    final, resumed = (
        load_file(folder / run / "model" / "model.safetensors") for run in ("whole", "cut")
    )
    first = load_file(model / "model.safetensors")
    return {
        "learned": any(not torch.equal(final[name], first[name]) for name in first),
        "resumed": all(torch.equal(final[name], resumed[name]) for name in final),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    result: dict[str, Any] = {}
    for family in ("qwen2_5_vl", "qwen3_vl"):
        directory = write_tiny_vlm(folder / family, TinyVLM(family=family, std=0.15))
        result[family] = compare_logprobs(directory)
    result |= train(folder, folder / "qwen2_5_vl")
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
