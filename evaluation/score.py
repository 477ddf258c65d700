"""Score a run: compute the token losses of a scoring, or read those computed before.

They are cached in RUN/scores/CORPUS/SCORING.npz.
"""

import io
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.arrays import load_npz
from data.files import write_atomically
from data.text.shards import TokenStream
from evaluation.runs import Run
from evaluation.scoring_bar import ScoringBar
from evaluation.sums import DAMAGED, sha256_of
from evaluation.windows import Scoring, ScoringWindows
from model.config import ModelConfig
from model.flops import forward_flops_per_token
from training.distributed import Processes
from training.language.config import TrainConfig
from training.numerics import autocast
from training.parallel import key_caches_by_source

COMPILE_FROM = {"cuda": 1e16, "cpu": 1e14}
"""FLOPs per window shape above which compiling is worthwhile, by device. Measured on an H200: they
take half a minute, and compiling takes 10 s (4 s from a warm cache) and saves a third of the time.
The value for CPUs is a guess."""


@torch.no_grad()
def token_losses(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None, Tensor]],
    n_tokens: int,
    processes: Processes,
    context: Callable[[], AbstractContextManager],
) -> np.ndarray:
    """(n_tokens,) float32 losses by position in the stream, NaN for tokens that are not scored.

    Every process passes its shard of the batches (`ScoringBatch`) and gets the losses of all.
    All processes must pass the same number of batches. The model is called in `context`, in its
    current mode, as model(tokens, targets, doc_start=doc_start, reduction="none").

    Raises:
        FloatingPointError: a loss is not finite.
        AssertionError: a position was scored twice.
    """
    device = processes.device
    losses = torch.zeros(n_tokens, dtype=torch.float32, device=device)
    scored = torch.zeros(n_tokens, dtype=torch.int32, device=device)
    for *inputs, positions in batches:
        tokens, targets, doc_start = (
            None if part is None else part.to(device, non_blocking=True) for part in inputs
        )
        with context():
            loss = model(tokens, targets, doc_start=doc_start, reduction="none")
        index = positions.to(device).flatten()
        losses[index] = loss[: len(positions)].flatten().float()
        scored.index_add_(0, index, torch.ones_like(index, dtype=scored.dtype))
    processes.sum(losses)
    processes.sum(scored)
    assert int(scored.max()) <= 1, "a position was scored twice"
    n_invalid = int((~losses.isfinite()).sum())
    if n_invalid:
        raise FloatingPointError(
            f"the losses of {n_invalid:,} of {int(scored.sum()):,} tokens are not finite, so the "
            "model is broken. Try another checkpoint with --checkpoint"
        )
    return torch.where(scored == 1, losses, torch.nan).cpu().numpy()


def read_losses(
    run: Run, stream: TokenStream, scoring: Scoring, *, eager: bool = False
) -> np.ndarray | None:
    """Read losses cached by `write_losses`. None if missing or from another checkpoint.

    `eager`: the run has run.compile but was scored without compiling, which rounds differently.

    Raises:
        ValueError: the file is damaged.
    """
    path, origin = _cache_entry(run, stream, scoring, eager)
    if not path.exists():
        return None
    try:
        saved = load_npz(path)
        if str(saved["origin"]) != origin:
            return None
        losses = saved["losses"]
        if losses.shape != (len(stream),):
            raise ValueError(f"losses of {losses.shape} instead of {len(stream)} tokens")
        return losses
    except DAMAGED as error:
        raise ValueError(
            f"{path} is damaged ({error}): copy it again, or delete it to score again"
        ) from error


def write_losses(
    run: Run, stream: TokenStream, scoring: Scoring, losses: np.ndarray, *, eager: bool = False
) -> None:
    """Cache (n_tokens,) float32 losses. The file is written atomically."""
    path, origin = _cache_entry(run, stream, scoring, eager)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, losses=losses, origin=np.array(origin))
    write_atomically(path, buffer.getvalue())


def _cache_entry(run: Run, stream: TokenStream, scoring: Scoring, eager: bool) -> tuple[Path, str]:
    """File of cached losses, and a key of everything except the scoring that they depend on."""
    defaults = asdict(ModelConfig())  # values of new fields in old runs
    model = asdict(run.config.model).items()
    origin = {
        # not only the step: the training time distinguishes a run that was trained again
        "progress": asdict(run.progress),
        "model": {name: value for name, value in model if value != defaults[name]},
        "dtype": run.config.run.dtype,
        "text": sha256_of(stream),
    } | ({"eager": True} if eager else {})
    folder = run.folder / "scores" / stream.path.resolve().name
    return folder / f"{scoring.name}.npz", json.dumps(origin)


