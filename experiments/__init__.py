"""Code of every published number, one folder per result: `python -m experiments.NAME`."""
