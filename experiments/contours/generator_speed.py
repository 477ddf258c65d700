"""How fast Pathfinder images are made and drawn.

    python -m experiments.contours.generator_speed [--out docs/results/pathfinder_speed.json]

Generating is timed on one thread and on all cores of this machine, in images of their own numbers
each time; drawing in batches, on a GPU where there is one. Compiling comes before.
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
from experiments.reports import table
from experiments.timing import wall_seconds

IMAGES = {32: 4000, 64: 200, 128: 300, 256: 2000}
"""Of one thread's timing; as many more as there are cores for all of them."""


def measure(size: int, difficulty: str, device: torch.device) -> dict[str, Any]:
    """Times of making images of a kind, in milliseconds, and how many are drawn on `device`."""
    parameters, n = Pathfinder(size, DIFFICULTIES[difficulty]), IMAGES[size]
    cores = len(os.sched_getaffinity(0))
    generate(parameters, 0, range(2))
    started, clock = time.perf_counter(), time.process_time()
    lists = generate(parameters, 0, range(n), n_threads=1)
    one_cpu = time.process_time() - clock
    one = time.perf_counter() - started
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
        "ms_one_core": 1e3 * one / n,
        "cpu_ms_one_core": 1e3 * one_cpu / n,
        "cores": cores,
        "images_per_s_all_cores": n * cores / all_cores,
        "bytes": lists.dtype.itemsize,
        "images_drawn_per_s": len(packed) / drawing,
    }


def times_table(result: Mapping[str, Any]) -> str:
    """Milliseconds in which one core makes an image, a column a difficulty."""
    lines: dict[int, dict[str, str]] = {}
    for row in result["rows"]:
        n = row["size"]
        line = lines.setdefault(n, {"pixels": f"{n} x {n}"})
        line[row["difficulty"]] = f"{row['ms_one_core']:.2f} ms"
    return table(lines.values())


def speeds_table(result: Mapping[str, Any]) -> str:
    """All speeds, a line a kind of images."""
    return table(
        {
            "size": f"{row['size']}",
            "difficulty": row["difficulty"],
            "ms an image, one core": f"{row['ms_one_core']:.3f}",
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
