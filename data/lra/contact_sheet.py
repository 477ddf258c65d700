"""Contact sheet of a prepared task: sample images by label, or the beginnings of texts."""

import textwrap
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from data.lra import image, listops
from data.lra.store import DisplayLists, Images, Sequences, open_split
from data.pathfinder.parameters import Pathfinder

COLUMNS = 8  # images of each label
TEXTS = 6  # examples of sequences

_TEXT_COLUMNS, _TEXT_ROWS = 110, 7
_INCHES = 1.4
_MARKER_COLOURS = ("#0072b2", "#e69f00")  # Okabe and Ito's blue (origin) and orange (terminal)
_CLASSES = {"image": image.CLASSES, "text": ("bad", "good"), "pairs": ("two", "one")}


def draw(folder: Path) -> Path:
    """Draw the first training examples of a prepared task to samples.png in its folder."""
    split = open_split(folder, "train")
    figure = _texts(split) if isinstance(split, Sequences) else _images(split)
    figure.suptitle(f"{split.manifest.task}, train: {len(split):,} examples")
    out = folder / "samples.png"
    figure.savefig(out, dpi=110, bbox_inches="tight")
    return out


def _images(split: Images | DisplayLists) -> Figure:
    labels = np.asarray(split.labels)
    rows = [np.flatnonzero(labels == c)[:COLUMNS] for c in range(split.manifest.n_classes)]
    numbers = np.concatenate(rows)
    if isinstance(split, Images):
        images = split.images[numbers]
    else:
        from data.pathfinder.render import Renderer

        renderer = Renderer(Pathfinder(**split.manifest.source["parameters"]))
        images = renderer(split.display_lists[numbers]).numpy()
    pixels = dict(zip(numbers.tolist(), images, strict=True))
    size = COLUMNS * _INCHES, len(rows) * _INCHES + 0.4
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(len(rows), COLUMNS, squeeze=False)
    for label, (row, row_axes) in enumerate(zip(rows, axes, strict=True)):
        for axis in row_axes:
            axis.set(xticks=[], yticks=[])
        row_axes[0].set_ylabel(_class_name(split.manifest.task, label))
        for number, axis in zip(row.tolist(), row_axes, strict=False):
            axis.imshow(pixels[number], cmap="gray", vmin=0, vmax=255)
            if isinstance(split, DisplayLists):
                markers = split.display_lists["markers"][number]
                for (y, x), colour in zip(markers, _MARKER_COLOURS, strict=True):
                    axis.plot(x, y, "o", markersize=11, markerfacecolor="none", color=colour)
    return figure


def _texts(split: Sequences) -> Figure:
    documents = split.manifest.documents_per_example
    lines = []
    for example in range(min(TEXTS, len(split))):
        label = _class_name(split.manifest.task, int(split.labels[example]))
        for tokens in split.documents(example):
            text = _to_text(split.manifest.task, tokens[: _TEXT_COLUMNS * _TEXT_ROWS])
            lines.append(f"label {label}, {len(tokens):,} tokens")
            lines += textwrap.wrap(text, _TEXT_COLUMNS)[: _TEXT_ROWS // documents]
            lines.append("")
    figure = Figure((10, 0.16 * len(lines)))
    style = {"family": "monospace", "fontsize": 8, "verticalalignment": "top"}
    figure.text(0, 0.95, "\n".join(lines), style, parse_math=False)
    return figure


def _to_text(task: str, tokens: np.ndarray) -> str:
    if task.startswith("listops"):
        return " ".join(listops.SYMBOLS[token - 1] for token in tokens.tolist())
    text = (tokens - 1).astype(np.uint8).tobytes().decode("ascii", errors="replace")
    return text.replace("\ufffd", "?")


def _class_name(task: str, label: int) -> str:
    names = _CLASSES.get(task)
    return str(label) if names is None else f"{label} ({names[label]})"
