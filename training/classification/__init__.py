"""A classifier that learns labels of examples, or their own tokens before."""
