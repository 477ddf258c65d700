"""Contour following: baselines that see the markers only, and the attention of trained models."""
