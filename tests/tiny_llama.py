"""A Hugging Face directory as a user has it: a Llama of two layers with random weights, a small
byte-level BPE, and a chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_llama(path: Path, texts: Iterable[str], *, positions: int = 256, seed: int = 0) -> Path:
    """Write the directory, with a tokenizer trained on the texts, and return its path."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # pyright: ignore[reportCallIssue]
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            bos_token_id=SPECIAL.index("<|begin|>"),
            eos_token_id=SPECIAL.index("<|end|>"),
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
