"""Traces and profiles of a run."""
