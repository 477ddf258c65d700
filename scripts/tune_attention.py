"""Tune the tile sizes of the Triton attention kernels on this GPU, and save the fastest.

python -m scripts.tune_attention [--head-dims 64 128] [--seq-len 4096]

Use it on GPUs for which kernels/triton/tiles.py has no measurements; without it, the tables there
are used. The results of each candidate are compared with those of the tables before it is timed.
The choice is saved in $PAPILIO_CACHE, or ~/.cache/papilio, and later processes use it. Delete the
file to undo it.
"""

import argparse
from collections.abc import Sequence

from training.command_line import command_parser, parse_before_imports, user_errors_as_messages


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("--head-dims", type=int, nargs="+", default=[64, 128], choices=[16, 32, 64, 128, 256])
    add("--seq-len", type=int, default=4096)
    return parser.parse_args(argv)


import functools
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from data.files import write_atomically
from kernels import flash_attention
from kernels.testing import relative_error
from kernels.triton.tiles import TABLES, Tiles
from kernels.triton.tuning import measured_tiles, measured_tiles_file, use_measured_tiles

TOKENS = 16_384
CHANNELS = 2048
TOLERANCE = 0.02  # relative error from different rounding to 16 bits


def candidates() -> Iterator[Tiles]:
    """Yield the tiles to try on any GPU; tiles that are too large for it fail to launch."""
    return itertools.starmap(Tiles, itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)))


def kernel_run(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Return the function to time for a kernel: the forward pass or the whole backward pass."""
    attend = functools.partial(flash_attention, q, k, v, causal=True, impl="triton")
    if kernel == "forward":
        return lambda: (attend(),)
    out = attend()
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def tune(kernel: str, head_dim: int, seq_len: int, gpu_name: str) -> tuple[Tiles | None, float]:
    """Find the fastest tiles of a kernel, and use them for the rest of this process.

    Returns:
        The tiles and their speedup over those of the tables; None and 1.0 if no tiles are faster.
    """

    def median_ms() -> Any:
        return do_bench(run, return_mode="median")

    shape = (max(1, TOKENS // seq_len), seq_len, CHANNELS // head_dim, head_dim)
    q, k, v = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in range(3)
    )
    run = kernel_run(kernel, q, k, v)
    use = functools.partial(use_measured_tiles, kernel, gpu_name, head_dim)
    use(None)
    expected = run()
    table_ms = best_ms = median_ms()
    best = None
    for tiles in candidates():
        use(tiles)
        try:
            results = run()
        except (OutOfResources, CompilationError):
            continue
        errors = [relative_error(x, y) for x, y in zip(results, expected, strict=True)]
        if not max(errors) <= TOLERANCE:
            raise SystemExit(f"{kernel} with {tiles} is wrong: relative errors {errors}")
        if (ms := median_ms()) < best_ms:
            best, best_ms = tiles, ms
    use(best)
    return best, table_ms / best_ms


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    if not torch.cuda.is_available():
        raise SystemExit("tune_attention needs a GPU, and PyTorch does not find one")
    gpu_name = torch.cuda.get_device_name()
    title = f"Attention tiles on {gpu_name}, {args.seq_len:,} tokens, causal, bf16"
    table = Table("kernel", "head_dim", "fastest", "x the tables", title=title)
    for head_dim in args.head_dims:
        for kernel in TABLES:
            best, speedup = tune(kernel, head_dim, args.seq_len, gpu_name)
            fastest = "the tables'" if best is None else str(best)
            table.add_row(kernel, str(head_dim), fastest, f"{speedup:.2f}")
            print(f"{kernel}, head_dim {head_dim}: {fastest}", flush=True)
    Console(width=100).print(table)
    file = measured_tiles_file(gpu_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    chosen = json.dumps(measured_tiles(gpu_name), indent=1, default=asdict)
    write_atomically(file, f"{chosen}\n".encode())
    print(f"wrote {file}")


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
