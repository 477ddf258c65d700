"""Draw the attention of a trained classifier on a Pathfinder image.

    python -m experiments.contours.plot_attention out/pathx/pathx --image 3 --out docs/attention.png

Each row belongs to one of the two markers, which a ring surrounds. It has the attention from the
pixels under the marker in each layer, mean over pixels and heads, and on the right the attention
rollout through all layers. Colours are multiples of uniform attention.
"""

from pathlib import Path

from experiments.harness import Command

command = Command(__name__)
command.add("run", type=Path, metavar="RUN", help="folder of a run")
command.add("--image", type=int, default=0, metavar="N", help="image number in the test split")
command.add("--out", type=Path, required=True, metavar="FILE", help="picture, PNG")
command.add(
    "--task", type=Path, metavar="FOLDER", help="prepared task (default: the run's data.path)"
)
command.read()

from argparse import Namespace

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

from evaluation.style import save
from experiments.contours.rollout import Trace, trace

# One hue from light to dark, readable with any colour vision. The rings are orange-red and
# green-blue of Okabe and Ito, colours that no pixel has.
SHADES = ("#e4e4e4", "#9ccbe8", "#2f86c1", "#0b3c6f", "#06101f")
RINGS = ("#d55e00", "#009e73")
LOWEST, HIGHEST = 0.1, 100.0  # limits of the colour scale, multiples of uniform attention


def paint(amounts: Tensor, positions: Tensor, size: int) -> np.ndarray:
    """Picture of (T,) attention as multiples of uniform attention: (S, S) float64, else NaN."""
    picture = np.full(size * size, np.nan)
    picture[positions.numpy()] = amounts.double().numpy() * len(amounts)
    return picture.reshape(size, size)


def draw(traced: Trace, number: int) -> Figure:
    """Draw a row per marker: the image, a column per layer, and the rollout."""
    shades = LinearSegmentedColormap.from_list("attention", SHADES).with_extremes(bad="white")
    norm = LogNorm(LOWEST, HIGHEST, clip=True)
    n_layer, size = len(traced.layers), len(traced.image)
    paid, rollout = traced.paid(), traced.rollout()
    figure = Figure(figsize=(1.2 + 2.3 * (n_layer + 2), 5.2), layout="constrained")
    panels = figure.subplots(2, n_layer + 2, squeeze=False)
    for marker, row in enumerate(panels):
        row[0].imshow(255 - traced.image.numpy(), cmap="gray", vmin=0, vmax=255)
        for axes, amounts in zip(row[1:], [*paid[:, marker], rollout[marker]], strict=True):
            painted = paint(amounts, traced.positions, size)
            axes.imshow(painted, cmap=shades, norm=norm, interpolation="nearest")
        for axes in row:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_color("#bbbbbb")
            y, x = traced.markers[marker].tolist()
            ring = Circle((x, y), 2 * traced.marker_radius, fill=False, color=RINGS[marker], lw=1.8)
            axes.add_patch(ring)
        row[0].set_ylabel(f"from marker {marker + 1}")
    names = ["image", *(f"layer {number}" for number in range(1, n_layer + 1)), "rollout"]
    for axes, name in zip(panels[0], names, strict=True):
        axes.set_title(name, fontsize=11)
    words = ("on different contours", "on the same contour")
    shares = traced.logits.softmax(-1).tolist()
    answer = int(shares[1] > shares[0])
    prediction = f"the model predicts {words[answer]}, {shares[answer]:.1%}"
    title = f"test image {number}: markers {words[traced.label]}; {prediction}"
    figure.suptitle(title, fontsize=12)
    bar = figure.colorbar(ScalarMappable(norm, shades), ax=panels, shrink=0.8, extend="both")
    bar.set_label("attention, multiples of uniform attention")
    return figure


@command.main
def main(args: Namespace) -> None:
    """Draw the picture."""
    traced = trace(args.run, args.image, args.task)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(draw(traced, args.image), args.out)
    print(f"drew {args.out}")
