"""GPTs and classifiers, and what can be said about them without running them."""
