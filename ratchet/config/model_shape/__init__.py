"""Shapes of models: decoder configurations, presets and LoRA targets. Nothing imports torch."""
