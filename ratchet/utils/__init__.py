"""Helpers without knowledge of training: files, threads, processes, credentials."""
