"""Train a GPT, or a classifier: the configuration's `task` says which.

    python train.py configs/quickstart.yaml                        one process: a GPU, or the CPU
    torchrun --standalone --nproc_per_node=8 train.py configs/long_4k.yaml optim.lr=3e-4
    python train.py configs/pathx/path64.yaml run.seed=7           a classifier
    python train.py configs/lra/image.yaml --help                  every setting, with its value
    python train.py configs/long_16k.yaml --dry-run=8              its memory on eight GPUs

The first argument is a configuration; the others override single values. A run writes into
run.out_dir: config.yaml, metrics.jsonl and checkpoints. The same command resumes it from its newest
checkpoint, with the same samples and losses as if it had never stopped. While it is still running,
a second start is refused. run.init_from names another run whose weights this one starts with.

A classifier also saves the weights with the best validation accuracy as best.safetensors, and
evaluates them on the test split at the end. It can be pretrained on the tokens of the same examples
(objective=masked or causal); losses and accuracies are then those of predicted tokens:

    python train.py configs/lra/image.yaml objective=masked run.out_dir=out/lra/image_masked
    python train.py configs/lra/image.yaml run.init_from=out/lra/image_masked
"""

import sys

from training.command_line import exit_on_ctrl_c, user_errors_as_messages
from training.dry_run import handle_dry_run, startup_notes
from training.signals import on_interrupt, stop_by_signal
from training.tasks import handle_settings_help, read_run

if __name__ == "__main__":
    # The imports below load PyTorch, which takes seconds. Help, a misspelt key or missing data
    # should not have to wait for it.
    exit_on_ctrl_c()
    with user_errors_as_messages():
        handle_settings_help(__doc__, sys.argv[1:])
        handle_dry_run(sys.argv[1:])
        read_run(sys.argv[1:]).check_prepared()

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from configs.reader import to_yaml
from data.files import write_atomically
from training.checkpoint.choice import find_resume_checkpoint
from training.checkpoint.contents import Progress
from training.checkpoint.folders import latest_checkpoint
from training.checkpoint.reader import Checkpoint
from training.checkpoint.saver import CheckpointSaver
from training.classification.task import ClassificationTask
from training.config import RUN_CONFIG
from training.distributed import Processes, start_processes
from training.environment import record_start
from training.finite_steps import (
    HIGH,
    FiniteSteps,
    LossSpikeDetector,
    Window,
    check_skipped,
    check_validation,
)
from training.language.config import TrainConfig
from training.language.task import LanguageTask
from training.metrics import Record, RunLog
from training.numerics import deterministic_algorithms
from training.optim import changed_settings, learning_rate, make_optimizer, set_learning_rate
from training.parallel import compile_and_wrap, weights_are_static
from training.profiling import StepProfiler, Stopwatch
from training.step import GraphedStep, train_step
from training.stop import Stop, Stopped, lock_run_dir
from training.task import Task
from training.tasks import RunConfiguration

TASKS = {"language": LanguageTask, "classification": ClassificationTask}


def main(argv: Sequence[str]) -> dict[str, float]:
    """Train as the command line says; returns the values of the last validation."""
    config = read_run(argv)
    n_context = config.parallel.context if isinstance(config, TrainConfig) else 1
    with (
        start_processes(config.run.device, context=n_context) as processes,
        deterministic_algorithms(config.run.deterministic),
        lock_run_dir(Path(config.run.out_dir), processes),  # before its files are read
    ):
        return Trainer(config, processes).train()


