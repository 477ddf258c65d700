"""kill -9 at random moments: the resumed run must equal a run without kills."""

import os
import random
import shutil
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import train
from evaluation.results import Row
from experiments.reliability.processes import print_to, start_group, start_process
from experiments.reliability.world import Tally, World, records
from training.checkpoint.folders import checkpoints, latest_checkpoint
from training.checkpoint.reader import Checkpoint

STEPS = 40
OPTIONS = (f"optim.max_steps={STEPS}", "run.save_every=1", "run.log_every=3", "run.eval_every=5")
NOWHERE = Path(os.devnull)


def _train_silently(argv: list[str]) -> None:
    print_to(NOWHERE, NOWHERE)
    train.main(argv)


def _start(argv: list[str], world_size: int) -> list[ForkServerProcess]:
    if world_size == 1:
        return [start_process(_train_silently, argv)]
    return start_group(world_size, [NOWHERE] * world_size, train.main, argv)


def _end(processes: list[ForkServerProcess], limit: float) -> bool:
    """Wait for all processes, and kill them at the limit. Return whether any was killed."""
    until = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    killed = any(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
        process.join()
    return killed


def kills(world: World, n: int, world_size: int) -> Row:
    """Kill runs of `world_size` processes n times in total, and resume them until they finish."""
    tally = Tally(f"kill -9, {world_size} process{'es' if world_size > 1 else ''}")
    generator = random.Random(tally.fault)
    whole, run = world.folder / f"whole_{world_size}", world.folder / f"killed_{world_size}"

    def start(folder: Path) -> list[ForkServerProcess]:
        return _start([str(world.config), *OPTIONS, f"run.out_dir={folder}"], world_size)

    started = time.monotonic()
    assert not _end(start(whole), 120)
    seconds = time.monotonic() - started
    expected, saved = records(whole), 0
    while tally.tries < n:
        shutil.rmtree(run, ignore_errors=True)
        while _end(start(run), generator.uniform(0.05, 0.9) * seconds):
            tally.tries += 1
            newest = latest_checkpoint(run)
            if not all(map(Checkpoint.is_intact, checkpoints(run))):
                tally.fail("silent", f"kill {tally.tries}: {newest} is damaged")
            saved += newest is not None
            if tally.tries >= n:  # let the last run finish
                _end(start(run), 120)
                break
        if records(run) != expected:
            tally.fail("silent", f"after kill {tally.tries}: other records than without")
    return tally.row(after_a_checkpoint=saved)
