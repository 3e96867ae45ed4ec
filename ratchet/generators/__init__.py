"""The generators (inference engines): the embedded engine, vLLM and transformers."""
