"""Train a GPT, or a classifier: the configuration's `task` says which.

    python train.py configs/quickstart.yaml                        one process: a GPU, or the CPU
    torchrun --standalone --nproc_per_node=8 train.py configs/gpt2_small_4k.yaml optim.lr=3e-4
    python train.py configs/pathx/path64.yaml run.seed=7           a classifier
    python train.py configs/lra/image.yaml --help                  every setting, with its value
    python train.py configs/gpt2_medium_4k.yaml --dry-run=8        what it asks of eight GPUs

The first argument is a configuration, the others replace single values of it. The run goes into
run.out_dir: config.yaml, metrics.jsonl and checkpoints. Started again, it goes on from its newest
checkpoint, with the same samples and the same losses as if it had never stopped; started while it
still runs, the second refuses. run.init_from names another run to take the first weights from.

A classifier also keeps best.safetensors, the weights that did best on the validation split, and
scores them on the test split in the end. Before its labels it may learn the tokens of the same
examples (objective=masked or causal); losses and accuracies are then those of predicted tokens:

    python train.py configs/lra/image.yaml objective=masked run.out_dir=out/lra/image_masked
    python train.py configs/lra/image.yaml run.init_from=out/lra/image_masked
"""

import sys

from training.command_line import end_at_once_on_ctrl_c, errors_as_sentences
from training.dry_run import dry_run_if_asked
from training.signals import end_by, if_interrupted
from training.tasks import explain_if_asked, read_run

if __name__ == "__main__":
    # What follows loads PyTorch, which takes seconds; help, a misspelt key and data that are not
    # there need not wait for it.
    end_at_once_on_ctrl_c()
    with errors_as_sentences():
        explain_if_asked(__doc__, sys.argv[1:])
        dry_run_if_asked(sys.argv[1:])
        read_run(sys.argv[1:]).check_prepared()

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from configs.reader import to_yaml
from data.files import write_atomically
from training.checkpoint.contents import (
    Progress,
    load_checkpoint,
    read_optim,
    read_task,
)
from training.checkpoint.folders import latest_checkpoint
from training.checkpoint.resume import checkpoint_to_go_on_from, last_good
from training.checkpoint.saver import CheckpointSaver
from training.classification.task import ClassificationTask
from training.config import RUN_CONFIG
from training.distributed import Processes, start_processes
from training.environment import note_start
from training.finite_steps import HIGH, FiniteSteps, LossSpikeDetector, Window
from training.language.config import TrainConfig
from training.language.task import LanguageTask
from training.metrics import Record, RunLog
from training.numerics import deterministic_algorithms
from training.optim import learning_rate, schedule_change, set_learning_rate
from training.parallel import ways_to_run
from training.profiling import StepProfiler
from training.stop import Stop, Stopped, lock_run_dir
from training.stopwatch import Stopwatch
from training.tasks import RunConfiguration
from training.validation import check_validation


