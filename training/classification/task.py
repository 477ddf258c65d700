"""A classifier that learns examples: its curriculum, the loss, and the best weights."""

import io
import math
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.files import write_atomically
from data.lra.batches import Batch, Examples, load_examples
from data.lra.curriculum import Curriculum
from training.checkpoint.contents import check_same_tensors
from training.classification import start
from training.classification.config import ClassifyConfig
from training.classification.objectives import answer_loss, make_ask
from training.classification.scoring import (
    BEST,
    TEST_LOGITS,
    Score,
    best_so_far,
    read_best,
    save_best,
    score,
)
from training.distributed import Processes
from training.metrics import Record, loss_text
from training.numerics import autocast
from training.parallel import can_capture
from training.step import LossOf
from training.stop import Stop


class ClassificationTask:
    """The `Task` of a classifier, whose docstrings hold here."""

    value_names = ("loss", "accuracy")
    unit = "examples"

    def __init__(self, config: ClassifyConfig, processes: Processes) -> None:
        """Load the data, all of it onto the device, and draw the weights from torch's generator.

        Raises:
            ValueError, FileNotFoundError: there are no such data, or they do not fit the model.
        """
        self._started = time.perf_counter()
        self._config, self._processes = config, processes
        device, context = processes.device, config.model.context_length
        start.check_data(config)
        self._curriculum = Curriculum(
            config.data,
            context,
            config.optim.batch_size,
            seed=config.run.seed,
            rank=processes.rank,
            world_size=processes.world_size,
            device=device,
        )
        self._validation, self._test = (
            load_examples(Path(config.data.path), split, context, config.data, device)
            for split in ("val", "test")
        )
        self.model = start.make_model(config).to(device)
        self._ask = make_ask(config.objective, config.hidden_share)
        # with others, each lesson would take its first dozen steps without
        self.can_capture = can_capture(config.run, processes) and processes.world_size == 1
        self.must_match = start.must_match(config)
        # those of each phase, of the task itself and of scoring
        self.n_shapes = len(config.data.phases) + 2
        self._activations = partial(autocast, config.run.dtype, device)
        self._best: tuple[int, float] | None = None

    def take_weights(self, run: Path) -> tuple[str, int | None]:
        return start.load_first_weights(run, self.model, self._config.run.init_checkpoint)

    def open(self, run: Path, first_step: int) -> None:
        self._run, self._is_whole = run, first_step == 0
        if first_step == 0 and self._processes.is_main:
            # of a start that left no checkpoint, and may have had other settings
            (run / BEST).unlink(missing_ok=True)
        best = best_so_far(run)
        if best is not None and best[0] <= first_step:  # else of steps that come again
            self._best = best

    def describe(self) -> str:
        config = self._config
        return (
            f"{self.model.n_params() / 1e6:.2f}M parameters, objective {config.objective}, "
            f"{config.model.context_length:,} tokens, "
            f"attention {config.model.attention} ({config.model.mask.pattern}) on "
            f"{self._processes}\n"
            f"{config.optim.max_steps:,} steps, {self.samples(config.optim.max_steps):,} examples, "
            f"in the end {config.optim.batch_size:,} a step from the "
            f"{len(self._curriculum.task):,} of {config.data.path}\n"
            f"output directory: {config.run.out_dir}"
        )

    def samples(self, step: int) -> int:
        return self._curriculum.examples_before(step)

    def count(self, step: int) -> int:
        return self.samples(step)

    def stage(self, step: int) -> int:
        return self._curriculum.number(step)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Numbers of examples and changes to them, one micro-batch of each."""
        numbers, changes = self._curriculum.draw(step)
        return numbers[None], changes[None]

    def loss(self, stage: int) -> LossOf:
        lesson = self._curriculum.lessons[stage]

        def loss_of(model: nn.Module, numbers: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
            batch = lesson.batch(numbers, changes)
            return answer_loss(self._ask, self._activations, self._processes, model, batch)

        return loss_of

    def check_data(self, *, wait: bool) -> None:
        self._curriculum.check()

    def speed(self, step: int, means: dict[str, float | None], per_s: float | None) -> Record:
        text, accuracy = loss_text(means["loss"]), means["accuracy"]
        text += "" if accuracy is None else f"  accuracy {accuracy:.1%}"
        text += f"  {per_s:,.0f} examples/s" if per_s else ""
        values = {
            "examples_per_s": per_s,
            "lesson": self.stage(step - 1),
            "memory_gib": self._processes.memory_gib(),
        }
        return Record(text, values)

    def validate(self, model: nn.Module, step: int, stop: Stop) -> Record:
        """Score the validation split, and keep the weights that do best on it.

        A loss that is not finite is left to the caller; such weights are not the best.
        """
        found = self._score(model, self._validation, stop, self._config.data.val_examples)
        if not math.isfinite(found.loss):
            return Record(f"val loss {found.loss}", {"val_loss": found.loss})
        if self._best is None or found.accuracy > self._best[1]:
            self._best = step, found.accuracy
            if self._processes.is_main:
                save_best(self._run, self.model, *self._best)
        return Record(
            f"val loss {found.loss:.4f}  accuracy {found.accuracy:.2%}",
            {
                "val_loss": found.loss,
                "val_accuracy": found.accuracy,
                "val_examples": found.n_examples,
                "best_step": self._best[0],
                "best_val_accuracy": self._best[1],
            },
        )

    def finish(self, model: nn.Module, validated: Record, stop: Stop) -> Record:
        """Score the best weights on the test split, and keep the logits of labels."""
        assert self._best is not None
        self._processes.barrier()  # until the best weights are written
        weights = read_best(self._run)
        check_same_tensors(BEST, weights, self.model.state_dict())
        self.model.load_state_dict(weights)
        found = self._score(model, self._test, stop)
        if not math.isfinite(found.loss):
            raise FloatingPointError(
                f"the test loss of the weights of step {self._best[0]}, which are best on the "
                f"validation split, is {found.loss}: lower optim.lr or raise optim.warmup_steps"
            )
        if self._processes.is_main and found.logits is not None:
            file = io.BytesIO()
            np.save(file, found.logits.numpy())
            write_atomically(self._run / TEST_LOGITS, file.getvalue())
        values = {
            "test_loss": found.loss,
            "test_accuracy": found.accuracy,
            "test_examples": found.n_examples,
        }
        if self._is_whole:  # else a part of it is not known
            values["wall_s"] = time.perf_counter() - self._started
        step, accuracy = self._best
        text = f"; best {accuracy:.2%} at step {step}, on test {found.accuracy:.2%}"
        return Record(validated.text + text, validated.values | values)

    def _score(
        self, model: nn.Module, examples: Examples, stop: Stop, limit: int | None = None
    ) -> Score:
        """How well the model answers on a split, or on its first `limit` examples.

        Raises:
            ValueError: an image has more pixels than the model has room for.
        """
        config, processes = self._config, self._processes

        def batch(numbers: Tensor) -> Batch:  # no image turned or mirrored
            return examples.batch(numbers, torch.zeros_like(numbers))

        found = score(
            model,
            batch,
            len(examples.labels[:limit]),
            config.optim.eval_batch_size or config.optim.batch_size // processes.world_size,
            processes,
            self._activations,
            self._ask,
            stop.between,
        )
        if bool(examples.overflow):
            raise ValueError(
                f"an image of {config.data.path} that is scored has more pixels above zero than "
                f"model.context_length={config.model.context_length} has room for: raise it"
            )
        return found
