"""SIGTERM in each phase of a run: its progress must be saved."""

import os
import shutil
import signal
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import train
from evaluation.results import Row
from experiments.reliability.processes import call_on_processes, print_to, start_process
from experiments.reliability.world import Tally, World, outcome, records
from training.checkpoint import saver
from training.checkpoint.folders import latest_checkpoint, step_of
from training.command_line import user_errors_as_messages
from training.language import task


class Phase(NamedTuple):
    """A function, the number of the call that gets the signal, and the step saved by then."""

    owner: Any
    name: str
    call: int
    saved: int | None


PHASES = {
    "first step": Phase(train.Trainer, "take_step", 1, None),
    "training": Phase(train.Trainer, "take_step", 3, 3),
    "evaluation": Phase(task.ValidationBatches, "__iter__", 1, 4),
    "saving": Phase(saver, "write_checkpoint", 1, 4),
    "last evaluation": Phase(task.ValidationBatches, "__iter__", 2, 8),
}


def train_and_stop(argv: list[str], phase: str, number: int, rank: int | None) -> None:
    """Train, and in a phase send a signal to this process if it has `rank` (None: any)."""
    owner, name, at, saved = PHASES[phase]
    work, calls, sent = getattr(owner, name), 0, Event()
    selected = rank in (None, int(os.environ.get("RANK", "0")))

    def stopping(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and selected:
            os.kill(os.getpid(), number)
            sent.set()
        return work(*args, **options)

    setattr(owner, name, stopping)
    if phase == "saving" and selected:  # training must wait for the signal
        take_step = train.Trainer.take_step

        def after_the_signal(self: train.Trainer, batch: Any) -> None:
            assert saved is not None and (self.step < saved or sent.wait(30))
            take_step(self, batch)

        train.Trainer.take_step = after_the_signal
    with user_errors_as_messages():
        train.main(argv)


def start_alone(log: Path, argv: list[str], phase: str, number: int, rank: int | None) -> None:
    """Call `train_and_stop` with all output in a file."""
    log.write_text("")
    print_to(log, log)
    train_and_stop(argv, phase, number, rank)


def stops(world: World, world_size: int) -> Row:
    """Stop a run once in each phase, by a signal to each process in turn."""
    run, whole = world.folder / "stopped", world.folder / "undisturbed"
    tally = Tally(f"SIGTERM, {world_size} process{'es' if world_size > 1 else ''}")
    argv = [str(world.config), "model.dropout=0", f"run.out_dir={run}"]
    outcome(train.main, *argv[:2], f"run.out_dir={whole}")
    for phase, (_, _, _, saved) in PHASES.items():
        for rank in range(world_size):
            if phase == "saving" and rank > 0:  # only the main process saves
                continue
            shutil.rmtree(run, ignore_errors=True)
            tally.tries += 1
            arguments = argv, phase, signal.SIGTERM, rank
            if world_size == 1:
                process = start_process(start_alone, world.folder / "log", *arguments)
                process.join(120)
                ends = [process.exitcode]
            else:
                group = call_on_processes(world_size, world.folder, train_and_stop, *arguments)
                ends = [status for status, _ in group]
            newest = latest_checkpoint(run)
            step = None if newest is None else step_of(newest)
            # before the first step is done there is nothing to save
            as_expected = step is None if saved is None else step is not None and step >= saved
            if not as_expected or (saved is not None and ends != [0] * world_size):
                tally.fail("silent", f"{phase}, process {rank}: ended {ends} with step {step}")
            if world_size == 1:
                outcome(train.main, *argv)
                if records(run) != records(whole):
                    tally.fail("silent", f"{phase}: records differ from an undisturbed run")
    return tally.row()
