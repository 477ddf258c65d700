"""Training task of a GPT: micro-batches, the loss and the validation set."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.files import write_atomically
from data.sampler import first_sample
from data.text.batches import IGNORE, Batch, ValidationBatches
from data.text.mixture import ROUND
from data.text.shards import TOKENIZER
from data.verified import BackgroundTask
from model.flops import mfu
from model.gpt import GPT
from training.distributed import Processes
from training.epochs import kept_tokens, passes
from training.language import start
from training.language.config import TrainConfig
from training.language.stages import tokens_before
from training.metrics import Record, loss_text
from training.numerics import autocast
from training.parallel import can_capture, set_up_context_parallel, shard_model, weights_are_static
from training.step import LossOf
from training.stop import Stop


class LanguageTask:
    """`Task` of a GPT; see there for the methods without a docstring."""

    value_names = ("loss",)
    unit = "tokens"

    def __init__(self, config: TrainConfig, processes: Processes) -> None:
        """Open the data, and initialize the model from torch's generator.

        Raises:
            ValueError, FileNotFoundError: the data are missing, or do not fit the model.
        """
        self._config, self._processes = config, processes
        self._stages = config.stages
        self.n_shapes = len(config.model.contexts)
        self._streams = start.open_corpora(config, "train")
        self._stream = next(iter(self._streams.values()))
        start.check_vocabulary(config, self._stream)
        self._corpora = [start.cut_corpora(config, stage, self._streams) for stage in self._stages]
        self._batches = [
            start.make_batches(config, stage, corpora)
            for stage, corpora in zip(self._stages, self._corpora, strict=True)
        ]
        validation = start.open_corpora(config, "val")
        self._validation = {
            name: ValidationBatches(
                stream,
                config.model.context_length,
                config.optim.micro_batch_size,
                rank=processes.data_rank,
                world_size=processes.n_data,
                document_mask=config.data.document_mask,
            )
            for name, stream in validation.items()
        }
        streams = [*validation.values(), *self._streams.values()]
        streams = streams if processes.is_local_main else []  # one process per machine verifies
        # In the background, as a terabyte takes minutes to read.
        self._verification = BackgroundTask(lambda: [stream.verify() for stream in streams])
        self.model = GPT(config.model)
        self._context = set_up_context_parallel(self.model, processes)
        shard_model(self.model, config, processes)
        self.can_capture = can_capture(config.run, processes)
        self.must_match = start.must_match(config, self._streams)
        self._activations = partial(
            autocast, config.run.dtype, processes.device, cache_casts=weights_are_static(self.model)
        )

    def load_initial_weights(self, run: Path) -> tuple[str, int | None]:
        choice = self._config.run.init_checkpoint
        return start.load_initial_weights(run, self.model, self._stream, self._processes, choice)

    def open(self, run: Path, first_step: int) -> None:
        if self._processes.is_main:
            # A run may outlive its data, and sampling from it needs the tokenizer.
            write_atomically(run / TOKENIZER, (self._stream.path / TOKENIZER).read_bytes())

    def describe(self) -> str:
        config, processes = self._config, self._processes
        contexts = " to ".join(f"{context:,}" for context in config.model.contexts)
        return "\n".join(
            [
                f"{self.model.n_params() / 1e6:.1f}M parameters, context {contexts}, "
                f"attention {config.model.attention} on {processes}",
                *config.batch_lines(processes.world_size, "process"),
                *map(self._describe_corpus, range(len(self._streams))),
                f"output directory: {config.run.out_dir}",
            ]
        )

    def _describe_corpus(self, number: int) -> str:
        """Epochs of a corpus in this run, and the share of it that its samples leave out."""
        optim, name = self._config.optim, [*self._streams][number]
        share, label = 1.0, ""
        if self._config.data.mix:
            share = start.mixture(self._config).quotas[number] / ROUND
            label = f" of {name} ({share:.1%})"
        parts = [corpora[number] for corpora in self._corpora]
        kept = kept_tokens(self._config, str(parts[0].stream.path))
        epochs = share * passes(self._config, kept)
        line = (
            f"{optim.max_steps:,} steps over {len(parts[0].stream):,} tokens{label}: "
            f"{epochs:.2f} epochs"
        )
        if self._config.data.align == "document":
            cuts = dict.fromkeys(  # stages may differ in the batch alone
                f"{part.cut_share:.1%} at a context of {part.context_length:,}" for part in parts
            )
            line += f"; data.align=document cuts {', '.join(cuts)}"
        return line

    def samples(self, step: int) -> int:
        return sum(
            stage.steps_before(step) * stage.batch_tokens // stage.context_length
            for stage in self._stages
        )

    def count(self, step: int) -> int:
        return tokens_before(self._stages, step)

    def tokens(self, step: int) -> int:
        return self.count(step)

    def stage(self, step: int) -> int:
        return sum(stage.last_step <= step for stage in self._stages[:-1])

    def loss(self, stage: int) -> LossOf:
        return partial(language_loss, self._activations)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Tokens, targets and, with a document mask, doc_start: (M, B, T) each, M micro-batches."""
        number = self.stage(step)
        stage, source = self._stages[number], self._batches[number]
        size = stage.micro_batch_size
        n_micro = self._config.grad_accum_steps(self._processes.world_size, stage.batch_tokens)
        batches = [
            source.batch(
                first_sample(
                    start=self.count(step) // stage.context_length,
                    micro_step=micro_step,
                    rank=self._processes.data_rank,
                    grad_accum_steps=n_micro,
                    world_size=self._processes.n_data,
                    micro_batch_size=size,
                ),
                size,
            )
            for micro_step in range(n_micro)
        ]
        parts = [torch.stack(part) for part in zip(*batches, strict=True) if part[0] is not None]
        return tuple(self._context.shard(part, dim=2) for part in parts)

    def _own_tokens(self, batch: Batch) -> Batch:
        """This process's chunks of a batch of whole sequences."""
        tokens, targets, doc_start = batch
        if doc_start is not None:
            doc_start = self._context.shard(doc_start, 1)
        return Batch(self._context.shard(tokens, 1), self._context.shard(targets, 1), doc_start)

    def check_data(self, *, wait: bool) -> None:
        if wait:
            self._verification.wait()
        else:
            self._verification.raise_if_failed()

    def speed(self, step: int, means: dict[str, float | None], per_s: float | None) -> Record:
        """Record of the loss, tokens per second of the whole run, MFU, and memory of this GPU."""
        stage = self._stages[self.stage(step - 1)]
        model = self._config.model.at_context(stage.context_length)
        text, utilisation = loss_text(means["loss"]), None
        if per_s is None:
            text += (
                "  (the first step of a stage is not timed)"
                if len(self._stages) > 1
                else ("  (the first step is not timed)")
            )
        else:
            text += f"  {per_s:,.0f} tokens/s"
        memory_gib = self._processes.memory_gib()
        if memory_gib is not None:
            if per_s is not None:
                name = torch.cuda.get_device_name(self._processes.device)
                utilisation = mfu(per_s / self._processes.world_size, model, name)
                if utilisation is None:
                    text += "  unknown GPU: MFU not reported"
                else:
                    text += f"  MFU {utilisation.causal:.1%} causal, {utilisation.full:.1%} full"
            text += f"  {memory_gib:.1f} GiB"
        values = {
            "tokens_per_s": per_s,
            "mfu_causal": utilisation.causal if utilisation else None,
            "mfu_full": utilisation.full if utilisation else None,
            "memory_gib": memory_gib,
        }
        if self.n_shapes > 1:
            text += f"  context {stage.context_length:,}"
            values["context_length"] = stage.context_length
        if self._config.optim.batch_schedule:
            text += f"  batch {stage.batch_tokens:,}"
            values["batch_tokens"] = stage.batch_tokens
        return Record(text, values)

    def validate(self, model: nn.Module, step: int, stop: Stop) -> Record:
        results = {
            name: evaluate(
                model,
                map(self._own_tokens, stop.between(batches)),
                self._processes,
                self._activations,
            )
            for name, batches in self._validation.items()
        }
        (loss, n_tokens), *_ = results.values()
        perplexity = math.exp(loss) if loss < 709 else None  # exp(710) overflows
        text = "too large" if perplexity is None else f"{perplexity:.2f}"
        others = [*results.items()][1:]  # corpora of data.mix
        return Record(
            f"val loss {loss:.4f}  perplexity {text}  ({n_tokens:,} tokens)"
            + "".join(f"  {name} {other_loss:.4f}" for name, (other_loss, _) in others),
            {"val_loss": loss, "val_perplexity": perplexity, "val_tokens": n_tokens}
            | {f"val_loss_{name}": other_loss for name, (other_loss, _) in others},
        )

    def finish(self, model: nn.Module, validated: Record, stop: Stop) -> Record:
        return validated


