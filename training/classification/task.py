"""Training task of a classifier: its curriculum, the loss and the best weights."""

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
from training.classification.objectives import make_target_function, target_loss
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
    """`Task` of a classifier; see there for the methods without a docstring."""

    value_names = ("loss", "accuracy")
    unit = "examples"

    def __init__(self, config: ClassifyConfig, processes: Processes) -> None:
        """Load all data onto the device, and initialize the model from torch's generator.

        Raises:
            ValueError, FileNotFoundError: the data are missing, or do not fit the model.
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
        self._targets_of = make_target_function(config.objective, config.hidden_share)
        # With several processes, each stage would need a dozen warmup steps before its capture.
        self.can_capture = can_capture(config.run, processes) and processes.world_size == 1
        self.must_match = start.must_match(config)
        # One shape for each phase, one for the task itself and one for evaluation.
        self.n_shapes = len(config.data.phases) + 2
        self._activations = partial(autocast, config.run.dtype, device)
        self._best: tuple[int, float] | None = None

    def load_initial_weights(self, run: Path) -> tuple[str, int | None]:
        return start.load_initial_weights(run, self.model, self._config.run.init_checkpoint)

    def open(self, run: Path, first_step: int) -> None:
        self._run, self._has_all_steps = run, first_step == 0
        if first_step == 0 and self._processes.is_main:
            # Left by an earlier start without a checkpoint, which may have had other settings.
            (run / BEST).unlink(missing_ok=True)
        best = best_so_far(run)
        # Weights of a later step are ignored: this start will repeat that step.
        if best is not None and best[0] <= first_step:
            self._best = best

    def describe(self) -> str:
        config = self._config
        return (
            f"{self.model.n_params() / 1e6:.2f}M parameters, objective {config.objective}, "
            f"{config.model.context_length:,} tokens, "
            f"attention {config.model.attention} ({config.model.mask.pattern}) on "
            f"{self._processes}\n"
            f"{config.optim.max_steps:,} steps, {self.samples(config.optim.max_steps):,} examples, "
            f"finally {config.optim.batch_size:,} per step from "
            f"{len(self._curriculum.task):,} examples in {config.data.path}\n"
            f"output directory: {config.run.out_dir}"
        )

    def samples(self, step: int) -> int:
        return self._curriculum.examples_before(step)

    def count(self, step: int) -> int:
        return self.samples(step)

    def tokens(self, step: int) -> int:
        return self.samples(step) * self._config.model.context_length

    def stage(self, step: int) -> int:
        return self._curriculum.number(step)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Indices of examples and their augmentations, one micro-batch each."""
        numbers, changes = self._curriculum.draw(step)
        return numbers[None], changes[None]

    def loss(self, stage: int) -> LossOf:
        examples = self._curriculum.stages[stage]

        def loss_of(model: nn.Module, numbers: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
            batch = examples.batch(numbers, changes)
            return target_loss(self._targets_of, self._activations, self._processes, model, batch)

        return loss_of

    def check_data(self, *, wait: bool) -> None:
        self._curriculum.check()

    def speed(self, step: int, means: dict[str, float | None], per_s: float | None) -> Record:
        text, accuracy = loss_text(means["loss"]), means["accuracy"]
        text += "" if accuracy is None else f"  accuracy {accuracy:.1%}"
        text += f"  {per_s:,.0f} examples/s" if per_s else ""
        values = {
            "examples_per_s": per_s,
            "stage": self.stage(step - 1),
            "memory_gib": self._processes.memory_gib(),
        }
        return Record(text, values)

    def validate(self, model: nn.Module, step: int, stop: Stop) -> Record:
        """Evaluate on the validation split, and save the weights if they are the best so far.

        If the loss is not finite, nothing is saved, and the caller handles the error.
        """
        result = self._score(model, self._validation, stop, self._config.data.val_examples)
        if not math.isfinite(result.loss):
            return Record(f"val loss {result.loss}", {"val_loss": result.loss})
        if self._best is None or result.accuracy > self._best[1]:
            self._best = step, result.accuracy
            if self._processes.is_main:
                save_best(self._run, self.model, *self._best)
        return Record(
            f"val loss {result.loss:.4f}  accuracy {result.accuracy:.2%}",
            {
                "val_loss": result.loss,
                "val_accuracy": result.accuracy,
                "val_examples": result.n_examples,
                "best_step": self._best[0],
                "best_val_accuracy": self._best[1],
            },
        )

    def finish(self, model: nn.Module, validated: Record, stop: Stop) -> Record:
        """Evaluate the best weights on the test split, and save the logits of labels."""
        assert self._best is not None
        self._processes.barrier()  # wait until the main process has written the best weights
        weights = read_best(self._run)
        check_same_tensors(BEST, weights, self.model.state_dict())
        self.model.load_state_dict(weights)
        result = self._score(model, self._test, stop)
        if not math.isfinite(result.loss):
            raise FloatingPointError(
                f"test_loss={result.loss} is not finite for the best weights, those of step "
                f"{self._best[0]}. Lower optim.lr or raise optim.warmup_steps"
            )
        if self._processes.is_main and result.logits is not None:
            file = io.BytesIO()
            np.save(file, result.logits.numpy())
            write_atomically(self._run / TEST_LOGITS, file.getvalue())
        values = {
            "test_loss": result.loss,
            "test_accuracy": result.accuracy,
            "test_examples": result.n_examples,
        }
        if self._has_all_steps:  # otherwise the time before this start is unknown
            values["wall_s"] = time.perf_counter() - self._started
        step, accuracy = self._best
        text = f"; best {accuracy:.2%} at step {step}, test accuracy {result.accuracy:.2%}"
        return Record(validated.text + text, validated.values | values)

    def _score(
        self, model: nn.Module, examples: Examples, stop: Stop, limit: int | None = None
    ) -> Score:
        """Evaluate on a split, or on its first `limit` examples.

        Raises:
            ValueError: an image has more pixels than the model's context.
        """
        config, processes = self._config, self._processes

        def batch(numbers: Tensor) -> Batch:  # without augmentation
            return examples.batch(numbers, torch.zeros_like(numbers))

        result = score(
            model,
            batch,
            len(examples.labels[:limit]),
            config.optim.eval_batch_size or config.optim.batch_size // processes.world_size,
            processes,
            self._activations,
            self._targets_of,
            stop.between,
        )
        if bool(examples.overflow):
            raise ValueError(
                f"model.context_length={config.model.context_length} must be at least the number "
                f"of pixels from grey level {config.data.min_level} up in each evaluated image of "
                f"{config.data.path}. Raise it"
            )
        return result
