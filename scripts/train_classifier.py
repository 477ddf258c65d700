"""Train a classifier on a prepared task of Long Range Arena, or on Pathfinder images.

    python -m scripts.train_classifier configs/lra/listops.yaml
    torchrun --standalone --nproc_per_node=8 -m scripts.train_classifier \\
        configs/pathx/path64.yaml run.seed=7

The first argument is a configuration, the others replace single values of it. The run goes into
run.out_dir: config.yaml, metrics.jsonl, checkpoints, and best.safetensors, the weights that did
best on the validation split, which are scored on the test split in the end. Started again, it goes
on from its newest checkpoint. run.init_from names a classifier's run to take the best weights from.

Before its labels, a model may learn the tokens of the same examples (objective=masked or causal).
Losses and accuracies of such a run, on the test split too, are those of predicted tokens:

    python -m scripts.train_classifier configs/lra/image.yaml objective=masked \\
        run.out_dir=out/lra/image_masked
    python -m scripts.train_classifier configs/lra/image.yaml run.init_from=out/lra/image_masked
"""

import io
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from configs import RUN_CONFIG, ClassifyConfig, read_config, to_yaml
from configs.command_line import errors_as_sentences, help_if_asked
from data.files import write_atomically
from data.lra.batches import Batch, Examples, load_examples
from data.lra.curriculum import Curriculum
from scripts.classifier_start import (
    AnyModel,
    check_data,
    load_first_weights,
    make_model,
    what_must_match,
)
from training.checkpoint import Progress, latest_checkpoint, load_checkpoint, save_checkpoint
from training.classification import BEST, Score, best_so_far, read_best, save_best, score
from training.classifier_step import ClassifierStep
from training.distributed import Processes, start_processes
from training.environment import note_start
from training.graphs import GraphedStep
from training.metrics import RunLog
from training.numerics import autocast, deterministic_algorithms
from training.objectives import make_ask
from training.optim import learning_rate, make_optimizer, set_learning_rate
from training.run_lock import only_run
from training.stopwatch import Stopwatch

TEST_LOGITS = "test_logits.npy"


def main(argv: Sequence[str]) -> Score:
    """Train as the command line says; returns the score of the best weights on the test split."""
    config = read_config(ClassifyConfig, argv)
    with (
        start_processes(config.run.device) as processes,
        deterministic_algorithms(config.run.deterministic),
        only_run(Path(config.run.out_dir), processes),
    ):
        return train(config, processes)