def language_loss(
    activations: Callable[[], AbstractContextManager],
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    doc_start: Tensor | None = None,
) -> tuple[Tensor]:
    """Mean loss over the tokens of a micro-batch, nats.

    Args:
        activations: creates the context of the forward pass.
        model: called as model(tokens, targets, doc_start=doc_start).
        tokens, targets: (B, T) int64.
        doc_start: (B, T) int32, or None.
    """
    with activations():
        return (model(tokens, targets, doc_start=doc_start),)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    processes: Processes,
    activations: Callable[[], AbstractContextManager],
) -> tuple[float, int]:
    """Mean negative log-likelihood per token over the batches of all processes.

    Losses are summed in fp32 within a batch and in fp64 over batches. Except for rounding within
    batches, the result does not depend on the number of processes.

    Args:
        model: called as model(tokens, targets, doc_start=doc_start, reduction="sum").
        batches: batches of this process, (tokens, targets, doc_start or None), each (B, T), on the
            CPU; the same number on every process. Targets equal to IGNORE are not scored.
        processes: all processes that evaluate together.
        activations: creates the context of the forward pass.

    Returns:
        The mean, nats, and the number of scored tokens.
    """
    training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=processes.device)
    for batch in batches:
        tokens, targets, doc_start = to_device(batch, processes.device)
        with activations():
            loss = model(tokens, targets, doc_start=doc_start, reduction="sum")
        total += torch.stack([loss.double(), (targets != IGNORE).sum().double()])
    model.train(training)
    loss_sum, n_tokens = processes.sum(total).tolist()
    return loss_sum / n_tokens, int(n_tokens)


def to_device(batch: Iterable[Tensor | None], device: torch.device) -> Iterable[Any]:
    """Move a batch to `device`; the copies overlap with earlier work of the GPU."""
    if device.type == "cpu":
        return batch
    return [x if x is None else x.pin_memory().to(device, non_blocking=True) for x in batch]
