"""Score runs on the same validation tokens, and say what their context is worth.

    python -m scripts.evaluate out/gpt2_small_1k out/gpt2_small_4k [--data FOLDER [FOLDER ...]]
    torchrun --standalone --nproc_per_node=8 -m scripts.evaluate RUN [RUN ...]

Four ways to score, of one or more passes over the validation split by all processes:

    chunk     as the FlashAttention paper evaluates: windows of the model's context that do not
              overlap. A longer context then also has fewer tokens at the start of a window, and
              part of its lower loss is only that.
    strided   windows that slide, by an eighth of what they read or by --stride. All models and all
              histories score the same tokens, each with at least 7/8 of its history.
    cross     strided with less history than the model was trained on: what does a 4K model make of
              1K? With --histories, any.
    control   the part of the window that is more than --near tokens away is left intact, shuffled,
              or replaced by other text: the loss must rise from the first to the others if that
              part was used. Windows slide by a quarter of the context, or --stride if that is more.

Runs named NAME_seed1, NAME_seed2 ... that were trained alike otherwise count as one model with
several seeds. Differences are to the first model. Written to --out: evaluation.json, report.md,
pictures; for several --data into a folder for each, of its name. What has been scored is kept in
the folder of the run and not scored again. With --sums, what a report needs of each run is written
instead, a small file each, for scripts.reproduce_table4.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn

from configs.command_line import errors_as_sentences
from data.shards import TokenStream
from data.windows import Scoring, ScoringWindows
from scripts.evaluation_cache import read_losses, write_losses
from scripts.evaluation_plan import MODES, SLIDING, Plan
from scripts.evaluation_report import write_report
from scripts.evaluation_sums import (
    Corpus,
    Scored,
    Sums,
    Text,
    add_up,
    describe_corpus,
    write_scored,
)
from scripts.evaluation_tables import tabulate
from scripts.runs import Run, describe, labels, open_run
from training.checkpoint import latest_checkpoint
from training.distributed import Processes, start_processes
from training.numerics import autocast
from training.token_losses import token_losses


def score(
    run: Run,
    corpora: Sequence[Corpus],
    scorings: Sequence[Scoring],
    processes: Processes,
    batch_tokens: int | None = None,
) -> list[dict[Scoring, Sums]]:
    """Losses by every scoring, added up; from the run's folder where those of tokens are known.

    Args:
        run: the model; its weights are read if something is to be scored.
        corpora: validation splits.
        scorings: how to score each; those of one shape are best next to each other.
        processes: all of them take a share.
        batch_tokens: tokens that a GPU reads at once; None takes what training took.

    Returns:
        For each corpus the sums by scoring; the same on every process.

    Raises:
        ValueError: a stream is too short.
    """
    config = run.config
    if batch_tokens is None:
        batch_tokens = config.optim.micro_batch_size * config.model.context_length
    sums: list[dict[Scoring, Sums]] = [{} for _ in corpora]
    compiled_for: tuple[int, int, bool] | None = None
    model: nn.Module = nn.Identity()
    for scoring in scorings:
        for corpus, of_corpus in zip(corpora, sums, strict=True):
            stream = corpus.stream
            known = read_losses(run, stream, scoring) if processes.is_main else None
            known = processes.agree(known)
            if known is None:
                title = f"{run.folder.name}: {scoring.name}"
                if processes.is_main:
                    print(f"{title}, {scoring.n_windows(len(stream)):,} windows", flush=True)
                began = perf_counter()
                shape = scoring.history, scoring.stride, scoring.document_mask
                if compiled_for != shape:
                    model, compiled_for = _ready(run, scoring, processes.device), shape
                known = token_losses(
                    model,
                    ScoringWindows(
                        stream,
                        scoring,
                        max(1, batch_tokens // scoring.history),
                        rank=processes.rank,
                        world_size=processes.world_size,
                    ),
                    len(stream),
                    processes,
                    lambda: autocast(config.run.dtype, processes.device),
                )
                if processes.is_main:
                    n_scored, seconds = int((~np.isnan(known)).sum()), perf_counter() - began
                    print(f"{title}, {n_scored:,} tokens, {seconds:.1f} s", flush=True)
                    write_losses(run, stream, scoring, known)
            of_corpus[scoring] = add_up(known, scoring, corpus)
    return sums


def validation_splits(corpora: Sequence[Path]) -> list[TokenStream]:
    """The validation split of each folder of token shards.

    Raises:
        ValueError: two folders have the same name, by which losses and reports are kept.
    """
    named: dict[str, Path] = {}
    for path in corpora:
        name = path.resolve().name
        if name in named:
            raise ValueError(
                f"{named[name]} and {path} are both called {name}, by which losses and reports are "
                "kept: rename one of the folders, or score them one after the other with another "
                "--out"
            )
        named[name] = path
    return [TokenStream(path, "val") for path in corpora]


def check_tokenizer(run: Run, stream: TokenStream) -> None:
    """Refuse text that was made with another tokenizer than the run was trained with."""
    there = stream.manifest.tokenizer.sha256
    if there != run.tokenizer.sha256:
        raise ValueError(
            f"{stream.path} was made with a tokenizer of sha256={there}, and {run.folder} was "
            f"trained with {run.tokenizer.sha256}: prepare the text with {run.folder}'s "
            "tokenizer.json (--tokenizer)"
        )


def _ready(run: Run, scoring: Scoring, device: torch.device) -> nn.Module:
    """The model as it is best for windows of this one shape."""
    model = run.model.to(device)
    if not run.config.run.compile:
        return model
    torch.compiler.reset()  # code for other shapes counts towards a limit
    model.prepare_mask(scoring.history)
    return torch.compile(model, fullgraph=True, dynamic=False)  # pyright: ignore


def evaluate_runs(
    folders: Sequence[Path],
    plan: Plan,
    processes: Processes,
    *,
    corpora: Sequence[Path] = (),
    batch_tokens: int | None = None,
) -> list[tuple[list[Scored], Text]]:
    """Score all runs, one model in memory after the other.

    Args:
        folders: of the runs.
        plan: which scorings.
        processes: all of them take a share.
        corpora: token shards whose validation splits are scored; those of the first run if empty.
        batch_tokens: as in `score`.

    Returns:
        For each corpus, what each run was scored, and on which text.

    Raises:
        ValueError: a text is too short, or was made with another tokenizer than a run; runs of
            the same name are no seeds of one model; corpora have the same name; no run can be
            scored by one of `plan.modes`; or windows that slide share no token.
    """
    # one that is still trained may get another newest checkpoint at any moment
    newest = processes.agree([latest_checkpoint(folder) for folder in folders])
    runs = [open_run(*of_run) for of_run in zip(folders, newest, strict=True)]
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
    for name, run, scorings in zip(names, runs, wanted, strict=True):
        # of a copy, so that the model goes with it, and not of a checkpoint that came meanwhile
        sums = score(replace(run), described, scorings, processes, batch_tokens)
        about = describe(run)
        for of_corpus, of_run in zip(scored, sums, strict=True):
            of_corpus.append(
                Scored(
                    label=name,
                    number=run.seed_number,
                    about=about,
                    config=run.config,
                    sums=of_run,
                )
            )
    return [(runs, corpus.text) for runs, corpus in zip(scored, described, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[], dest="corpora", metavar="FOLDER",
        help="token shards (default: the first run's); of several, each has a report",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of the report (default: out/evaluation)")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES,
        help="all of these must give something to score (default: whichever do)",
    )  # fmt: skip
    parser.add_argument(
        "--stride", nargs="+", type=int, dest="strides",
        help="by how many tokens windows slide (default: an eighth of what they read)",
    )  # fmt: skip
    parser.add_argument("--histories", nargs="+", type=int, default=[], help="for cross")
    parser.add_argument(
        "--near",
        type=int,
        help="for control (default: the shortest context; a quarter of it if there is no other)",
    )
    parser.add_argument(
        "--first", type=int, help="position from which all score (default: the longest context)"
    )
    parser.add_argument(
        "--documents",
        choices=("trained", "packed", "masked", "both"),
        default="trained",
        help="does a token see what stands before its document? (default: as in training)",
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--batch-tokens", type=int, help="read at once (default: as in training)")
    parser.add_argument(
        "--sums",
        type=Path,
        metavar="FOLDER",
        help="write what a report needs of each run to FOLDER/CORPUS/RUN.npz, and no report",
    )
    args = parser.parse_args(argv)
    if args.batch_tokens is not None and args.batch_tokens < 1:
        raise ValueError(f"--batch-tokens={args.batch_tokens} must be at least 1")
    if args.sums is not None and args.out is not None:
        raise ValueError("--out is for a report, and --sums writes none: leave one of them out")
    out = args.out or Path("out/evaluation")
    option, folder = ("--out", out) if args.sums is None else ("--sums", args.sums)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{option}={folder}: {there} is a file, and must be a folder")
    names = [folder.resolve().name for folder in args.runs]
    if args.sums is not None and len(set(names)) < len(names):
        raise ValueError(
            f"--sums keeps runs by the names of their folders, and these are {', '.join(names)}: "
            "rename those that are called the same"
        )
    for option, is_given, modes in (
        ("--stride", args.strides is not None, SLIDING),
        ("--first", args.first is not None, SLIDING),
        ("--histories", args.histories != [], ("cross",)),
        ("--near", args.near is not None, ("control",)),
        ("--documents", args.documents != "trained", ("chunk", "strided", "cross")),
    ):
        if is_given and args.modes and not set(modes) & set(args.modes):
            raise ValueError(
                f"{option} changes nothing with --modes {' '.join(args.modes)}: leave it out, or "
                f"add a mode that it is for ({', '.join(modes)})"
            )
    masks = {"trained": None, "packed": (False,), "masked": (True,), "both": (False, True)}
    plan = Plan(
        modes=None if args.modes is None else tuple(args.modes),
        strides=tuple(args.strides) if args.strides else None,
        histories=tuple(args.histories),
        near=args.near,
        first=args.first,
        document_masks=masks[args.documents],
    )
    torch.set_float32_matmul_precision("high")  # as in training
    with start_processes(args.device) as processes:
        evaluated = evaluate_runs(
            args.runs, plan, processes, corpora=args.corpora, batch_tokens=args.batch_tokens
        )
        if not processes.is_main:
            return
        for scored, text in evaluated:
            if args.sums is not None:
                for run in scored:
                    print(f"wrote {write_scored(run, text, args.sums)}")
            else:
                write_report(tabulate(scored, text), out / text.name if len(evaluated) > 1 else out)


if __name__ == "__main__":
    with errors_as_sentences():
        main()
