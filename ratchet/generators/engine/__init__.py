"""The embedded generation engine has continuous batching, a KV cache of slots, and sampling."""
