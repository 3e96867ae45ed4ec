"""Write a randomly initialised model in the shape of Qwen3, with a character tokenizer.

    python benchmarks/peers/make_model.py DIR [--size S]

Speed does not depend on the values of the weights, so the benchmarks need no download.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from protocol import LETTERS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# (hidden size, layers, heads, key/value heads, head dimension, feed-forward size). T, S, M and L have
# 0.1 M, 0.8 M, 9.8 M and 52 M parameters; the others are Qwen3's.
SIZES = {
    "T": (64, 2, 2, 2, 32, 192),
    "S": (128, 4, 4, 2, 32, 384),
    "M": (384, 6, 6, 3, 64, 1024),
    "L": (768, 8, 12, 6, 64, 2048),
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144),
}
SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")
CHARACTERS = LETTERS + "+-*/=()<>,.:?#| \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<user>' if message.role == 'user' else '<assistant>' }}{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    ids = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(size: str, *, vocabulary: int, depth: int, seed: int) -> Qwen3ForCausalLM:
    hidden, layers, heads, kv_heads, head_dim, feed_forward = SIZES[size]
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=depth * layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=feed_forward,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random model for the benchmarks.")
    parser.add_argument("directory")
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=64,
        help="rows of the embedding, of which the tokenizer uses the first 64",
    )
    parser.add_argument("--depth", type=int, default=1, help="factor of the number of layers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = make_model(
        options.size, vocabulary=options.vocabulary, depth=options.depth, seed=options.seed
    )
    model.save_pretrained(options.directory)
    make_tokenizer().save_pretrained(options.directory)


if __name__ == "__main__":
    main()
