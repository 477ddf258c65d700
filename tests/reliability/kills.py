"""kill -9 at random moments, and whether what goes on is the run that nobody killed."""

import os
import random
import shutil
import socket
import time
from pathlib import Path

import train
from tests.reliability.world import World, counted, told
from tests.training_runs import start_process
from training.checkpoint.folders import checkpoints, latest_checkpoint
from training.checkpoint.reader import is_whole

STEPS = 40
OPTIONS = (f"optim.max_steps={STEPS}", "run.save_every=1", "run.log_every=3", "run.eval_every=5")


def _train(argv: list[str], rank: int, world_size: int, port: int) -> None:
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    train.main(argv)


def _start(argv: list[str], world_size: int):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [start_process(_train, argv, rank, world_size, port) for rank in range(world_size)]


def _end(processes, limit: float | None) -> bool:
    """Wait for the end, or kill all at the limit; whether they were killed."""
    until = None if limit is None else time.monotonic() + limit
    for process in processes:
        process.join(None if until is None else max(0.0, until - time.monotonic()))
    killed = any(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
        process.join()
    return killed


def kills(world: World, n: int, world_size: int) -> dict:
    """Kill runs of `world_size` processes n times in all, and let them go on until they end."""
    what = f"kill -9, {world_size} process{'es' if world_size > 1 else ''}"
    generator = random.Random(what)
    whole, run = world.folder / f"whole_{world_size}", world.folder / f"killed_{world_size}"

    def argv(folder: Path) -> list[str]:
        return [str(world.config), *OPTIONS, f"run.out_dir={folder}"]

    started = time.monotonic()
    assert not _end(_start(argv(whole), world_size), 120)
    seconds = time.monotonic() - started
    expected = told(whole)
    n_killed, failures, saved = 0, [], 0
    while n_killed < n:
        shutil.rmtree(run, ignore_errors=True)
        while _end(_start(argv(run), world_size), generator.uniform(0.05, 0.9) * seconds):
            n_killed += 1
            newest = latest_checkpoint(run)
            if not all(map(is_whole, checkpoints(run))):
                failures.append(f"silent: kill {n_killed}: {newest} is damaged")
            saved += newest is not None
            if n_killed >= n:  # and to the end
                _end(_start(argv(run), world_size), 120)
                break
        if told(run) != expected:
            failures.append(f"silent: after kill {n_killed}: other records than without")
    return counted(what, n, failures, after_a_checkpoint=saved)
