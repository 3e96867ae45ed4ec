"""Alibaba ROLL: its key tables, and conversions of its values."""
