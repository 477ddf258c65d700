"""Evaluate trained runs: losses, differences between models and their confidence intervals."""
