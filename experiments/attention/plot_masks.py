"""Draw attention masks: full blocks, partial blocks, and skipped blocks.

python -m experiments.attention.plot_masks [--out docs/masks.png]

Rows are queries, columns keys. The blocks of a block-sparse mask are coloured by the block lists of
the kernels, and those of the other masks by the definition of the mask.
"""

from pathlib import Path

from experiments.harness import Command

command = Command(__name__)
command.add("--out", type=Path, default=Path("docs/masks.png"), help="picture")
command.read()

from argparse import Namespace
from typing import Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from evaluation.style import save
from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly, random, sliding_window, strided
from kernels.reference.standard import visible_keys

BLOCK_SIZE, N_BLOCKS = 16, 16
SEQ_LEN = BLOCK_SIZE * N_BLOCKS

SKIPPED, HIDDEN, SEEN, FULL = range(4)  # kinds of elements in a picture
# Blue and orange of Okabe and Ito, distinguishable with any colour vision.
COLOURS = {
    "skipped block": "#f1f1f1",
    "partial block, hidden": "#fbe2b5",
    "partial block, visible": "#e69f00",
    "full block, no masking needed": "#0072b2",
}


def masks() -> dict[str, dict[str, Any]]:
    """Arguments of `visible_keys` by title, without lengths; edges cut blocks where possible."""

    def blocks(layout: Tensor) -> BlockSparseMask:
        return BlockSparseMask(layout, BLOCK_SIZE)

    lengths = torch.tensor([88, 117, 51])  # three documents, SEQ_LEN tokens in total
    doc_start = (lengths.cumsum(0) - lengths).repeat_interleave(lengths).unsqueeze(0)
    widened = butterfly(N_BLOCKS, global_blocks=1) | sliding_window(N_BLOCKS, 2)
    return {
        "causal": {"causal": True},
        "sliding window, causal": {"causal": True, "window_size": 72},
        "packed documents, causal": {"causal": True, "doc_start": doc_start},
        "key padding": {"kv_lengths": torch.tensor([200])},
        "butterfly": {"mask": blocks(butterfly(N_BLOCKS))},
        "butterfly, causal": {"mask": blocks(butterfly(N_BLOCKS)), "causal": True},
        "butterfly + global + window": {"mask": blocks(widened)},
        "strided": {"mask": blocks(strided(N_BLOCKS, 4))},
        "random": {"mask": blocks(random(N_BLOCKS, 5, seed=0))},
    }


def block_kinds(arguments: dict[str, Any]) -> Tensor:
    """(N_BLOCKS, N_BLOCKS) int: SKIPPED, SEEN (partial) or FULL."""
    kinds = torch.full((N_BLOCKS, N_BLOCKS), SKIPPED)
    mask = arguments.get("mask")
    if mask is None:
        visible = visible_keys(SEQ_LEN, SEQ_LEN, **arguments)[0, 0]
        tiles = visible.view(N_BLOCKS, BLOCK_SIZE, N_BLOCKS, BLOCK_SIZE)
        kinds[tiles.any(3).any(1)] = SEEN
        kinds[tiles.all(3).all(1)] = FULL
    else:
        lists = mask.lists(SEQ_LEN, SEQ_LEN, causal=arguments.get("causal", False))
        for row, begin, n_full, n_partial, *_ in lists.rows[0].tolist():
            listed = lists.row_blocks[begin : begin + n_full + n_partial].long()
            kinds[row, listed[:n_full]] = FULL
            kinds[row, listed[n_full:]] = SEEN
    return kinds


def picture(arguments: dict[str, Any]) -> Tensor:
    """(SEQ_LEN, SEQ_LEN) int: the kind of each element, an index of COLOURS."""
    kinds = block_kinds(arguments)
    kinds = kinds.repeat_interleave(BLOCK_SIZE, 0).repeat_interleave(BLOCK_SIZE, 1)
    visible = visible_keys(SEQ_LEN, SEQ_LEN, **arguments)[0, 0]
    kinds[(kinds == SEEN) & ~visible] = HIDDEN
    return kinds


def draw(out: Path) -> None:
    """Draw all masks as a grid of pictures in the file `out`."""
    figure = Figure(figsize=(9, 10.7), facecolor="white", layout="constrained")
    grid = figure.subplots(3, 3)
    for axes, (title, arguments) in zip(grid.flat, masks().items(), strict=True):
        kinds, extent = picture(arguments), (0, N_BLOCKS, N_BLOCKS, 0)
        style = {"vmin": SKIPPED, "vmax": FULL, "interpolation": "nearest", "extent": extent}
        axes.imshow(kinds, ListedColormap([*COLOURS.values()]), **style)
        axes.hlines(range(1, N_BLOCKS), 0, N_BLOCKS, color="white", lw=0.8)
        axes.vlines(range(1, N_BLOCKS), 0, N_BLOCKS, color="white", lw=0.8)
        visited = int((block_kinds(arguments) != SKIPPED).sum())
        axes.set_title(f"{title}\n{visited} of {N_BLOCKS**2} blocks", fontsize=11)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color("#bbbbbb")
    for axes in grid[:, 0]:
        axes.set_ylabel("queries")
    for axes in grid[-1]:
        axes.set_xlabel("keys")
    patches = [Patch(fc=colour, ec="#bbbbbb", label=label) for label, colour in COLOURS.items()]
    figure.legend(handles=patches[::-1], loc="outside lower center", ncols=4, frameon=False)
    save(figure, out)


@command.main
def main(args: Namespace) -> None:
    """Draw the picture."""
    draw(args.out)
    print(f"drew {args.out}")