class Task(Protocol):
    """What a run learns, from its data to a step; when to validate, save and stop is `train`'s.

    All processes make one and call the same methods in the same order.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finite: FiniteSteps
    """How it takes steps with the optimizer."""
    must_match: dict[str, Any]
    """Settings that a run shares with the checkpoint that it goes on from."""
    n_shapes: int
    """Shapes of batches that the model is given: code is compiled for each."""

    def take_weights(self, run: Path) -> tuple[str, int | None]:
        """Begin with the weights of another run.

        Returns:
            What they are called, and after how many steps they were saved; None if not known.
        """
        ...

    def open(self, run: Path, first_step: int) -> None:
        """Put what the task keeps beside the checkpoints into the folder, or read it there."""
        ...

    def attach(self, fast: nn.Module, parallel: nn.Module) -> None:
        """From now on evaluate with `fast` and train with `parallel`, two ways to run `model`."""
        ...

    def describe(self) -> str:
        """What is about to run."""
        ...

    def samples(self, step: int) -> int:
        """Samples of all steps before this one, over all processes."""
        ...

    def counts(self, step: int) -> dict[str, int]:
        """How much was learned from before this step, as records have it: tokens, or examples."""
        ...

    def compiles_at(self, step: int) -> bool:
        """Whether this step compiles, as batches begin to have another shape, or is captured."""
        ...

    def step(self, step: int) -> int:
        """Gradients, clipping and the optimizer; returns tokens or examples of all processes."""
        ...

    def check_data(self) -> None:
        """Raise what is wrong with the data, once all of them are read; comes before a save."""
        ...

    def losses(self) -> Window:
        """What the steps since the last call gave."""
        ...

    def speed(self, means: dict[str, float | None], per_s: float | None) -> Record:
        """Means over steps and speed as a line, and what the speed amounts to."""
        ...

    def validate(self, step: int, stop: Stop) -> Record:
        """Evaluate the model as it is after `step` steps; looks at `stop` between batches."""
        ...

    def finish(self, validated: Record, stop: Stop) -> Record:
        """After the last checkpoint: that validation, with what else the end of a run tells."""
        ...


TASKS = {"language": LanguageTask, "classification": ClassificationTask}


def main(argv: Sequence[str]) -> dict[str, float]:
    """Train as the command line says; returns the values of the last validation."""
    config = read_run(argv)
    with (
        start_processes(config.run.device, context=n_context(config)) as processes,
        deterministic_algorithms(config.run.deterministic),
        lock_run_dir(Path(config.run.out_dir), processes),  # before anything there is read or written
    ):
        return train(config, processes)


def train(config: RunConfiguration, processes: Processes) -> dict[str, float]:
    """One run, from its first or its last saved step to optim.max_steps.

    Raises:
        ValueError, FileNotFoundError: data, checkpoint and configuration do not fit together.
        FloatingPointError: run.max_skipped steps in a row, or a validation, were not finite.
    """
    run_dir = Path(config.run.out_dir)
    device, optim = processes.device, config.optim

    # the same weights on every process, then dropout of its own
    torch.manual_seed(config.run.seed)
    torch.set_float32_matmul_precision("high")
    task: Task = TASKS[config.task](config, processes)
    torch.manual_seed(config.run.seed + 1 + processes.rank)

    progress, source, origin, origin_step = Progress(), None, None, None
    checkpoint, damaged = checkpoint_to_go_on_from(config.run, processes)
    if checkpoint is not None:
        if (there := read_task(checkpoint)) not in (None, config.task):
            raise ValueError(
                f"run.out_dir={run_dir} holds a run of task={there}, and this is one of "
                f"task={config.task}: choose another folder"
            )
        progress = load_checkpoint(
            checkpoint,
            task.model,
            task.optimizer,
            task.must_match,
            processes,
            task.finite.kept,
        )
    elif config.run.init_from is not None:
        source = Path(config.run.init_from)
        origin, origin_step = task.take_weights(source)
    task.open(run_dir, progress.step)
    if processes.is_main:
        write_atomically(run_dir / RUN_CONFIG, to_yaml(config).encode())
        if progress.step < optim.max_steps:
            note_start(
                run_dir,
                progress.step,
                world_size=processes.world_size,
                origin=source,
                origin_step=origin_step,
            )
    task.attach(*ways_to_run(task.model, config.run, processes, task.n_shapes))

    step = progress.step
    saver = CheckpointSaver(
        run_dir,
        processes,
        task.must_match,
        asdict(config),
        last_step=step,
        keep_last=config.run.keep_last,
        keep_best=config.run.keep_best,
    )
    profiles = config.run.profile > 0 and processes.is_main
    with (
        RunLog(config, start_step=step, is_main=processes.is_main) as log,
        StepProfiler(run_dir / "profile", config.run.profile, device)
        if profiles
        else nullcontext() as profiler,
        if_interrupted(
            lambda: f" at step {step}: {what_goes_on(config)}",
            is_saved=lambda: saver.last_step == step > 0,
        ),
        Stop(processes) as stop,
        saver,
    ):
        log.say(task.describe())
        for folder in damaged:
            log.say(f"set aside as damaged: {folder}")
        if progress.step >= optim.max_steps:
            log.say(f"finished before, see {checkpoint}: evaluating once more")
        elif progress.step:
            assert checkpoint is not None
            log.say(f"going on from {checkpoint}")
            if change := schedule_change(progress.step, read_optim(checkpoint), optim):
                log.say(change)
        elif origin is not None:
            log.say(f"starting with the weights of {origin}")

        watch = Stopwatch(device, n_processes=processes.world_size, gpu_hours=progress.gpu_hours)
        spikes = LossSpikeDetector(log.losses())
        validated: Record | None = None
        save_is_due = False

        def save(val_loss: float | None = None) -> None:
            task.check_data()
            saver.check()
            log.sync()  # a checkpoint counts on the records before it
            now = Progress(
                step=step,
                samples=task.samples(step),
                tokens=task.samples(step) * config.model.context_length,
                gpu_hours=watch.gpu_hours,
                val_loss=val_loss,
            )
            # A step was taken from each checkpoint before this step, unless it was skipped.
            saver.confirm(step - task.finite.skipped_in_a_row())
            saver.save(now, task.model, task.optimizer, task.finite.kept)

        try:
            while True:
                # validate and save, on all processes, between two steps
                stop.look()
                last, val_loss = step >= optim.max_steps, None
                validates = step % config.run.eval_every == 0 and step > 0
                # one that was stopped in it, or before it, comes again
                validates &= step > progress.step or progress.val_loss is None
                if last or validates:
                    with watch.paused():
                        validated = task.validate(step, stop)
                    val_loss = validated.values["val_loss"]
                    check_validation(validated.values, task.finite, saver, run_dir, step)
                    saver.check()
                    if not last:
                        record(log, task, step, validated, gpu_hours=watch.gpu_hours)
                if step > progress.step and (last or step % config.run.save_every == 0):
                    save_is_due = True
                # While steps are being skipped, the weights may be ruined: a save waits until a
                # step is taken. Only then does the host wait for the GPU in each step.
                if save_is_due and (val_loss is not None or not task.finite.skipped_in_a_row()):
                    save_is_due = False
                    with watch.paused():
                        save(val_loss)
                if last:
                    assert validated is not None
                    saver.confirm(step + 1)  # validated, and no step follows
                    saver.finish()
                    if profiler is not None and profiler.unfinished():
                        log.say(
                            f"run.profile={config.run.profile}: nothing was profiled, as this "
                            "start had too few steps"
                        )
                    result = task.finish(validated, stop)
                    saver.check()
                    record(log, task, step, result, gpu_hours=watch.gpu_hours)
                    return result.values

                # one step; code that is compiled in it is not training
                if task.compiles_at(step):
                    watch.expect_compilation()
                lr = learning_rate(step, optim)
                set_learning_rate(task.optimizer, lr)
                watch.count(task.step(step))
                step += 1
                if profiler is not None and profiler.step():
                    with watch.paused():
                        log.say(profiler.report())
                stop.watch()  # before, as the first step compiles, there is nothing to save

                # reading the loss is the only time that the host waits for the GPU
                if step % config.run.log_every == 0 or step == optim.max_steps:
                    window = task.losses()
                    saver.check()
                    saver.confirm(step - window.in_a_row)
                    with watch.paused():
                        spent = task.speed(window.means, watch.tokens_per_s())
                        seen = window.means | {"lr": lr, "grad_norm": window.grad_norm}
                        seen |= remarkable(log, task, step, window, spikes)
                        record(log, task, step, spent, **seen, gpu_hours=watch.gpu_hours)
                    if window.in_a_row >= config.run.max_skipped:
                        saver.finish()
                        good = last_good(run_dir, step - window.in_a_row)
                        raise FloatingPointError(
                            f"the last {window.in_a_row} steps up to {step} were skipped, as their "
                            "loss or gradient is not finite (run.max_skipped="
                            f"{config.run.max_skipped}): lower optim.lr, raise optim.warmup_steps, "
                            f"or look at these samples; {good}"
                        )
        except Stopped as told:
            if saver.last_step != step:
                with watch.paused():
                    save()
            saver.finish()
            saver.check()
            log.sync()
            processes.leave()
            end_by(told.number)


def n_context(config: RunConfiguration) -> int:
    """How many processes share each sequence; a classifier's have each all of theirs."""
    return config.parallel.context if isinstance(config, TrainConfig) else 1


