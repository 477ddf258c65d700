"""The sets of examples that configurations read and that are generated, made where missing.

Beside the benchmark's hard images and long formulas these are shorter contours and formulas, which
a curriculum begins with.
"""

from collections.abc import Iterable
from pathlib import Path

from data.lra.request import Request
from data.lra.store import MANIFEST
from data.lra.tasks import prepare

SHORT_EXAMPLES = {"train": 40_000, "val": 500, "test": 500}
"""Of the images of a curriculum, on which nothing is scored."""
SHORT_FORMULAS = {"train": 160_000, "val": 500, "test": 500}
"""Of its formulas, likewise; they are made faster."""

REQUESTS = (
    *(
        Request(task="listops", shortest=shortest, longest=longest, examples=SHORT_FORMULAS)
        for shortest, longest in ((4, 16), (4, 32), (17, 64), (33, 128), (65, 256))
    ),
    *(
        Request(task=task)
        for task in ("listops", "pathfinder32", "pathfinder64", "pathx", "pathfinder256")
    ),
    *(
        Request(
            task=task, contour_length=length, distractors_of=distractors, examples=SHORT_EXAMPLES
        )
        for task, length, distractors in (
            *(("pathfinder32", length, 0) for length in (2, 4, 7)),
            *(("pathfinder32", length, 14) for length in (4, 7, 10)),
            *(("pathfinder64", length, 0) for length in (2, 4, 7)),
            *(("pathfinder64", length, 14) for length in (3, 5, 7, 10)),
            *(("pathx", length, 0) for length in (2, 4)),
            *(("pathx", length, 14) for length in (4, 7)),
            *(("pathfinder256", length, 0) for length in (2, 4)),
            *(("pathfinder256", length, 14) for length in (4, 7)),
        )
    ),
)
"""All that can be made here; a folder is named by its request."""


def requests_for(paths: Iterable[str]) -> dict[Path, Request]:
    """What to prepare in each of some folders, but for others' that are there.

    Raises:
        ValueError: a folder is not there, and none of REQUESTS makes one of its name.
    """
    requests = {request.name: request for request in REQUESTS}
    wanted = {}
    for folder in map(Path, paths):
        if folder.name in requests:
            wanted[folder] = requests[folder.name]
        elif not (folder / MANIFEST).exists():
            raise ValueError(
                f"{folder} is not prepared, and none of the sets that can be made here: "
                f"{', '.join(sorted(requests))}"
            )
    return wanted


def prepare_sets(paths: Iterable[str]) -> None:
    """Make the examples of some folders that are not there yet; says which it made."""
    for folder, request in requests_for(paths).items():
        done = prepare(request, folder.parent)
        if not done.finished_before:
            print(f"{done.folder}: made", flush=True)
