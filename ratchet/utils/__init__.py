"""Helpers that do not depend on training: files, threads, processes, credentials."""
