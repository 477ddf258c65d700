"""Damaged, hostile and interrupted runs: what docs/reliability.md promises, tried."""