def remarkable(
    log: RunLog, task: Task, step: int, window: Window, spikes: LossSpikeDetector
) -> dict[str, Any]:
    """Say which steps were skipped, and whether the loss stands out; returns it for the record."""
    values: dict[str, Any] = {}
    if window.n_skipped:
        samples = [[task.samples(n), task.samples(n + 1) - 1] for n in window.skipped]
        values = {"skipped": window.n_skipped, "skipped_samples": samples}
        log.say(
            f"skipped {window.n_skipped} of the steps up to {step}, as the loss or gradient is not "
            "finite: "
            f"samples {', '.join(f'{first} to {last}' for first, last in samples)}"
            + (" and more" if window.n_skipped > len(samples) else "")
        )
    loss = window.means["loss"]
    z_score = None if loss is None else spikes.z_score(loss)
    if z_score is not None and z_score >= HIGH:
        values["loss_z"] = z_score
        log.say(f"loss spike: {loss:.4f} at step {step}, robust z-score {z_score:.1f}")
    return values


def what_goes_on(config: RunConfiguration) -> str:
    """What the same command does after this run was stopped."""
    checkpoint = latest_checkpoint(Path(config.run.out_dir))
    if checkpoint is None:
        return (
            f"the same command begins again, as the first checkpoint comes with step "
            f"{config.run.save_every} (run.save_every)"
        )
    auto = " with run.resume=auto" if config.run.resume == "never" else ""
    return f"the same command{auto} goes on from {checkpoint}"


def record(log: RunLog, task: Task, step: int, what: Record, **values: Any) -> None:
    """One line of metrics.jsonl, and one on the console."""
    log.record(what.text, step=step, **task.counts(step), **values, **what.values)


if __name__ == "__main__":
    with errors_as_sentences():
        main(sys.argv[1:])
