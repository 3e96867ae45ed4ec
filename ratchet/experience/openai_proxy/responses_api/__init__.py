"""Serve the Responses API of OpenAI: its requests, its replies, and the stored responses."""
