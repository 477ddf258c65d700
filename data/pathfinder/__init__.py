"""Pathfinder images: generated as lists of strokes, rendered on any device."""
