"""Attention of a sequence that several processes share: what is behind context_parallel.py."""
