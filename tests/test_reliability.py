"""Promises of docs/reliability.md, with a few tries each."""

import pytest

from experiments.reliability.__main__ import parts
from experiments.reliability.world import World

FEW = parts(share=0.05)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("reliability") / "world")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("part", FEW)
def test_every_try_keeps_the_promise(world, part):
    row = FEW[part](world)
    assert row["tries"] > 0
    assert row["failures"] == []
