"""`ratchet push`: upload a run's model to a Hugging Face Hub, with a model card."""
