"""Names of prepared tasks, and the commands that prepare them."""

from pathlib import Path

import pytest

from data.lra.request import Request, command_for


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"task": "image"}, "image"),
        ({"task": "pathx"}, "pathx"),
        ({"task": "pathfinder32", "contour_length": 6}, "pathfinder32 --difficulty easy"),
        ({"task": "pathfinder64", "contour_length": 7}, "pathfinder64 --contour-length 7"),
        (
            {"task": "pathfinder64", "contour_length": 3, "distractors_of": 0},
            "pathfinder64 --contour-length 3 --distractors-of 0",
        ),
        (
            {"task": "pathfinder256", "contour_length": 9, "distractors_of": 14},
            "pathfinder256 --difficulty intermediate --distractors-of 14",
        ),
        (
            {"task": "listops", "shortest": 4, "longest": 32},
            "listops --shortest 4 --longest 32",
        ),
        ({"task": "retrieval"}, "retrieval --source FOLDER"),
        ({"task": "aclsum"}, "aclsum --source WHEEL"),
    ],
)
def test_the_command_that_makes_a_folder(options, arguments):
    folder = Path("out/data/lra") / Request(**options).name
    expected = f"python -m scripts.prepare_lra {arguments} --out out/data/lra"
    assert command_for(folder) == expected


@pytest.mark.parametrize("name", ["mine", "image2", "pathfinder64-Length7", "text-old_copy"])
def test_a_folder_of_another_name(name):
    assert command_for(Path("a b") / name) == "python -m scripts.prepare_lra TASK --out a b"
