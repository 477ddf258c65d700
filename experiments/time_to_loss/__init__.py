"""Seconds of training that each recipe needs for nanoGPT's loss."""