def train(config: ClassifyConfig, processes: Processes) -> Score:
    """One run, from its first or its last saved step to optim.max_steps.

    Raises:
        ValueError, FileNotFoundError: data, checkpoint and configuration do not fit together.
        FloatingPointError: the loss is no longer finite.
    """
    started = time.perf_counter()
    run_dir, device, optim = Path(config.run.out_dir), processes.device, config.optim

    # data, all of it on the device
    check_data(config)
    curriculum = Curriculum(
        config.data,
        config.model.context_length,
        optim.batch_size,
        seed=config.run.seed,
        rank=processes.rank,
        world_size=processes.world_size,
        device=device,
    )
    validation, test = (
        load_examples(
            Path(config.data.path), split, config.model.context_length, config.data, device
        )
        for split in ("val", "test")
    )

    # model and optimizer; the same weights on every process, then dropout of its own
    torch.manual_seed(config.run.seed)
    torch.set_float32_matmul_precision("high")
    model = make_model(config).to(device)
    ask = make_ask(config.objective, config.hidden_share)
    captured = device.type == "cuda" and processes.world_size == 1
    optimizer = make_optimizer(model, optim, capturable=captured)
    torch.manual_seed(config.run.seed + 1 + processes.rank)

    # resume, or start with the best weights of another run
    progress = Progress()
    must_match = what_must_match(config)
    checkpoint = processes.agree(latest_checkpoint(run_dir))
    if checkpoint is not None:
        if config.run.resume == "never":
            raise ValueError(
                f"run.out_dir={run_dir} already has {checkpoint.name} and run.resume=never: choose "
                "another folder, or run.resume=auto to go on from it"
            )
        progress = load_checkpoint(checkpoint, model, optimizer, must_match, processes)
    elif config.run.init_from is not None:
        load_first_weights(Path(config.run.init_from), model)
    if processes.is_main:
        if checkpoint is None:
            # of a start that left no checkpoint, and may have had other settings
            (run_dir / BEST).unlink(missing_ok=True)
        write_atomically(run_dir / RUN_CONFIG, to_yaml(config).encode())
        if progress.step < optim.max_steps:
            note_start(run_dir, progress.step, world_size=processes.world_size)

    fast_model: nn.Module = model
    if config.run.compile:
        # each phase, the task itself and scoring may have a shape of their own, and torch takes
        # more than a few for a mistake
        shapes = len(config.data.phases) + 2
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, shapes)
        fast_model = torch.compile(  # pyright: ignore
            model,
            fullgraph=True,  # a graph break would be slow, and nobody would see it
            dynamic=False,  # a phase of other shapes compiles anew: code for any shape is slower
        )
    parallel: nn.Module = fast_model
    if processes.world_size > 1:
        parallel = DistributedDataParallel(
            fast_model,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,  # tables of constants, the same everywhere
        )

    def activations() -> AbstractContextManager:
        return autocast(config.run.dtype, device)

    learn = ClassifierStep(
        parallel, optimizer, activations, device, grad_clip=optim.grad_clip, ask=ask
    )

    def make_step(number: int) -> GraphedStep:
        lesson = curriculum.lesson(number)

        def step(numbers: Tensor, changes: Tensor) -> None:
            learn(lesson.batch(numbers, changes))

        return GraphedStep(step, optimizer, device, capture=captured)

    def evaluate(examples: Examples, limit: int | None = None) -> Score:
        batch_size = optim.eval_batch_size or optim.batch_size // processes.world_size
        n = len(examples.labels[:limit])
        batches = as_they_are(examples)
        found = score(fast_model, batches, n, batch_size, processes, activations, ask)
        if bool(examples.overflow):
            raise ValueError(
                f"an image of {config.data.path} that is scored has more pixels above zero than "
                f"model.context_length={config.model.context_length} has room for: raise it"
            )
        if not math.isfinite(found.loss):
            raise FloatingPointError(
                f"the loss is {found.loss} where the model is scored: lower optim.lr or raise "
                f"optim.warmup_steps; checkpoints in {run_dir} may be from before"
            )
        return found

    with RunLog(
        run_dir,
        is_main=processes.is_main,
        start_step=progress.step,
        max_steps=optim.max_steps,
        wandb=config.run.wandb,
        wandb_project=config.run.wandb_project,
        config=asdict(config),
    ) as log:
        log.say(describe(config, processes, model, curriculum))
        best = best_so_far(run_dir)
        if best is not None and best[0] > progress.step:
            best = None  # of steps that come again
        step, lesson_number, loss_steps = progress.step, -1, 0
        take_step: GraphedStep | None = None
        watch = Stopwatch(device, n_processes=processes.world_size, gpu_hours=progress.gpu_hours)
        while True:
            # validate, keep the best weights and save, on all processes, between two steps
            last = step >= optim.max_steps
            examples = curriculum.examples_before(step)
            found: Score | None = None
            if last or (step % config.run.eval_every == 0 and step > progress.step):
                with watch.paused():
                    found = evaluate(validation, config.data.val_examples)
                    if best is None or found.accuracy > best[1]:
                        best = step, found.accuracy
                        if processes.is_main:
                            save_best(run_dir, model, *best)
                    if not last:
                        record_evaluation(log, step, examples, watch.gpu_hours, found, best)
            if step > progress.step and (last or step % config.run.save_every == 0):
                with watch.paused():
                    save_checkpoint(
                        run_dir,
                        Progress(
                            step=step,
                            samples=examples,
                            tokens=examples * config.model.context_length,
                            gpu_hours=watch.gpu_hours,
                        ),
                        model,
                        optimizer,
                        must_match,
                        processes,
                        config=asdict(config),
                        keep_last=config.run.keep_last,
                    )
            if last:
                assert found is not None and best is not None
                processes.barrier()  # until the best weights are written
                model.load_state_dict(read_best(run_dir))
                on_test = evaluate(test)
                if processes.is_main and on_test.logits is not None:
                    write_logits(run_dir / TEST_LOGITS, on_test.logits)
                tested = {
                    "test_loss": on_test.loss,
                    "test_accuracy": on_test.accuracy,
                    "test_examples": on_test.n_examples,
                }
                if progress.step == 0:  # else a part of it is not known
                    tested["wall_s"] = time.perf_counter() - started
                record_evaluation(log, step, examples, watch.gpu_hours, found, best, tested)
                return on_test

            # one step
            if lesson_number != curriculum.number(step) or take_step is None:
                lesson_number = curriculum.number(step)
                watch.expect_compilation()
                take_step = make_step(lesson_number)
            lr = learning_rate(step, optim)
            set_learning_rate(optimizer, lr)
            take_step(*curriculum.draw(step))
            step += 1
            loss_steps += 1
            watch.count(curriculum.lesson(lesson_number).batch_size)

            if step % config.run.log_every == 0 or step == optim.max_steps:
                curriculum.check()
                means = processes.sum(learn.means(loss_steps)) / processes.world_size
                (loss, accuracy), grad_norm = means.tolist(), learn.grad_norm.item()
                if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                    raise FloatingPointError(
                        f"the training loss is {loss} and the norm of its gradient "
                        f"{grad_norm} at step {step}: lower optim.lr or raise "
                        f"optim.warmup_steps; checkpoints in {run_dir} are from before"
                    )
                with watch.paused():
                    examples_per_s = watch.tokens_per_s()
                    log.record(
                        f"loss {loss:.4f}  accuracy {accuracy:.1%}"
                        + (f"  {examples_per_s:,.0f} examples/s" if examples_per_s else ""),
                        step=step,
                        examples=curriculum.examples_before(step),
                        loss=loss,
                        accuracy=accuracy,
                        lr=lr,
                        grad_norm=grad_norm,
                        examples_per_s=examples_per_s,
                        lesson=lesson_number,
                        gpu_hours=watch.gpu_hours,
                        memory_gib=memory_gib(device),
                    )
                learn.forget()
                loss_steps = 0


