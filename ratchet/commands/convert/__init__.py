"""`ratchet convert`: model weights between Hugging Face, Megatron-core and torch's distributed
checkpoints."""
