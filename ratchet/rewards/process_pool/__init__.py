"""Worker processes for rewards that may hang or crash."""
