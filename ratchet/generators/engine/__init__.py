"""The embedded generation engine: continuous batching, a KV cache of slots, sampling."""
