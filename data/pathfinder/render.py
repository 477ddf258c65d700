"""Pathfinder images drawn from display lists, with PyTorch.

Drawing is integer arithmetic, and grey levels are rounded where IEEE 754 leaves no choice, so that
an image is the same on every device and in every batch.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from data.pathfinder.parameters import Pathfinder, check_display_lists
from data.pathfinder.templates import banks_of, marker_patch

_GAIN_UNIT = 10  # gains are whole tenths


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
        """Some of them, by a slice or a tensor of numbers on the same device."""
        return PackedDisplayLists(*(getattr(self, field.name)[index] for field in fields(self)))


def pack(display_lists: np.ndarray, device: torch.device | str = "cpu") -> PackedDisplayLists:
    """Put display lists, (B,) as `generate` returns them, on a device; refuses other arrays."""
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
    """Draws images of one kind on one device."""

    def __init__(self, parameters: Pathfinder, device: torch.device | str = "cpu") -> None:
        """Put the templates on a device: at most 1 MB."""
        self.parameters = parameters
        patches, marker = _line_patches(parameters), marker_patch(parameters)
        gains = np.full(parameters.max_strokes, parameters.scale.distractor_gain)
        gains[: 2 * parameters.contour_length] = parameters.scale.target_gain
        self._patches = torch.from_numpy(patches).to(device)  # (n, side^2) uint8
        self._gains = torch.from_numpy(np.rint(gains * _GAIN_UNIT).astype(np.int32)).to(device)
        marker = marker.reshape(-1).astype(np.int32) * _GAIN_UNIT
        self._marker = torch.from_numpy(marker).to(device)  # (marker_side^2,)
        reaches = [int(array.shape[-1] ** 0.5) // 2 for array in (patches, marker)]
        # patches may reach over the edge: they are drawn on a larger canvas, which is then cropped
        self._pad = max(reaches)
        self._stride = parameters.size + 2 * self._pad
        self._offsets, self._marker_offsets = (
            torch.from_numpy(self._square(reach)).to(device) for reach in reaches
        )
        self._slots = torch.arange(parameters.max_strokes, device=device)

    def __call__(self, display_lists: np.ndarray | PackedDisplayLists) -> Tensor:
        """Draw B images, (B, size, size) uint8 on the renderer's device, each from 0 to 255.

        With packed lists on the renderer's device there is no synchronisation with the host and no
        shape depends on the data: the call may be captured in a CUDA graph.

        Raises:
            ValueError: the lists are of images with other parameters.
        """
        if isinstance(display_lists, np.ndarray):
            check_display_lists(display_lists, self.parameters)
            display_lists = pack(display_lists, self._patches.device)
        if display_lists.templates.shape[1] != len(self._slots):
            raise ValueError(
                f"display_lists has {display_lists.templates.shape[1]} strokes an image, but "
                f"{self.parameters} has {len(self._slots)}; pass the parameters that they were "
                "generated with."
            )
        batch = len(display_lists)
        drawn = self._slots < display_lists.n_strokes[:, None]
        gains = torch.where(drawn, self._gains, 0)
        values = self._patches[display_lists.templates.int()] * gains[..., None]
        places = self._places(display_lists.positions)[..., None] + self._offsets
        marker_places = self._places(display_lists.markers)[..., None] + self._marker_offsets
        lines = self._drawn(places.flatten(1), values.flatten(1))
        markers = self._drawn(
            marker_places.flatten(1), self._marker.expand(batch, 2, -1).flatten(1)
        )
        # as in the reference, whose lines are float32 and whose markers float64
        return _stretch(torch.maximum(lines.float().double(), markers))

    def _drawn(self, places: Tensor, values: Tensor) -> Tensor:
        """The largest of the values (B, n) at each pixel, (B, size, size) float64, 1 at full gain.

        Places are int64 canvas indices (B, n).
        """
        batch, side = len(places), self._stride
        canvas = torch.zeros(batch, side**2, dtype=torch.int32, device=places.device)
        canvas.scatter_reduce_(1, places, values, "amax")
        inside = slice(self._pad, self._pad + self.parameters.size)
        return canvas.view(batch, side, side)[:, inside, inside].double() / (255 * _GAIN_UNIT)

    def _places(self, pixels: Tensor) -> Tensor:
        """int64 canvas indices (...) of pixels (..., 2)."""
        y, x = (pixels.long() + self._pad).unbind(-1)
        return y * self._stride + x

    def _square(self, reach: int) -> np.ndarray:
        """int64 canvas offsets of a square patch's pixels from its middle, row by row."""
        steps = np.arange(-reach, reach + 1)
        return (steps[:, None] * self._stride + steps).reshape(-1)


def _line_patches(parameters: Pathfinder) -> np.ndarray:
    """(n, side^2) uint8, the strokes of all banks, padded to the side of the largest."""
    lines = [bank.lines for bank in banks_of(parameters)]
    side = max(patches.shape[1] for patches in lines)
    pads = [(side - patches.shape[1]) // 2 for patches in lines]
    padded = [np.pad(p, ((0, 0), (n, n), (n, n))) for p, n in zip(lines, pads, strict=True)]
    return np.concatenate(padded).reshape(-1, side * side)


def _stretch(images: Tensor) -> Tensor:
    """Rescale each image's (B, H, W) float64 to 0..255, halves rounded up; returns uint8.

    A gain of 0.9 is a little less in float32: Path-X's lines end at 229, not at 229.5 and so 230.
    """
    low, high = images.amin((1, 2), keepdim=True), images.amax((1, 2), keepdim=True)
    return ((images - low) * (255 / (high - low)) + 0.5).to(torch.uint8)
