"""Attention alone: speed, memory and traffic, beside the best there is."""
