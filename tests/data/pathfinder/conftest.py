"""The generator of images is compiled once, however many processes run the tests."""

import fcntl

import pytest

from data.pathfinder import contours
from data.pathfinder.generator import generate
from data.pathfinder.parameters import Pathfinder


@pytest.fixture(scope="session", autouse=True)
def _compiled():
    """The first process compiles for some ten seconds; the others wait, and load its cache."""
    with open(contours.__file__) as module:
        fcntl.flock(module, fcntl.LOCK_EX)
        generate(Pathfinder(32), 0, range(1), n_threads=1)
