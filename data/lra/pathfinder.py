"""The Pathfinder tasks: generated as display lists, or read from the released images."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.files import write_atomically
from data.lra.request import (
    PATHFINDER_SIZES,
    OnProgress,
    Request,
    Write,
    counted,
    exactly,
    example_numbers,
    origin_of,
)
from data.lra.store import Manifest
from data.lra.writer import TaskWriter
from data.pathfinder.parameters import Pathfinder, display_list_dtype
from data.pathfinder.release import find_release, read_images, read_metadata, split_images

SPLIT_SIZES = {"train": 160_000, "val": 20_000, "test": 20_000}
"""Of 200,000 images: 80, 10 and 10 %."""
CHUNK = 1000
"""Generated images between two saves."""


def pathfinder(request: Request) -> tuple[Manifest, Write]:
    """What the manifest of a Pathfinder task says, and how its splits are written."""
    size = PATHFINDER_SIZES[request.task]
    parameters = Pathfinder(size, request.contour_length, request.distractors_of)
    sizes = request.examples or SPLIT_SIZES
    if request.source is None:
        kind, write = "display_lists", _write_generated
        origin = {
            "generator": "data.pathfinder",
            "parameters": asdict(parameters),
            "examples": dict(sizes),
            "seed": request.seed,
        }
    else:
        kind, write = "images", _write_released
        origin = {**origin_of(request, "lra_release"), "parameters": asdict(parameters)}
    manifest = Manifest(
        task=request.name,
        kind=kind,
        vocab_size=256,
        n_classes=2,
        max_length=size**2,
        source=origin,
    )
    return manifest, lambda writer, on_progress: write(request, parameters, writer, on_progress)


def _write_generated(
    request: Request, parameters: Pathfinder, writer: TaskWriter, on_progress: OnProgress
) -> None:
    sizes = request.examples or SPLIT_SIZES
    for split, ranges in example_numbers(SPLIT_SIZES, sizes).items():
        blocks = _generated(request, parameters, ranges, writer.chunks)
        writer.write_display_lists(split, counted(blocks, split, sizes[split], on_progress, len))


def _generated(
    request: Request, parameters: Pathfinder, ranges: Iterable[range], chunks: Path
) -> Iterator[np.ndarray]:
    """Yield display lists chunk by chunk; chunks that an earlier run finished are read."""
    # numba takes a second to import, and only generating needs it
    from data.pathfinder.generator import generate

    for numbers in ranges:
        for first in range(numbers.start, numbers.stop, CHUNK):
            n = min(CHUNK, numbers.stop - first)
            path = chunks / f"{first:09d}.npy"
            if path.exists():
                block = np.load(path, allow_pickle=False)
                if block.dtype != display_list_dtype(parameters) or len(block) != n:
                    raise ValueError(
                        f"{path} has {len(block)} of {block.dtype}, but must have {n} of "
                        f"{display_list_dtype(parameters)}; delete {chunks}."
                    )
            else:
                block = generate(
                    parameters, request.seed, range(first, first + n), n_threads=request.n_threads
                )
                buffer = io.BytesIO()
                np.save(buffer, block)
                write_atomically(path, buffer.getvalue())
            yield block


def _write_released(
    request: Request, parameters: Pathfinder, writer: TaskWriter, on_progress: OnProgress
) -> None:
    assert request.source is not None
    folder = find_release(request.source, parameters.size, parameters.contour_length)
    for split, images in split_images(read_metadata(folder)).items():
        if request.examples:
            images = list(exactly(iter(images), request.examples[split], split))
        skipped: list[str] = []
        blocks = read_images(images, parameters.size, skipped, request.n_threads)
        counted_blocks = counted(
            blocks, split, len(images), on_progress, lambda block: len(block[1])
        )
        writer.write_images(split, counted_blocks, skipped)
