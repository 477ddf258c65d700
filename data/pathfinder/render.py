"""Renderer of Pathfinder images from display lists, in PyTorch.

Drawing uses integer arithmetic, and grey levels are rounded with operations that IEEE 754 defines
exactly. An image is therefore the same on every device and in every batch.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from data.pathfinder.parameters import Pathfinder, check_display_lists
from data.pathfinder.templates import banks_of, marker_patch

_GAIN_UNIT = 10  # gains are multiples of 0.1


@dataclass(frozen=True)
class PackedDisplayLists:
    """Display lists as tensors on a device; see `display_list_dtype` for their meaning."""

    templates: Tensor  # (B, max_strokes) int16
    positions: Tensor  # (B, max_strokes, 2) uint8, y and x
    n_strokes: Tensor  # (B,) uint8
    markers: Tensor  # (B, 2, 2) uint8

    def __len__(self) -> int:
        return len(self.n_strokes)

    def __getitem__(self, index: slice | Tensor) -> "PackedDisplayLists":
        """Select display lists by a slice or by a tensor of indices on the same device."""
        return PackedDisplayLists(*(getattr(self, field.name)[index] for field in fields(self)))


def pack(display_lists: np.ndarray, device: torch.device | str = "cpu") -> PackedDisplayLists:
    """Move display lists, (B,) from `generate`, to a device; raises ValueError for other arrays."""
    names = display_lists.dtype.names or ()
    if "strokes" not in names or display_lists.ndim != 1:
        raise ValueError(
            f"display_lists is an array {display_lists.shape} of {display_lists.dtype}, but must "
            "be a one-dimensional array as `generate` returns it."
        )
    strokes = display_lists["strokes"]
    arrays = (
        strokes["template"].astype(np.int16),
        np.stack([strokes["y"], strokes["x"]], axis=-1),
        display_lists["n_strokes"].copy(),
        display_lists["markers"].copy(),
    )
    return PackedDisplayLists(*(torch.from_numpy(array).to(device) for array in arrays))


class Renderer:
    """Renderer of images with one set of parameters, on one device."""

    def __init__(self, parameters: Pathfinder, device: torch.device | str = "cpu") -> None:
        """Copy the templates to a device; they take at most 1 MB."""
        self.parameters = parameters
        patches, marker = _line_patches(parameters), marker_patch(parameters)
        gains = np.full(parameters.max_strokes, parameters.scale.distractor_gain)
        gains[: 2 * parameters.contour_length] = parameters.scale.target_gain
        self._patches = torch.from_numpy(patches).to(device)  # (n, side^2) uint8
        self._gains = torch.from_numpy(np.rint(gains * _GAIN_UNIT).astype(np.int32)).to(device)
        marker = marker.reshape(-1).astype(np.int32) * _GAIN_UNIT
        self._marker = torch.from_numpy(marker).to(device)  # (marker_side^2,)
        reaches = [int(array.shape[-1] ** 0.5) // 2 for array in (patches, marker)]
        # Patches may cross the edge, so they are drawn on a larger canvas that is then cropped.
        self._pad = max(reaches)
        self._stride = parameters.size + 2 * self._pad
        self._offsets, self._marker_offsets = (
            torch.from_numpy(self._square(reach)).to(device) for reach in reaches
        )
        self._slots = torch.arange(parameters.max_strokes, device=device)

    def __call__(self, display_lists: np.ndarray | PackedDisplayLists) -> Tensor:
        """Draw B images, (B, size, size) uint8 on the renderer's device, each from 0 to 255.

        If the lists are packed on the renderer's device, the call does not synchronize with the
        host and no shape depends on the data. It can then be captured in a CUDA graph.

        Raises:
            ValueError: The lists are from images with other parameters.
        """
        if isinstance(display_lists, np.ndarray):
            check_display_lists(display_lists, self.parameters)
            display_lists = pack(display_lists, self._patches.device)
        if display_lists.templates.shape[1] != len(self._slots):
            raise ValueError(
                f"display_lists has {display_lists.templates.shape[1]} strokes per image, but "
                f"{self.parameters} has {len(self._slots)}; pass the parameters with which they "
                "were generated."
            )
        batch = len(display_lists)
        valid = self._slots < display_lists.n_strokes[:, None]
        gains = torch.where(valid, self._gains, 0)
        values = self._patches[display_lists.templates.int()] * gains[..., None]
        indices = self._indices(display_lists.positions)[..., None] + self._offsets
        marker_indices = self._indices(display_lists.markers)[..., None] + self._marker_offsets
        lines = self._draw(indices.flatten(1), values.flatten(1))
        markers = self._draw(
            marker_indices.flatten(1), self._marker.expand(batch, 2, -1).flatten(1)
        )
        # as in the reference, where lines are float32 and markers float64
        return _stretch(torch.maximum(lines.float().double(), markers))

    def _draw(self, indices: Tensor, values: Tensor) -> Tensor:
        """Draw the largest value at each pixel: (B, size, size) float64, 1 at full gain.

        Args:
            indices: Canvas indices, (B, n) int64.
            values: (B, n) int32.
        """
        batch, side = len(indices), self._stride
        canvas = torch.zeros(batch, side**2, dtype=torch.int32, device=indices.device)
        canvas.scatter_reduce_(1, indices, values, "amax")
        inside = slice(self._pad, self._pad + self.parameters.size)
        return canvas.view(batch, side, side)[:, inside, inside].double() / (255 * _GAIN_UNIT)

    def _indices(self, pixels: Tensor) -> Tensor:
        """Canvas indices (...) of pixels (..., 2), int64."""
        y, x = (pixels.long() + self._pad).unbind(-1)
        return y * self._stride + x

    def _square(self, reach: int) -> np.ndarray:
        """Canvas offsets of a square patch's pixels from its centre, row by row, int64."""
        steps = np.arange(-reach, reach + 1)
        return (steps[:, None] * self._stride + steps).reshape(-1)


def _line_patches(parameters: Pathfinder) -> np.ndarray:
    """Strokes of all banks, padded to the side of the largest patch: (n, side^2) uint8."""
    lines = [bank.lines for bank in banks_of(parameters)]
    side = max(patches.shape[1] for patches in lines)
    pads = [(side - patches.shape[1]) // 2 for patches in lines]
    padded = [np.pad(p, ((0, 0), (n, n), (n, n))) for p, n in zip(lines, pads, strict=True)]
    return np.concatenate(padded).reshape(-1, side * side)


def _stretch(images: Tensor) -> Tensor:
    """Rescale each image, (B, H, W) float64, to 0..255 with halves rounded up; returns uint8.

    In float32, a gain of 0.9 is slightly smaller. Path-X's lines therefore end at 229 instead of
    229.5, which would round to 230.
    """
    low, high = images.amin((1, 2), keepdim=True), images.amax((1, 2), keepdim=True)
    return ((images - low) * (255 / (high - low)) + 0.5).to(torch.uint8)
