"""Helpers that know nothing of training: files, threads, processes, credentials."""
