"""Matrix products on Hopper, with what follows them in the same kernel."""
