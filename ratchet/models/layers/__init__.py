"""Layers of the decoder: attention, mixture of experts, quantized matrices, shared prefixes."""
