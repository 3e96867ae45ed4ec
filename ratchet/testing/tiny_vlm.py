"""Write a small vision-language model with random weights to a directory, without any download.

The model is of the family Qwen2.5-VL, Qwen3-VL or Qwen3-VL-MoE of transformers. It has the family's
image processor, placeholders and chat format (without the default system message). Its tokenizer
has one token per character.
"""

from __future__ import annotations

import json
import string
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.tokenizer_config import PRINTABLE

Family = Literal["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PROCESSORS = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
}
EXPERTS, EXPERTS_PER_TOKEN = 4, 2  # of each layer of a mixture

TEMPLATE = """\
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == "image" -%}{{- "<|vision_start|><|image_pad|><|vision_end|>" -}}
            {%- elif part.type == "video" -%}{{- "<|vision_start|><|video_pad|><|vision_end|>" -}}
            {%- elif "text" in part -%}{{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


@dataclass(frozen=True)
class TinyVLM:
    """The sizes of a tiny vision-language model.

    Two by two patches become one token, so an image of 32 x 32 pixels has (32 / (2 * patch))^2
    tokens.
    """

    family: Family = "qwen2_5_vl"
    alphabet: str = PRINTABLE
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vision_hidden: int = 32
    vision_layers: int = 2
    vision_heads: int = 2
    patch: int = 8
    """Side of a patch, in pixels."""
    window: int = 2
    """Side, in tokens, of the attention windows of Qwen2.5's vision layers. The last layer attends
    to the whole image."""
    max_tokens: int = 64
    """Maximum number of tokens of an image; larger images are scaled down."""
    max_positions: int = 2048
    tied: bool = True
    deepstack: int = 1
    """Number of Qwen3's vision layers whose features are added to the hidden states after as many
    of the first layers."""
    std: float = 0.02
    """Standard deviation of the weights."""
    seed: int = 0

    @property
    def pixels_per_token(self) -> int:
        return (2 * self.patch) ** 2


def write_tiny_vlm(directory: Path, sizes: TinyVLM | None = None) -> Path:
    """Write a Hugging Face directory and return its path.

    It holds float32 weights, the tokenizer, the image processor and the chat template.
    """
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    sizes = sizes or TinyVLM()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = create_vlm_tokenizer(sizes.alphabet)
    with torch.random.fork_rng([]):
        torch.manual_seed(sizes.seed)
        model = AutoModelForImageTextToText.from_config(
            _make_config(sizes, tokenizer), dtype=torch.float32
        )
    model.generation_config = GenerationConfig(
        eos_token_id=list(tokenizer.eos_ids), pad_token_id=tokenizer.pad_id
    )
    model.save_pretrained(directory)
    tokenizer.save(directory)
    _write_processor(directory, sizes)
    return directory


def create_vlm_tokenizer(alphabet: str = PRINTABLE) -> Tokenizer:
    """Return a tokenizer with one token per character, and the special tokens of the Qwen family.

    `alphabet` needs a newline, and the letters of the roles' names.
    """
    return character_tokenizer(
        alphabet, extra_specials=SPECIAL_TOKENS, eos="<|im_end|>", template=TEMPLATE
    )


def _make_config(sizes: TinyVLM, tokenizer: Tokenizer) -> Any:
    from transformers import AutoConfig

    head_dim = sizes.hidden // sizes.heads
    # M-RoPE divides the frequencies among time, height and width. Height and width get equal
    # shares, and time the rest.
    spatial_dims = (head_dim // 2 - head_dim // 8) // 2
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [head_dim // 2 - 2 * spatial_dims, spatial_dims, spatial_dims],
    }
    text: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_positions,
        "initializer_range": sizes.std,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_ids[0],
        "pad_token_id": tokenizer.pad_id,
        "tie_word_embeddings": sizes.tied,
    }
    vision: dict[str, Any] = {
        "depth": sizes.vision_layers,
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "num_heads": sizes.vision_heads,
        "out_hidden_size": sizes.hidden,
        "patch_size": sizes.patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": sizes.std,
    }
    if sizes.family == "qwen2_5_vl":
        vision |= {
            "window_size": 2 * sizes.patch * sizes.window,
            "fullatt_block_indexes": [sizes.vision_layers - 1],
        }
    else:
        rope["mrope_interleaved"] = True
        text["head_dim"] = head_dim
        vision |= {
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(range(sizes.deepstack)),
        }
    if sizes.family == "qwen3_vl_moe":
        text |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "moe_intermediate_size": sizes.hidden,
        }
    ids = {
        name: tokenizer.token_id(f"<|{name}|>")
        for name in ("vision_start", "vision_end", "image_pad", "video_pad")
    }
    return AutoConfig.for_model(
        sizes.family,
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=sizes.tied,
    )


def _write_processor(directory: Path, sizes: TinyVLM) -> None:
    common = {
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {
            "shortest_edge": sizes.pixels_per_token,
            "longest_edge": sizes.max_tokens * sizes.pixels_per_token,
        },
        "patch_size": sizes.patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "processor_class": PROCESSORS[sizes.family],
    }
    video_processor = (
        "Qwen2VLVideoProcessor" if sizes.family == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    )
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": video_processor}),
    ):
        (directory / name).write_text(
            json.dumps({**common, **kind}, indent=2) + "\n", encoding="utf-8"
        )


# The model of ratchet/recipes/shapes.yaml.
SHAPES = TinyVLM(
    alphabet=string.ascii_letters + string.digits + " ?.,\n", vision_hidden=64, std=0.12
)

if __name__ == "__main__":  # python -m ratchet.testing.tiny_vlm DIRECTORY
    write_tiny_vlm(Path(sys.argv[1]), SHAPES)
