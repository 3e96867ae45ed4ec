"""Generators run the embedded engine, vLLM or transformers behind one protocol."""
