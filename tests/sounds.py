"""Audio clips for tests, and a tiny Qwen2-Audio that reads them."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path

import numpy as np
import torch

from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.types import Part

RATE_HZ = 16_000
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
TEMPLATE = """\
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" -}}
    {%- if message.content is string -%}{{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == "audio" -%}{{- "<|audio_bos|><|AUDIO|><|audio_eos|>" -}}
            {%- else -%}{{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


def write_tiny_qwen2_audio(path: Path, hidden: int = 32, clip_s: int = 1) -> Path:
    """Write a model that reads clips of `clip_s` seconds at 8 frequencies, of 25 tokens each."""
    from transformers import (
        AutoConfig,
        AutoModelForMultimodalLM,
        AutoTokenizer,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer = character_tokenizer(
        "abcdefghijklmnopqrstuvwxyz?: \n",
        extra_specials=CONTROLS,
        eos="<|im_end|>",
        template=TEMPLATE,
    )
    text = {
        "model_type": "qwen2",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_ids[0],
        "pad_token_id": tokenizer.pad_id,
    }
    audio = {
        "num_mel_bins": 8,
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "max_source_positions": 50 * clip_s,
    }
    token = tokenizer.special_ids["<|AUDIO|>"]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen2_audio", text_config=text, audio_config=audio, audio_token_index=token
        )
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer.save(path)
    extractor = WhisperFeatureExtractor(
        feature_size=8, sampling_rate=RATE_HZ, chunk_length=clip_s, return_attention_mask=True
    )
    Qwen2AudioProcessor(
        extractor, AutoTokenizer.from_pretrained(path), chat_template=TEMPLATE
    ).save_pretrained(path)
    tokenizer.save(path)
    return path


def clip(seed: int, seconds: float, rate_hz: int = RATE_HZ) -> Part:
    noise = np.random.default_rng(seed).integers(
        -8000, 8000, int(seconds * rate_hz), dtype=np.int16
    )
    file = io.BytesIO()
    with wave.open(file, "wb") as writing:
        writing.setnchannels(1)
        writing.setsampwidth(2)
        writing.setframerate(rate_hz)
        writing.writeframes(noise.tobytes())
    return Part("audio", "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode())
