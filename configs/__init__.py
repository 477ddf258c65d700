"""Configurations of complete runs in YAML, and code that reads and explains them for any schema."""
