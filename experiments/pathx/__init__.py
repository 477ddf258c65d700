"""Path-X and Path-256, trained in stages."""
