"""Draw where the attention of a trained classifier goes on a Pathfinder image.

    python -m experiments.contours.plot_attention out/pathx/pathx --image 3 --out docs/attention.png

For each of the two markers (a row): the attention that the pixels under it pay in each layer, mean
over its pixels and the heads, and on the right attention rollout from it through all layers. The
ring is around the marker that pays. Colours say how many times as much as if it went to all pixels
alike.
"""

from pathlib import Path

from experiments.harness import Command

command = Command(__name__)
command.add("run", type=Path, metavar="RUN", help="folder of train.py")
command.add("--image", type=int, default=0, metavar="N", help="of the test split")
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

# From light to dark through one hue, so that it does not matter which colours one sees; the rings
# are Okabe and Ito's orange-red and green-blue, which no pixel has.
SHADES = ("#e4e4e4", "#9ccbe8", "#2f86c1", "#0b3c6f", "#06101f")
RINGS = ("#d55e00", "#009e73")
LEAST, MOST = 0.1, 100.0  # times uniform attention, the ends of the colours


def paint(amounts: Tensor, places: Tensor, size: int) -> np.ndarray:
    """(S, S) float64: (T,) attention, times what each token had if all had as much; else NaN."""
    picture = np.full(size * size, np.nan)
    picture[places.numpy()] = amounts.double().numpy() * len(amounts)
    return picture.reshape(size, size)


def draw(found: Trace, number: int) -> Figure:
    """The image of this number, then a column a layer and one for the rollout; a row a marker."""
    shades = LinearSegmentedColormap.from_list("attention", SHADES).with_extremes(bad="white")
    norm = LogNorm(LEAST, MOST, clip=True)
    n_layer, size = len(found.layers), len(found.image)
    paid, rollout = found.paid(), found.rollout()
    figure = Figure(figsize=(1.2 + 2.3 * (n_layer + 2), 5.2), layout="constrained")
    panels = figure.subplots(2, n_layer + 2, squeeze=False)
    for marker, row in enumerate(panels):
        row[0].imshow(255 - found.image.numpy(), cmap="gray", vmin=0, vmax=255)
        for axes, amounts in zip(row[1:], [*paid[:, marker], rollout[marker]], strict=True):
            painted = paint(amounts, found.places, size)
            axes.imshow(painted, cmap=shades, norm=norm, interpolation="nearest")
        for axes in row:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_color("#bbbbbb")
            y, x = found.markers[marker].tolist()
            ring = Circle((x, y), 2 * found.marker_radius, fill=False, color=RINGS[marker], lw=1.8)
            axes.add_patch(ring)
        row[0].set_ylabel(f"from marker {marker + 1}")
    names = ["image", *(f"layer {number}" for number in range(1, n_layer + 1)), "rollout"]
    for axes, name in zip(panels[0], names, strict=True):
        axes.set_title(name, fontsize=11)
    words = ("on different contours", "on the same contour")
    shares = found.logits.softmax(-1).tolist()
    said = int(shares[1] > shares[0])
    says = f"the model says {words[said]}, {shares[said]:.1%}"
    title = f"test image {number}: markers {words[found.label]}; {says}"
    figure.suptitle(title, fontsize=12)
    bar = figure.colorbar(ScalarMappable(norm, shades), ax=panels, shrink=0.8, extend="both")
    bar.set_label("attention, times that of all pixels alike")
    return figure


@command.main
def main(args: Namespace) -> None:
    """Draw the picture."""
    found = trace(args.run, args.image, args.task)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(draw(found, args.image), args.out)
    print(f"drew {args.out}")
