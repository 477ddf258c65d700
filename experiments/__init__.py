"""What stands behind our numbers, a folder a result: `python -m experiments.NAME`."""
