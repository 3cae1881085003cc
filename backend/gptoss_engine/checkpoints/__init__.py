"""Checkpoints on disk: read, made up, converted, written. What is in memory is loading.py's."""
