"""Training stages of Path-X and Path-256."""

from typing import NamedTuple

DENSE, SPARSE = "FlashAttention", "block-sparse FlashAttention"


class Stage(NamedTuple):
    """Training on images of one size with one attention."""

    title: str
    """Title in tables. packed: black pixels are padding, and removed."""
    before: str | None = None
    """Stage whose best weights initialize this one."""
    reference: tuple[str, str] | None = None
    """Model and column of the paper that this stage is compared with."""


STAGES = {
    "path64": Stage("Path-64, packed"),
    "pathx": Stage("Path-X, packed", "path64", (DENSE, "pathx")),
    "pathx_dense": Stage("Path-X, dense", "pathx", (DENSE, "pathx")),
    "path64_butterfly": Stage("Path-64, butterfly"),
    "pathx_butterfly": Stage("Path-X, butterfly", "path64_butterfly", (SPARSE, "pathx")),
    "path256_butterfly": Stage("Path-256, butterfly", "pathx_butterfly", (SPARSE, "path256")),
}
"""Stages in training order. The paper (arXiv 2205.14135, appendix E.3) also starts with Path-64."""