class Trainer:
    """One run, from step 0 or its last checkpoint to optim.max_steps.

    Every process creates one. The task owns the data, the model and its loss; the trainer owns
    steps, validation, checkpoints and records.
    """

    def __init__(self, config: RunConfiguration, processes: Processes) -> None:
        """Open the data, make the model and its optimizer, and resume if there is a checkpoint.

        Raises:
            ValueError, FileNotFoundError: data, checkpoint and configuration do not match.
        """
        self.config, self.processes = config, processes
        self.run_dir = Path(config.run.out_dir)
        # Same seed for the weights on every process; below, one seed per rank for dropout.
        torch.manual_seed(config.run.seed)
        torch.set_float32_matmul_precision("high")
        self.task: Task = TASKS[config.task](config, processes)
        torch.manual_seed(config.run.seed + 1 + processes.rank)
        self.optimizer = make_optimizer(
            self.task.model, config.optim, capturable=self.task.can_capture
        )
        self.finite = FiniteSteps(
            self.optimizer, processes, self.task.value_names, grad_clip=config.optim.grad_clip
        )
        self.start = Progress()
        """Progress when this start began."""
        self.startup_messages: list[str] = []
        """Lines to report about this start once the log is open."""
        self.resume()
        self.step = self.start.step
        """Optimizer steps taken so far."""
        self.stage: int | None = None
        self.compiled, self.parallel = compile_and_wrap(
            self.task.model, config.run, processes, self.task.n_shapes
        )
        self.watch = Stopwatch(
            processes.device, n_processes=processes.world_size, gpu_hours=self.start.gpu_hours
        )
        self.validated: Record | None = None
        self.save_is_due = False
        self.saver = CheckpointSaver(
            self.run_dir,
            processes,
            self.task.must_match,
            asdict(config),
            last_step=self.step,
            keep_last=config.run.keep_last,
            keep_best=config.run.keep_best,
        )

    def resume(self) -> None:
        """Load the newest checkpoint, or the weights of run.init_from, and record the start."""
        config, task, processes = self.config, self.task, self.processes
        folder, damaged = find_resume_checkpoint(config.run, processes)
        self.startup_messages += [f"damaged checkpoint renamed to {name}" for name in damaged]
        source, origin_step = None, None
        if folder is not None:
            checkpoint = Checkpoint.open(folder)
            if checkpoint.task not in (None, config.task):
                raise ValueError(
                    f"run.out_dir={self.run_dir} has a run of task={checkpoint.task}, and must be "
                    f"empty or have one of task={config.task}. Try another run.out_dir"
                )
            self.start = checkpoint.progress
            kept = self.finite.kept
            checkpoint.restore(task.model, self.optimizer, task.must_match, processes, kept)
            if self.start.step >= config.optim.max_steps:
                step = self.start.step
                self.startup_messages.append(
                    f"already finished: {folder} is at step {step}, which is at least "
                    f"optim.max_steps={config.optim.max_steps}. Evaluating again; to train on, "
                    f"set optim.max_steps above {step}"
                )
            else:
                before = checkpoint.optim(type(config.optim))
                changed = changed_settings(self.start.step, before, config.optim)
                self.startup_messages += [
                    f"resuming from {folder}",
                    *checkpoint.removed_settings(),
                    *changed,
                ]
        elif config.run.init_from is not None:
            source = Path(config.run.init_from)
            origin, origin_step = task.load_initial_weights(source)
            self.startup_messages.append(f"initial weights: {origin}")
        task.open(self.run_dir, self.start.step)
        if not processes.is_main:
            return
        is_finished = self.start.step >= config.optim.max_steps
        # A finished run keeps the settings with which it was trained.
        if not (is_finished and (self.run_dir / RUN_CONFIG).exists()):
            write_atomically(self.run_dir / RUN_CONFIG, to_yaml(config).encode())
        if not is_finished:
            record_start(
                self.run_dir,
                self.start.step,
                world_size=processes.world_size,
                origin=source,
                origin_step=origin_step,
            )

    def train(self) -> dict[str, float]:
        """Train to optim.max_steps, or until a signal; returns the values of the last validation.

        Raises:
            FloatingPointError: run.max_skipped steps in a row, or a validation, were not finite.
        """
        config, is_main = self.config, self.processes.is_main
        profiles = config.run.profile > 0 and is_main
        with (
            RunLog(config, start_step=self.step, is_main=is_main) as self.log,
            StepProfiler(self.run_dir / "profile", config.run.profile, self.processes.device)
            if profiles
            else nullcontext() as self.profiler,
            on_interrupt(
                lambda: f" at step {self.step}: {resume_hint(config)}",
                is_saved=lambda: self.saver.last_step == self.step > 0,
            ),
            Stop(self.processes) as self.stop,
            self.saver,
        ):
            for line in (self.task.describe(), *startup_notes(config), *self.startup_messages):
                self.log.say(line)
            self.spikes = LossSpikeDetector(self.log.losses())
            try:
                return self.loop()
            except Stopped as stopped:
                self.save_and_end(stopped.number)

    def loop(self) -> dict[str, float]:
        """Validate, save and step until the last step; returns the last validation's values."""
        last_step, log_every = self.config.optim.max_steps, self.config.run.log_every
        batch = None
        while True:
            self.stop.look()
            self.validate_and_save()
            if self.step >= last_step:
                return self.finish()
            self.take_step(batch or self.task.batch(self.step))
            # Read the next batch while the GPU computes this step.
            batch = self.task.batch(self.step) if self.step < last_step else None
            if self.step % log_every == 0 or self.step == last_step:
                self.report()

    def take_step(self, batch: tuple[Tensor, ...]) -> None:
        """Forward, backward and optimizer on a batch of this process."""
        task, step = self.task, self.step
        if task.stage(step) != self.stage:
            self.start_stage(task.stage(step))
            self.watch.expect_compilation()
        if self.graphed_step.captures_next:
            self.watch.expect_compilation()
        set_learning_rate(self.optimizer, learning_rate(step, self.config.optim))
        self.graphed_step(*batch)
        self.step += 1
        self.watch.count(task.count(self.step) - task.count(step))
        if self.profiler is not None and self.profiler.step():
            with self.watch.paused():
                self.log.say(self.profiler.report())
        self.stop.watch()  # not earlier: there is nothing to save while the first step compiles

    def start_stage(self, stage: int) -> None:
        """Switch to the loss of a stage, whose batches may have other shapes."""
        self.stage = stage
        self.graphed_step = GraphedStep(
            partial(train_step, self.task.loss(stage), self.parallel, self.finite),
            self.optimizer,
            self.processes.device,
            capture=self.task.can_capture,
            cache_casts=weights_are_static(self.task.model),
        )

    def validate_and_save(self) -> None:
        """Between two steps, validate and save if either is due, on all processes."""
        step, run = self.step, self.config.run
        is_last, is_new = step >= self.config.optim.max_steps, step > self.start.step
        val_loss = None
        # A validation that was interrupted is repeated when the run resumes.
        is_due = step > 0 and step % run.eval_every == 0
        if is_last or (is_due and (is_new or self.start.val_loss is None)):
            with self.watch.paused():
                self.validated = self.task.validate(self.compiled, step, self.stop)
            val_loss = self.validated.values["val_loss"]
            check_validation(self.validated.values, self.finite, self.saver, self.run_dir, step)
            self.saver.check()
            if not is_last:
                self.record(self.validated)
        if is_new and (is_last or step % run.save_every == 0):
            self.save_is_due = True
        # While steps are being skipped, the weights may be ruined, so a save waits until a step is
        # taken. Only while a save is due does the host wait for the GPU in each step.
        if self.save_is_due and (val_loss is not None or not self.finite.skipped_in_a_row()):
            self.save_is_due = False
            with self.watch.paused():
                self.save(val_loss)

    def save(self, val_loss: float | None = None) -> None:
        """Start saving a checkpoint in the background."""
        self.task.check_data(wait=True)
        self.saver.check()
        self.log.sync()  # a checkpoint relies on the records before it
        progress = Progress(
            step=self.step,
            samples=self.task.samples(self.step),
            tokens=self.task.tokens(self.step),
            gpu_hours=self.watch.gpu_hours,
            val_loss=val_loss,
        )
        # A step was taken from each checkpoint before this step, unless it was skipped.
        self.saver.confirm(self.step - self.finite.skipped_in_a_row())
        self.saver.save(progress, self.task.model, self.optimizer, self.finite.kept)

    def report(self) -> None:
        """Record the steps since the last report; the only place where the host waits for the GPU.

        Raises:
            FloatingPointError: the last run.max_skipped steps were skipped.
        """
        self.task.check_data(wait=False)
        window = self.finite.read()
        self.saver.check()
        self.saver.confirm(self.step - window.in_a_row)
        with self.watch.paused():
            speed = self.task.speed(self.step, window.means, self.watch.tokens_per_s())
            lr = learning_rate(self.step - 1, self.config.optim)
            values = window.means | {"lr": lr, "grad_norm": window.grad_norm}
            self.record(speed, **values, **self.check_anomalies(window))
        check_skipped(window, self.config.run.max_skipped, self.saver, self.run_dir, self.step)

    def check_anomalies(self, window: Window) -> dict[str, Any]:
        """Log skipped steps and loss spikes; returns them for the record."""
        values: dict[str, Any] = {}
        if window.n_skipped:
            samples = self.task.samples
            skipped = [[samples(n), samples(n + 1) - 1] for n in window.skipped]
            values = {"skipped": window.n_skipped, "skipped_samples": skipped}
            self.log.say(
                f"skipped {window.n_skipped} step(s) up to step {self.step}: loss or gradient not "
                f"finite, samples {', '.join(f'{first} to {last}' for first, last in skipped)}"
                + (" and more" if window.n_skipped > len(skipped) else "")
            )
        loss = window.means["loss"]
        z_score = None if loss is None else self.spikes.z_score(loss)
        if z_score is not None and z_score >= HIGH:
            values["loss_z"] = z_score
            self.log.say(
                f"loss spike: {loss:.4f} at step {self.step}, robust z-score {z_score:.1f}"
            )
        return values

    def record(self, entry: Record, **values: Any) -> None:
        """Write one line to metrics.jsonl and one to the console."""
        values |= {"gpu_hours": self.watch.gpu_hours} | entry.values
        count = {self.task.unit: self.task.count(self.step)}
        self.log.record(entry.text, step=self.step, **count, **values)

    def finish(self) -> dict[str, float]:
        """Wait for the last checkpoint and record the task's final evaluation."""
        assert self.validated is not None
        self.saver.confirm(self.step + 1)  # validated, and no step follows
        self.saver.finish()
        if self.profiler is not None and self.profiler.unfinished():
            self.log.say("no profile (run.profile): too few steps left in this run")
        result = self.task.finish(self.compiled, self.validated, self.stop)
        self.saver.check()
        self.record(result)
        return result.values

    def save_and_end(self, signal_number: int) -> NoReturn:
        """Save unsaved steps on all processes, then exit by the signal."""
        if self.saver.last_step != self.step:
            with self.watch.paused():
                self.save()
        self.saver.finish()
        self.saver.check()
        self.log.sync()
        self.processes.leave()
        stop_by_signal(signal_number)


def resume_hint(config: RunConfiguration) -> str:
    """Sentence that says where the same command will resume the run."""
    checkpoint = latest_checkpoint(Path(config.run.out_dir))
    if checkpoint is None:
        return (
            f"the same command starts again from step 0; the first checkpoint is at step "
            f"{config.run.save_every} (run.save_every)"
        )
    auto = " with run.resume=auto" if config.run.resume == "never" else ""
    return f"the same command{auto} resumes from {checkpoint}"


if __name__ == "__main__":
    with user_errors_as_messages():
        main(sys.argv[1:])
