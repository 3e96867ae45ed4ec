"""Models: our decoder, models of transformers and of Megatron Core, and their weights."""
