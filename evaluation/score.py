"""From the weights of runs to losses, added up in the ways that a plan asks for.

RUN/scores/CORPUS/SCORING.npz keeps the losses of single tokens.
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
from evaluation.plan import Plan
from evaluation.runs import Run, describe, labels, open_run
from evaluation.scoring_bar import ScoringBar
from evaluation.sums import DAMAGED, Scored, Sums, Text, add_up, describe_corpus, sha256_of
from evaluation.windows import Scoring, ScoringWindows
from model.config import ModelConfig
from model.flops import forward_flops_per_token
from training.checkpoint.choice import chosen_checkpoint
from training.distributed import Processes
from training.language.config import TrainConfig
from training.numerics import autocast
from training.parallel import key_caches_by_source

COMPILE_FROM = {"cuda": 1e16, "cpu": 1e14}
"""FLOPs for windows of one shape from which compiling pays, by device. By times on an H200: half a
minute for them, 10 s to compile, 4 from a warm cache, then a third less. A CPU's is a guess."""


@torch.no_grad()
def token_losses(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None, Tensor]],
    n_tokens: int,
    processes: Processes,
    context: Callable[[], AbstractContextManager],
) -> np.ndarray:
    """(n_tokens,) float32 losses by position in the stream, NaN where nothing was scored.

    All processes get the losses of all; each has a share of the batches (`ScoringBatch`), of equal
    number. The model is called as model(tokens, targets, doc_start=doc_start, reduction="none"), in
    the mode that it is in and in `context`.

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
        where = positions.to(device).flatten()
        losses[where] = loss[: len(positions)].flatten().float()
        scored.index_add_(0, where, torch.ones_like(where, dtype=scored.dtype))
    processes.sum(losses)
    processes.sum(scored)
    assert int(scored.max()) <= 1, "a position was scored twice"
    n_broken = int((~losses.isfinite()).sum())
    if n_broken:
        raise FloatingPointError(
            f"the losses of {n_broken:,} of {int(scored.sum()):,} tokens are not finite: the model "
            "is broken. Choose another checkpoint with --checkpoint"
        )
    return torch.where(scored == 1, losses, torch.nan).cpu().numpy()


def read_losses(
    run: Run, stream: TokenStream, scoring: Scoring, *, eager: bool = False
) -> np.ndarray | None:
    """Losses that `write_losses` kept, or None if they are of another checkpoint, or not there.

    `eager`: of a run with run.compile whose model was not compiled to score it, and rounded so.

    Raises:
        ValueError: the file is damaged.
    """
    path, origin = _kept(run, stream, scoring, eager)
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
            f"{path} is damaged ({error}): copy it again, or remove it to score again"
        ) from error


def write_losses(
    run: Run, stream: TokenStream, scoring: Scoring, losses: np.ndarray, *, eager: bool = False
) -> None:
    """Keep (n_tokens,) float32 losses, whole or not at all."""
    path, origin = _kept(run, stream, scoring, eager)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, losses=losses, origin=np.array(origin))
    write_atomically(path, buffer.getvalue())


def _kept(run: Run, stream: TokenStream, scoring: Scoring, eager: bool) -> tuple[Path, str]:
    """The file of losses, and all that they depend on beside the scoring."""
    defaults = asdict(ModelConfig())  # which old runs have for a field that is new
    model = asdict(run.config.model).items()
    origin = {
        # not just the step: a run that was trained anew took another time
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
    ready: Callable[[int, int, bool], nn.Module],
    processes: Processes,
    bar: ScoringBar,
    *,
    eager: bool,
) -> np.ndarray:
    """(n_tokens,) losses of a run on every process, from its folder where they are known.

    All processes take a share, each of them `batch_tokens` at once; `ready` gives the model for a
    history, a stride and whether documents are masked; `bar` moves on.
    """
    known = processes.agree(
        read_losses(run, stream, scoring, eager=eager) if processes.is_main else None
    )
    work = _work(stream, scoring)
    if known is not None:
        bar.known(work)
        return known
    batch_size = max(1, batch_tokens // scoring.history)
    share = {"rank": processes.rank, "world_size": processes.world_size}
    windows = ScoringWindows(stream, scoring, batch_size, **share)
    model = ready(scoring.history, scoring.stride, scoring.document_mask)
    context = partial(autocast, run.config.run.dtype, processes.device)
    batches = bar.over(windows, len(windows), f"{run.folder.name}, {scoring}", work)
    losses = token_losses(model, batches, len(stream), processes, context)
    if processes.is_main:
        write_losses(run, stream, scoring, losses, eager=eager)
    return losses


def _work(stream: TokenStream, scoring: Scoring) -> int:
    """Tokens that a model reads."""
    return scoring.n_windows(len(stream)) * scoring.history


def _ready(run: Run, device: torch.device, eager: bool, history: int, *_: int) -> nn.Module:
    """The model for windows of one shape, compiled if the run was and not `eager`."""
    model = run.model.to(device)
    model.prepare_mask(history)
    if eager or not run.config.run.compile:
        return model
    torch.compiler.reset()  # code for other shapes counts towards a limit
    key_caches_by_source()
    return torch.compile(model, fullgraph=True, dynamic=False)  # pyright: ignore


def compiling_pays(
    configs: Sequence[TrainConfig],
    wanted: Sequence[Sequence[Scoring]],
    n_tokens: int,
    device: torch.device,
) -> bool:
    """Whether scoring takes so long that compiling models for each shape of windows is sooner.

    It is decided for all runs with run.compile together: compiled code rounds otherwise, and a
    difference between models should not depend on their size.

    Args:
        configs: runs that are scored.
        wanted: scorings of each.
        n_tokens: of all texts.
        device: that computes.
    """
    flops, n_shapes = 0.0, 0
    for config, scorings in zip(configs, wanted, strict=True):
        if not config.run.compile:
            continue
        work = sum(s.n_windows(n_tokens) * s.history for s in scorings)
        flops += work * forward_flops_per_token(config.model, causal=True)
        n_shapes += len({(s.history, s.stride, s.document_mask) for s in scorings})
    return flops > n_shapes * COMPILE_FROM[device.type]


def validation_splits(corpora: Sequence[Path]) -> list[TokenStream]:
    """The validation split of each folder of token shards.

    Raises:
        ValueError: two folders have the same name, by which losses and reports are kept.
    """
    for path, other in combinations(corpora, 2):
        if (name := path.resolve().name) == other.resolve().name:
            raise ValueError(
                f"{path} and {other} are both called {name}, by which losses and reports are kept: "
                "rename one of the folders, or score them one after the other with another --out"
            )
    streams = [TokenStream(path, "val") for path in corpora]
    for stream in streams:
        stream.verify()
    return streams


def check_tokenizer(run: Run, stream: TokenStream) -> None:
    """Refuse text that was made with another tokenizer than the run was trained with."""
    there = stream.manifest.tokenizer.sha256
    if there != run.tokenizer.sha256:
        raise ValueError(
            f"{stream.path} was made with a tokenizer of sha256={there}, and {run.folder} was "
            f"trained with {run.tokenizer.sha256}: prepare the text with {run.folder}'s "
            "tokenizer.json (--tokenizer)"
        )


def evaluate_runs(
    folders: Sequence[Path],
    plan: Plan,
    processes: Processes,
    corpora: Sequence[Path],
    batch_tokens: int | None,
    checkpoint: str | None = None,
) -> list[tuple[list[Scored], Text]]:
    """Score all runs on the validation splits of `corpora`, or of the first run's text.

    A GPU reads `batch_tokens` at once, None as many as in training. `checkpoint` is of each run, as
    `chosen_checkpoint` takes it.

    Returns:
        For each corpus, what each run was scored, and on which text.

    Raises:
        ValueError: a text is too short, or was made with another tokenizer than a run; runs of
            the same name are no seeds of one model; corpora have the same name; no run can be
            scored by one of `plan.modes`; or windows that slide share no token.
    """
    # one that is still trained may get another newest checkpoint at any moment
    chosen = processes.main_does(
        lambda: [chosen_checkpoint(folder, checkpoint) for folder in folders]
    )
    runs = [open_run(*of_run) for of_run in zip(folders, chosen, strict=True)]
    names = labels(runs)
    contexts = [run.config.model.context_length for run in runs]
    plan.check_lengths(contexts)
    streams = validation_splits(corpora or [Path(runs[0].config.data.path)])
    for run in runs:
        for stream in streams:
            check_tokenizer(run, stream)
    for mode, why in plan.left_out([run.config for run in runs]).items():
        if plan.modes is not None:
            raise ValueError(f"--modes {mode} gives nothing to score: {why}")
        if processes.is_main:
            print(f"nothing is scored by {mode}: {why}")
    wanted = [plan.scorings_of(run.config, contexts) for run in runs]
    token_bytes = runs[0].tokenizer.token_bytes()
    compared = plan.compared(contexts)
    described = [describe_corpus(stream, token_bytes, compared) for stream in streams]
    scored: list[list[Scored]] = [[] for _ in streams]
    work = sum(
        _work(stream, scoring) for of_run in wanted for scoring in of_run for stream in streams
    )
    n_tokens = sum(map(len, streams))
    compiles = compiling_pays([run.config for run in runs], wanted, n_tokens, processes.device)
    with ScoringBar(work, is_main=processes.is_main) as bar:
        for name, opened, scorings in zip(names, runs, wanted, strict=True):
            # a copy, so that the model goes with it, and not of a checkpoint that came meanwhile
            run, config = replace(opened), opened.config
            at_once = batch_tokens or config.optim.micro_batch_size * config.model.context_length
            eager = config.run.compile and not compiles
            ready = lru_cache(maxsize=1)(partial(_ready, run, processes.device, eager))
            sums: list[dict[Scoring, Sums]] = [{} for _ in described]
            for scoring in scorings:  # those of one shape are next to each other
                for corpus, of_corpus in zip(described, sums, strict=True):
                    losses = losses_of(
                        run, corpus.stream, scoring, at_once, ready, processes, bar, eager=eager
                    )
                    of_corpus[scoring] = add_up(losses, scoring, corpus)
            about = {"label": name, "number": run.seed_number, "about": describe(run)}
            for of_corpus, of_run in zip(scored, sums, strict=True):
                of_corpus.append(Scored(config=config, sums=of_run, **about))
    return [(runs, corpus.text) for runs, corpus in zip(scored, described, strict=True)]
