"""The C kernels for a small decoder in float32 on a CPU."""
