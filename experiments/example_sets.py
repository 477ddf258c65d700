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
SHORT_FORMULAS = SHORT_EXAMPLES | {"train": 160_000}
"""Of its formulas, which are made faster."""
CONTOURS = {  # of each task, by length of the distractors: lengths of the contours
    "pathfinder32": {0: (2, 4, 7), 14: (4, 7, 10)},
    "pathfinder64": {0: (2, 4, 7), 14: (3, 5, 7, 10)},
    "pathx": {0: (2, 4), 14: (4, 7)},
    "pathfinder256": {0: (2, 4), 14: (4, 7)},
}

REQUESTS = (
    *(
        Request(task="listops", shortest=shortest, longest=longest, examples=SHORT_FORMULAS)
        for shortest, longest in ((4, 16), (4, 32), (17, 64), (33, 128), (65, 256))
    ),
    *(Request(task=task) for task in ("listops", *CONTOURS)),
    *(
        Request(task=task, contour_length=n, distractors_of=distractors, examples=SHORT_EXAMPLES)
        for task, of_task in CONTOURS.items()
        for distractors, lengths in of_task.items()
        for n in lengths
    ),
)
"""All that can be made here; a folder is named by its request."""


def prepare_sets(paths: Iterable[str]) -> None:
    """Make the sets of examples in some folders where they are missing; prints which it made.

    Raises:
        ValueError: a folder is not there, and none of REQUESTS makes one of its name.
    """
    requests = {request.name: request for request in REQUESTS}
    folders = [Path(path) for path in dict.fromkeys(paths)]
    for folder in folders:
        if folder.name not in requests and not (folder / MANIFEST).exists():
            raise ValueError(
                f"{folder} is not prepared, and none of the sets that can be made here: "
                f"{', '.join(sorted(requests))}"
            )
    for folder in folders:
        if request := requests.get(folder.name):
            done = prepare(request, folder.parent)
            if not done.finished_before:
                print(f"{done.folder}: made", flush=True)
