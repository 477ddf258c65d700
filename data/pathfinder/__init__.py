"""Pathfinder images: generated as lists of strokes, drawn on any device."""

from data.pathfinder.generator import generate
from data.pathfinder.geometry import EndpointGeometry, endpoint_geometry
from data.pathfinder.parameters import DIFFICULTIES, Pathfinder, display_list_dtype
from data.pathfinder.render import PackedDisplayLists, Renderer, pack

__all__ = [
    "DIFFICULTIES",
    "EndpointGeometry",
    "PackedDisplayLists",
    "Pathfinder",
    "Renderer",
    "display_list_dtype",
    "endpoint_geometry",
    "generate",
    "pack",
]
