"""vLLM on a tiny model that reads images, videos or audio clips, in a process of its own."""

import asyncio
import base64
import faulthandler
import io
import signal
import tempfile
from pathlib import Path

import numpy as np
import torch
from generators.direct_link import DirectWeightSync
from PIL import Image
from sounds import clip, write_tiny_qwen2_audio

from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.formats.media import embed
from ratchet.data.processor import load_processor
from ratchet.executors import env_vars
from ratchet.generators.config import HFConfig, VLLMConfig
from ratchet.generators.hf import HFGenerator
from ratchet.generators.vllm.generator import VLLMGenerator
from ratchet.models.load import load_policy
from ratchet.protocols import Shard
from ratchet.testing.tiny_vlm import TinyVLM, write_tiny_vlm
from ratchet.types import Message, Part, Sampling

CONFIG = VLLMConfig(
    engine="sync", enforce_eager=True, kv_cache_gib=0.25, max_running=8, max_context=1024
)


def picture(seed, width, height):
    return embed(
        Image.fromarray(
            np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        )
    )


def video(seed, frames):
    """A GIF of noise, whose frames Pillow reads."""
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 32, 48, 3), dtype=np.uint8)
    images = [Image.fromarray(frame) for frame in pixels]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:])
    return Part("video", "data:image/gif;base64," + base64.b64encode(file.getvalue()).decode())


def list_media(family):
    """Two media of different kinds or sizes."""
    if family == "qwen2_audio":
        return clip(1, 0.5), clip(2, 0.8, rate_hz=22_050)  # of another rate than the model's
    return video(1, 7), picture(2, 64, 48)


def prompts(renderer, first, second):
    conversations = [
        (Message("user", "hello"),),
        (Message("user", (first, Part("text", "what?"))),),
        (
            Message(
                "user", (Part("text", "a"), second, Part("text", "b"), first, Part("text", "c"))
            ),
        ),
    ]
    for messages in conversations:
        tokens = renderer.prompt(messages)
        yield tokens, renderer.media(tokens, messages)


class Weights:
    """What a learner pushes."""

    def __init__(self, policy):
        self.policy = policy

    def weights(self):
        for name, tensor in self.policy.canonical_weights():
            yield Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())


def furthest(policy, asked, done):
    most = 0.0
    for (tokens, media), one in zip(asked, done, strict=True):
        row = torch.tensor([*tokens, *one.tokens.tolist()])
        with torch.no_grad():
            hidden = policy.hidden(row, torch.arange(len(row)), [len(row)], media=[media])
            logprobs = policy.logits(hidden).log_softmax(-1)[len(tokens) - 1 : -1]
        most = max(
            most,
            float(
                (
                    logprobs.gather(1, row[len(tokens) :, None])[:, 0]
                    - torch.from_numpy(one.logprobs)
                )
                .abs()
                .max()
            ),
        )
    return most


def write_model(family, directory):
    if family == "qwen2_audio":
        return write_tiny_qwen2_audio(directory, hidden=128, clip_s=30)  # vLLM takes no other
    sizes = TinyVLM(
        family=family,
        hidden=128,
        heads=4,
        kv_heads=2,
        vision_hidden=64,
        max_positions=1024,
        std=0.1,
    )
    return write_tiny_vlm(directory, sizes)


async def agrees(family):
    """Its logprobs are the learner's, before and after a push in which the encoder changed too."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(family, Path(directory))
        policy, tokenizer = load_policy(directory), load_tokenizer(directory)
        renderer = Renderer(tokenizer, processor=load_processor(directory))
        with env_vars.set_env_defaults(CONFIG.environment):
            arguments = {} if family == "qwen2_audio" else {"limit_mm_per_prompt": {"video": 1}}
            config = CONFIG.model_copy(update={"arguments": arguments})
            generator = VLLMGenerator(config, policy, tokenizer)
            asked = list(prompts(renderer, *list_media(family)))

            async def draw(of, seed):
                sampling = Sampling(max_new_tokens=8, seed=seed)
                return await asyncio.gather(
                    *(of.generate(tokens, sampling, media) for tokens, media in asked)
                )

            try:
                before = await draw(generator, 1)
                assert furthest(policy, asked, before) < 1e-4, furthest(policy, asked, before)
                assert (
                    furthest(policy, asked, await draw(HFGenerator(HFConfig(), policy), 1)) < 1e-4
                )
                with torch.no_grad():
                    for weight in policy.model.parameters():
                        weight.mul_(1.05)
                assert furthest(policy, asked, before) > 1e-3
                await DirectWeightSync(Weights(policy), generator).push(1)
                after = await draw(generator, 1)
                assert furthest(policy, asked, after) < 1e-4, furthest(policy, asked, after)
                assert all((one.versions == 1).all() for one in after)
            finally:
                await generator.close()


def run(words):
    signal.alarm(400)  # a hang ends here, with a report of where
    faulthandler.dump_traceback_later(390)
    asyncio.run(agrees(*words))
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
