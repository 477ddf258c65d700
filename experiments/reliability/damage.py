"""Flipped bits and truncated files, in a checkpoint and in the data."""

import random
from collections.abc import Callable
from pathlib import Path

import train
from evaluation.results import Row
from experiments.reliability.world import (
    FINE,
    TWO_MORE,
    Outcome,
    Tally,
    World,
    outcome,
    records,
)

Damage = Callable[[Path, random.Random], int]
"""Damage a file and return the position."""


def _flip(path: Path, generator: random.Random) -> int:
    content = bytearray(path.read_bytes())
    at = generator.randrange(8 * len(content))
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)
    return at


def _cut(path: Path, generator: random.Random) -> int:
    at = generator.randrange(path.stat().st_size)
    path.write_bytes(path.read_bytes()[:at])
    return at


def _damaged(world: World, fault: str, n: int, damage: Damage) -> Row:
    """Resume from damaged files: a failure is silent if it changes a loss without an error."""
    generator, tally = random.Random(fault), Tally(fault)

    def copies() -> tuple[Path, Path]:
        return world.copy("gpt", "tried"), world.copy("text", "tried_text")

    def resume(run: Path, data: Path) -> Outcome:
        paths = f"data.path={data}", f"run.out_dir={run}"
        return outcome(train.main, world.config, *TWO_MORE, *paths)

    run, data = copies()
    assert resume(run, data).ended == FINE
    expected = records(run)
    for _ in range(n):
        run, data = copies()
        newest = max((run / "checkpoints").iterdir())
        files = [*sorted(newest.iterdir()), *sorted(data.glob("[!.]*"))]
        path = generator.choice([path for path in files if path.stat().st_size])
        place = f"{path.name} at {damage(path, generator)}"
        ended, error, _ = resume(run, data)
        tally.compare(ended, place, error, run, expected, path.name)
    return tally.row(changes_nothing=tally.tries - tally.refused)


def flips(world: World, n: int) -> Row:
    """Flip a random bit of a file, n times."""
    return _damaged(world, "flipped bits", n, _flip)


def cuts(world: World, n: int) -> Row:
    """Truncate a file at a random byte, n times."""
    return _damaged(world, "cut files", n, _cut)
