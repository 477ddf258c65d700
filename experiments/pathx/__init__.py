"""Path-X and Path-256, learned in stages."""
