"""SIGTERM in each phase of a run, and whether what it had done is saved."""

import shutil
import signal

import train
from tests.reliability.world import World, counted, outcome, told
from tests.test_train_stop import PHASES, start_alone, train_and_stop
from tests.training_runs import call_on_two_processes, start_process
from training.checkpoint.folders import latest_checkpoint, step_of


def stops(world: World, world_size: int) -> dict:
    """One in each phase, to each process in turn."""
    run, tries, failures = world.folder / "stopped", 0, []
    argv = [str(world.config), "model.dropout=0", f"run.out_dir={run}"]
    whole = world.folder / "undisturbed"
    outcome(train.main, *argv[:2], f"run.out_dir={whole}")
    for phase, (_, _, _, saved) in PHASES.items():
        for rank in range(world_size):
            if phase == "saving" and rank > 0:  # the main process alone saves
                continue
            shutil.rmtree(run, ignore_errors=True)
            tries += 1
            if world_size == 1:
                process = start_process(
                    start_alone, world.folder / "log", argv, phase, signal.SIGTERM, rank
                )
                process.join(120)
                ends = [process.exitcode]
            else:
                called = (train_and_stop, argv, phase, signal.SIGTERM, rank)
                ends = [status for status, _ in call_on_two_processes(world.folder, *called)]
            newest = latest_checkpoint(run)
            there = None if newest is None else step_of(newest)
            # before the first step is taken there is nothing to save
            as_told = there is None if saved is None else there is not None and there >= saved
            if not as_told or (saved is not None and ends != [0] * world_size):
                failures.append(f"silent: {phase}, process {rank}: ended {ends} with step {there}")
            if world_size == 1:
                outcome(train.main, *argv)
                if told(run) != told(whole):
                    failures.append(f"silent: {phase}: other records than without")
    word = f"{world_size} process{'es' if world_size > 1 else ''}"
    return counted(f"SIGTERM, {word}", tries, failures)
