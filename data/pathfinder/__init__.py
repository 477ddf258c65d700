"""Pathfinder images: generated as lists of strokes, drawn on any device."""
