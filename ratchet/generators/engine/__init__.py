"""The embedded inference engine: continuous batching, a KV cache of slots, and sampling."""
