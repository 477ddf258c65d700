"""Speed of generating and drawing Pathfinder images.

    python -m experiments.contours.generator_speed [--out docs/results/pathfinder_speed.json]

Generation is timed on one thread and on all cores of this machine, on different images each time.
Drawing is timed in batches, on a GPU if there is one. Compilation is not timed.
"""

from experiments.harness import Command, write_and_print

command = Command(__name__)
command.read(out="docs/results/pathfinder_speed.json")

import os
import time
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from data.pathfinder.generator import generate
from data.pathfinder.parameters import DIFFICULTIES, Pathfinder
from data.pathfinder.render import Renderer, pack
from evaluation.markdown import dict_table
from experiments.timing import wall_seconds

IMAGES = {32: 4000, 64: 200, 128: 300, 256: 2000}
"""Images timed on one thread, by size. The timing on all cores takes this many per core."""


def measure(size: int, difficulty: str, device: torch.device) -> dict[str, Any]:
    """Time of generating an image, in milliseconds, and images drawn per second on `device`."""
    parameters, n = Pathfinder(size, DIFFICULTIES[difficulty]), IMAGES[size]
    cores = len(os.sched_getaffinity(0))
    generate(parameters, 0, range(2))
    wall, cpu = time.perf_counter(), time.process_time()
    lists = generate(parameters, 0, range(n), n_threads=1)
    one_core_cpu = time.process_time() - cpu
    one_core = time.perf_counter() - wall
    all_cores = wall_seconds(partial(generate, parameters, 0, range(n, n + n * cores)))
    renderer, packed = Renderer(parameters, device), pack(lists[:256], device)
    renderer(packed)
    repeats = 50 if device.type == "cuda" else 2
    drawing = wall_seconds(partial(renderer, packed), repeats)
    return {
        "size": size,
        "difficulty": difficulty,
        "images": n,
        "restarts": float(lists["restarts"].mean()),
        "ms_one_core": 1e3 * one_core / n,
        "cpu_ms_one_core": 1e3 * one_core_cpu / n,
        "cores": cores,
        "images_per_s_all_cores": n * cores / all_cores,
        "bytes": lists.dtype.itemsize,
        "images_drawn_per_s": len(packed) / drawing,
    }


def times_table(result: Mapping[str, Any]) -> str:
    """Milliseconds per image on one core, a column per difficulty."""
    lines: dict[int, dict[str, str]] = {}
    for row in result["rows"]:
        n = row["size"]
        line = lines.setdefault(n, {"image size": f"{n} x {n}"})
        line[row["difficulty"]] = f"{row['ms_one_core']:.2f} ms"
    return dict_table(lines.values())


def speeds_table(result: Mapping[str, Any]) -> str:
    """All speeds, a row per size and difficulty."""
    return dict_table(
        {
            "size": f"{row['size']}",
            "difficulty": row["difficulty"],
            "ms per image, one core": f"{row['ms_one_core']:.3f}",
            "images/s, all cores": f"{row['images_per_s_all_cores']:,.0f}",
            f"drawn/s, {result['drawn_on']}": f"{row['images_drawn_per_s']:,.0f}",
        }
        for row in result["rows"]
    )


@command.main
def main(args: Namespace) -> None:
    """Time all sizes and difficulties."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [measure(size, name, device) for size in IMAGES for name in DIFFICULTIES]
    write_and_print(args.out, {"rows": rows, "drawn_on": device.type}, speeds_table)
