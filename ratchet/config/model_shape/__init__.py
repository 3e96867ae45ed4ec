"""Shapes of models: decoder configurations, presets and the targets of LoRA. Free of torch."""
