"""Operators of a training step other than attention."""
