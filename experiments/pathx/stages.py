"""The stages of training for Path-X and Path-256."""

from typing import NamedTuple

DENSE, SPARSE = "FlashAttention", "block-sparse FlashAttention"


class Stage(NamedTuple):
    """Training on images of one size, with one attention."""

    title: str
    """In tables; packed: black pixels are padding, and left out."""
    before: str | None = None
    """The stage that it begins with the best weights of."""
    beside: tuple[str, str] | None = None
    """The paper's model and images that it is compared with."""


STAGES = {
    "path64": Stage("Path-64, packed"),
    "pathx": Stage("Path-X, packed", "path64", (DENSE, "pathx")),
    "pathx_dense": Stage("Path-X, dense", "pathx", (DENSE, "pathx")),
    "path64_butterfly": Stage("Path-64, butterfly"),
    "pathx_butterfly": Stage("Path-X, butterfly", "path64_butterfly", (SPARSE, "pathx")),
    "path256_butterfly": Stage("Path-256, butterfly", "pathx_butterfly", (SPARSE, "path256")),
}
"""In their order; the paper (arXiv 2205.14135, appendix E.3) begins with Path-64, too."""