def as_they_are(examples: Examples) -> Callable[[Tensor], Batch]:
    """Batches of examples by their numbers, no image turned or mirrored."""

    def batch(numbers: Tensor) -> Batch:
        return examples.batch(numbers, torch.zeros_like(numbers))

    return batch


def describe(
    config: ClassifyConfig, processes: Processes, model: AnyModel, curriculum: Curriculum
) -> str:
    """What is about to run."""
    if processes.device.type == "cuda":
        device = torch.cuda.get_device_name(processes.device)
    else:
        device = f"CPU, {torch.get_num_threads()} threads"
    examples = curriculum.examples_before(config.optim.max_steps)
    return (
        f"{model.n_params() / 1e6:.2f}M parameters, objective {config.objective}, "
        f"{config.model.context_length:,} tokens, "
        f"attention {config.model.attention} ({config.model.mask.pattern}) on "
        f"{processes.world_size} x {device}\n"
        f"{config.optim.max_steps:,} steps, {examples:,} examples, in the end "
        f"{config.optim.batch_size:,} a step from the {len(curriculum.task):,} of "
        f"{config.data.path}\n"
        f"everything goes into {config.run.out_dir}"
    )


def record_evaluation(
    log: RunLog,
    step: int,
    examples: int,
    gpu_hours: float,
    found: Score,
    best: tuple[int, float],
    tested: dict[str, float] | None = None,
) -> None:
    """Log a validation, and in the end what the best weights did on the test split."""
    text = f"val loss {found.loss:.4f}  accuracy {found.accuracy:.2%}"
    if tested is not None:
        text += f"; best {best[1]:.2%} at step {best[0]}, on test {tested['test_accuracy']:.2%}"
    log.record(
        text,
        step=step,
        examples=examples,
        val_loss=found.loss,
        val_accuracy=found.accuracy,
        val_examples=found.n_examples,
        best_step=best[0],
        best_val_accuracy=best[1],
        gpu_hours=gpu_hours,
        **(tested or {}),
    )


def write_logits(path: Path, logits: Tensor) -> None:
    """Keep the logits of a split, (n, n_classes) float32, for whoever asks which were right."""
    file = io.BytesIO()
    np.save(file, logits.numpy())
    write_atomically(path, file.getvalue())


def memory_gib(device: torch.device) -> float | None:
    """Most memory that this GPU's tensors took so far, GiB."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


if __name__ == "__main__":
    help_if_asked(__doc__)
    with errors_as_sentences():
        main(sys.argv[1:])
