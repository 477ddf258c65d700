"""GPTs and classifiers, their configurations, parameter and FLOP counts, and import and export."""
