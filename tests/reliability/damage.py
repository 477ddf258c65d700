"""Flipped bits and cut files: of a checkpoint, and of the data."""

import random
from collections.abc import Iterator
from pathlib import Path

import train
from tests.reliability.world import FINE, TRACEBACK, World, counted, outcome, told

ON = ("optim.max_steps=10", "optim.schedule=constant", "optim.warmup_steps=0")


def _files(run: Path, data: Path) -> list[Path]:
    newest = max((run / "checkpoints").iterdir())
    return [*sorted(newest.iterdir()), *(p for p in sorted(data.iterdir()) if p.name[0] != ".")]


def _tries(world: World, n: int, damage, generator: random.Random) -> Iterator[tuple[Path, int]]:
    for _ in range(n):
        run, data = world.copy("gpt", "tried"), world.copy("text", "tried_text")
        files = [path for path in _files(run, data) if path.stat().st_size]
        path = generator.choice(files)
        yield path, damage(path, generator)


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


def _row(world: World, what: str, n: int, damage) -> dict:
    """Go on from what was damaged: silent is what nobody notices and changes a loss."""
    options = (world.config, *ON, f"data.path={world.folder / 'tried_text'}")
    tried = world.folder / "tried"

    def go_on():
        return outcome(train.main, *options, f"run.out_dir={tried}")

    world.copy("gpt", "tried")
    world.copy("text", "tried_text")
    assert go_on()[0] == FINE
    expected = told(tried)
    failures, unnoticed = [], 0
    for path, at in _tries(world, n, damage, random.Random(what)):
        ended, said = go_on()
        if ended == TRACEBACK:
            failures.append(f"traceback: {path.name} at {at}: {said}")
        elif ended == FINE:
            unnoticed += 1
            if told(tried) != expected:
                failures.append(f"silent: {path.name} at {at}")
        elif path.name not in said:
            failures.append(f"silent: {path.name} at {at} is not named: {said}")
    return counted(what, n, failures, changes_nothing=unnoticed)


def flips(world: World, n: int) -> dict:
    """Flipped bits."""
    return _row(world, "flipped bits", n, _flip)


def cuts(world: World, n: int) -> dict:
    """Files that end too early."""
    return _row(world, "cut files", n, _cut)
