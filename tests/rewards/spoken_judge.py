"""A model that says a text that is written into its weights, as a judge of tests."""

from itertools import pairwise
from pathlib import Path

import torch

from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.chat_templates import BUILTIN_TEMPLATES
from ratchet.models.load import init_policy

# Larger than any difference of other logits: the next token is all but certain.
CERTAIN = 10.0


def write_judge(directory: Path, text: str = "Score: #", choices: str = "7", **shape) -> Path:
    """Save a model that answers `text`, with one of `choices` in place of "#", and ends its turn.

    What comes next depends on the last token alone, so no letter may occur twice. At temperature 0
    "#" is the first of the choices; above it, all of them are equally likely.
    """
    tokenizer = byte_tokenizer().with_chat_template(BUILTIN_TEMPLATES["turns"])
    size = tokenizer.vocab_size
    shape = {"n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "max_positions": 512, **shape}
    model = init_policy(
        get_preset("tiny", vocab_size=size, hidden_size=size, tied=False, **shape), seed=0
    )
    weights = dict(model.canonical_weights())
    (start,) = tokenizer.encode("<assistant>", allow_special=True)
    path: list[list[int]] = [[start]]
    for letter in text:
        path.append(
            [t for c in (choices if letter == "#" else letter) for t in tokenizer.encode(c)]
        )
    path.append([tokenizer.eos_ids[0]])
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()
        weights["model.embed_tokens.weight"].copy_(torch.eye(size))
        for before, after in pairwise(path):
            for token in before:
                for rank, following in enumerate(after):
                    weights["lm_head.weight"][following, token] = CERTAIN - rank * 1e-4
    model.save(directory)
    tokenizer.save(directory)
    return directory
