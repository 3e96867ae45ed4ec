"""Parts that don't belong together are refused where they are put together."""

import pytest

from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.errors import ModelError
from ratchet.models.load import init_policy
from ratchet.training.stage import Policy


@pytest.mark.fault("M6")
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_with_both_sizes():
    tokenizer = character_tokenizer("0123456789")
    model = init_policy(get_preset("tiny", vocab_size=tokenizer.vocab_size - 1), seed=0)
    with pytest.raises(
        ModelError,
        match=f"has {tokenizer.vocab_size} tokens, but the model's embedding has {model.vocab_size}",
    ):
        Policy.create(model, tokenizer)
