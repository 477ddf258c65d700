"""What is run by hand, as `python -m scripts.NAME`, from the root of the checkout."""