def losses_of(
    run: Run,
    stream: TokenStream,
    scoring: Scoring,
    batch_tokens: int,
    prepare: Callable[[int, int, bool], nn.Module],
    processes: Processes,
    bar: ScoringBar,
    *,
    eager: bool,
) -> np.ndarray:
    """(n_tokens,) losses of a run on every process, read from the run's folder if cached.

    Each process scores a shard in batches of `batch_tokens`. `prepare` returns the model for a
    history, a stride and a document mask. `bar` shows the progress.
    """
    cached = processes.agree(
        read_losses(run, stream, scoring, eager=eager) if processes.is_main else None
    )
    work = work_of(stream, scoring)
    if cached is not None:
        bar.skip(work)
        return cached
    batch_size = max(1, batch_tokens // scoring.history)
    shard = {"rank": processes.rank, "world_size": processes.world_size}
    windows = ScoringWindows(stream, scoring, batch_size, **shard)
    model = prepare(scoring.history, scoring.stride, scoring.document_mask)
    context = partial(autocast, run.config.run.dtype, processes.device)
    batches = bar.track(windows, len(windows), f"{run.folder.name}, {scoring}", work)
    losses = token_losses(model, batches, len(stream), processes, context)
    if processes.is_main:
        write_losses(run, stream, scoring, losses, eager=eager)
    return losses


def scorer(
    run: Run,
    batch_tokens: int | None,
    processes: Processes,
    bar: ScoringBar,
    *,
    compiles: bool,
) -> Callable[[TokenStream, Scoring], np.ndarray]:
    """Function that returns the (n_tokens,) losses of a run on a stream, on every process.

    Args:
        run: the run.
        batch_tokens: tokens per GPU and batch. None means as in training.
        processes: all processes, each of which scores a shard.
        bar: shows the progress.
        compiles: whether to compile the model if the run was compiled.
    """
    # the copy, which has the same checkpoint, frees its cached model with the returned function
    run, config = replace(run), run.config
    batch_tokens = batch_tokens or config.optim.micro_batch_size * config.model.context_length
    eager = config.run.compile and not compiles
    prepare = lru_cache(maxsize=1)(partial(_prepare, run, processes.device, eager))

    def losses(stream: TokenStream, scoring: Scoring) -> np.ndarray:
        return losses_of(run, stream, scoring, batch_tokens, prepare, processes, bar, eager=eager)

    return losses


def work_of(stream: TokenStream, scoring: Scoring) -> int:
    """Number of tokens that a model reads for a scoring."""
    return scoring.n_windows(len(stream)) * scoring.history


def _prepare(run: Run, device: torch.device, eager: bool, history: int, *_: int) -> nn.Module:
    """Prepare the model for windows of one shape; compile it if the run was, unless `eager`."""
    model = run.model.to(device)
    model.prepare_mask(history)
    if eager or not run.config.run.compile:
        return model
    torch.compiler.reset()  # compiled code for other shapes counts towards the recompile limit
    key_caches_by_source()
    return torch.compile(model, fullgraph=True, dynamic=False)  # pyright: ignore


def compiling_pays(
    configs: Sequence[TrainConfig],
    scorings_by_run: Sequence[Sequence[Scoring]],
    n_tokens: int,
    device: torch.device,
) -> bool:
    """Whether compiling the models for each window shape makes scoring faster overall.

    Decided for all runs with run.compile together. Compiled code rounds differently, and that must
    not affect the difference between models of different sizes.

    Args:
        configs: configurations of the runs to score.
        scorings_by_run: scorings of each run.
        n_tokens: total number of tokens in all texts.
        device: device that computes the losses.
    """
    flops, n_shapes = 0.0, 0
    for config, scorings in zip(configs, scorings_by_run, strict=True):
        if not config.run.compile:
            continue
        work = sum(s.n_windows(n_tokens) * s.history for s in scorings)
        flops += work * forward_flops_per_token(config.model, causal=True)
        n_shapes += len({(s.history, s.stride, s.document_mask) for s in scorings})
    return flops > n_shapes * COMPILE_FROM[device.type]


def validation_splits(corpora: Sequence[Path]) -> list[TokenStream]:
    """Open the validation split of each folder of token shards.

    Raises:
        ValueError: two folders have the same name, which identifies their losses and reports.
    """
    for path, other in combinations(corpora, 2):
        if (name := path.resolve().name) == other.resolve().name:
            raise ValueError(
                f"{path} and {other} are both called {name}, but losses and reports are stored by "
                "that name. Rename one of the folders, or score them separately with another --out"
            )
    streams = [TokenStream(path, "val") for path in corpora]
    for stream in streams:
        stream.verify()
    return streams


def check_tokenizer(run: Run, stream: TokenStream) -> None:
    """Raise ValueError if the text was prepared with another tokenizer than the run's."""
    text_sha256 = stream.manifest.tokenizer.sha256
    if text_sha256 != run.tokenizer.sha256:
        raise ValueError(
            f"{stream.path} was prepared with a tokenizer of sha256={text_sha256}, but "
            f"{run.folder} was trained with {run.tokenizer.sha256}. Prepare the text with "
            f"--tokenizer {run.folder}/tokenizer.json"
        )
