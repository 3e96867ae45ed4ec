"""Generators: the embedded engine, vLLM and transformers behind one protocol."""
