"""Generated datasets that configurations read; missing ones are created.

Besides the hard images and long formulas of the benchmark, these have shorter contours and formulas
for the start of a curriculum.
"""

from collections.abc import Iterable
from pathlib import Path

from data.lra.request import Request
from data.lra.store import MANIFEST
from data.lra.tasks import prepare

SHORT_EXAMPLES = {"train": 40_000, "val": 500, "test": 500}
"""Images in a curriculum dataset, which is not used for scores."""
SHORT_FORMULAS = SHORT_EXAMPLES | {"train": 160_000}
"""Formulas in a curriculum dataset; they are faster to generate than images."""
CONTOURS = {  # by task and length of the distractors: lengths of the contours
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
"""All datasets that can be created here; a folder has the name of its request."""


def prepare_sets(paths: Iterable[str]) -> None:
    """Create the datasets that are missing among some folders, and print their names.

    Raises:
        ValueError: a folder does not exist, and none of REQUESTS has its name.
    """
    requests = {request.name: request for request in REQUESTS}
    folders = [Path(path) for path in dict.fromkeys(paths)]
    for folder in folders:
        if folder.name not in requests and not (folder / MANIFEST).exists():
            raise ValueError(
                f"{folder} is not prepared, and its name must be one of those that can be created: "
                f"{', '.join(sorted(requests))}"
            )
    for folder in folders:
        if request := requests.get(folder.name):
            done = prepare(request, folder.parent)
            if not done.finished_before:
                print(f"{done.folder}: created", flush=True)
