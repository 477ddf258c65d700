"""The tasks of Long Range Arena, and the attentions and recipes that are compared on them."""

from typing import NamedTuple


class LraTask(NamedTuple):
    """A column of the table."""

    title: str
    config: str
    """Name of configs/lra/CONFIG.yaml and configs/lra/CONFIG_rotary.yaml."""
    folder: str
    """Of the prepared data, as `scripts.prepare_lra` names it."""


TASKS = {
    "listops": LraTask("ListOps", "listops", "listops"),
    "text": LraTask("Text", "text", "text"),
    "retrieval": LraTask("Retrieval", "retrieval", "retrieval"),
    "image": LraTask("Image", "image", "image"),
    "pathfinder": LraTask("Pathfinder", "pathfinder", "pathfinder32"),
    "pairs": LraTask("Pairs (in-house)", "retrieval", "pairs"),
}

BENCHMARK = tuple(name for name in TASKS if name != "pairs")
"""The tasks of the paper's table, in its order."""

ATTENTIONS = {
    "standard": "standard attention",
    "dense": "ours, dense",
    "butterfly": "ours, butterfly",
}
"""standard: PyTorch's operations one after the other, all scores in memory. dense: ours, exact.
butterfly: ours, block-sparse, the fixed pattern of the paper's downstream tasks."""

RECIPES = ("paper", "rotary", "pretrained")
"""paper: learned positions, as those of the paper's table. rotary: rotary ones. pretrained: these,
after as many steps in which the model learns the hidden tokens of these examples, as in "Never
Train From Scratch" (Amos, Berant and Gupta 2024, arXiv 2310.02980)."""
