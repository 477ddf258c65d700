"""Prepare a task of Long Range Arena for training.

    python -m scripts.prepare_lra listops                  # generated in seconds
    python -m scripts.prepare_lra text                     # IMDB from the Hugging Face hub
    python -m scripts.prepare_lra image --source cifar-10-batches-py
    python -m scripts.prepare_lra retrieval --source lra_release/lra_release
    python -m scripts.prepare_lra pairs                    # halves of the same IMDB review or not
    python -m scripts.prepare_lra aclsum --source aclsum-0.1.2-py3-none-any.whl    # not AAN
    python -m scripts.prepare_lra pathx                    # Pathfinder 128 x 128, generated
    python -m scripts.prepare_lra pathfinder32 --source lra_release/lra_release
    python -m scripts.prepare_lra pathfinder64 --contour-length 3 --distractors-of 14
    python -m scripts.prepare_lra listops --shortest 4 --longest 32 --examples 40000,500,500

Writes OUT/TASK/ with manifest.json, NumPy files for each split, and samples.png with some examples.
If it is interrupted or killed, run the same command again to resume.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from data.lra.listops import FORMULA_FILE, LONGEST, SHORTEST, baselines, write_tsv
from data.lra.request import TASKS, Request
from data.pathfinder.parameters import DIFFICULTIES
from training.command_line import command_parser, parse_before_imports, user_errors_as_messages
from training.signals import on_interrupt


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("task", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    add(
        "--source", type=Path, metavar="FOLDER",
        help="folder with the published files, or the wheel of aclsum (default: download them from "
        "the Hugging Face hub for text, pairs and image; generate them for listops and "
        "pathfinder...)",
    )  # fmt: skip
    add(
        "--out", type=Path, default=Path("out/data/lra"), metavar="FOLDER",
        help="parent of the task's folder (default: %(default)s)",
    )  # fmt: skip
    add(
        "--examples", metavar="TRAIN,VAL,TEST",
        help="numbers of examples (default: the benchmark's); more training examples do not "
        "change val and test",
    )  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="seed of generated or held-out examples")
    add("--workers", type=int, metavar="N", help="threads (default: number of cores)")
    contour = parser.add_mutually_exclusive_group().add_argument
    contour("--difficulty", choices=tuple(DIFFICULTIES), help="of Pathfinder (default: hard)")
    contour("--contour-length", type=int, metavar="N", help="of Pathfinder, in strokes")
    add(
        "--distractors-of", type=int, metavar="N",
        help="as many distractors as for contours of N strokes (default: the contour length)",
    )  # fmt: skip
    for option, value in (("--shortest", SHORTEST), ("--longest", LONGEST)):
        add(
            option, type=int, default=value, metavar="N",
            help="length of generated listops formulas, in tokens (default: %(default)s)",
        )  # fmt: skip
    add("--tsv", action="store_true", help="listops only: also write files as in the benchmark")
    return parser.parse_args(argv)


import time

import numpy as np
from rich import progress
from rich.console import Console
from rich.table import Table

from data.lra.contact_sheet import draw
from data.lra.store import SPLITS, Manifest, Sequences, open_split
from data.lra.tasks import OnProgress, Prepared, prepare

_COLUMNS = (
    progress.TextColumn("{task.description}"),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeElapsedColumn(),
    progress.TimeRemainingColumn(),
)
_MAX_NAMED = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    args = options(argv)
    console = Console(soft_wrap=True)
    started = time.perf_counter()
    with user_errors_as_messages(), on_interrupt(lambda: ": the same command resumes from here"):
        with progress.Progress(*_COLUMNS, console=console) as bar:
            prepared = prepare(_request(args), args.out, _progress_callback(bar))
        if prepared.finished_before:
            console.print(f"{prepared.folder} is already finished; nothing to do.")
        else:
            console.print(f"{prepared.folder}: {time.perf_counter() - started:.1f} s")
        _report(prepared, console)
        if args.tsv:
            _write_tsv(prepared, console)
        console.print(f"samples: {draw(prepared.folder)}")
    return 0


def _request(args: argparse.Namespace) -> Request:
    if args.tsv and args.task != "listops":
        raise ValueError(f"--tsv is for listops only, not for {args.task}: leave it out.")
    default_length = DIFFICULTIES[args.difficulty or "hard"]
    return Request(
        task=args.task,
        source=args.source,
        examples=_sizes(args.examples),
        seed=args.seed,
        contour_length=default_length if args.contour_length is None else args.contour_length,
        distractors_of=args.distractors_of,
        shortest=args.shortest,
        longest=args.longest,
        n_threads=args.workers,
    )


def _sizes(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    numbers = text.replace("_", "").split(",")
    if len(numbers) != len(SPLITS) or not all(number.strip().isdecimal() for number in numbers):
        raise ValueError(
            f"--examples {text} must be three numbers separated by commas, such as 96000,2000,2000."
        )
    return {split: int(number) for split, number in zip(SPLITS, numbers, strict=True)}


def _progress_callback(bar: progress.Progress) -> OnProgress:
    """Return a callback that shows each split on a line of its own."""
    tasks: dict[str, progress.TaskID] = {}

    def show(split: str, done: int, total: int) -> None:
        if split not in tasks:
            tasks[split] = bar.add_task(split, total=total)
        bar.update(tasks[split], completed=done, total=total)

    return show


def _report(prepared: Prepared, console: Console) -> None:
    manifest = prepared.manifest
    for key, value in manifest.source.items():
        if value is not None:
            console.print(f"  {key}: {value}", highlight=False)
    console.print(_summary(prepared.folder, manifest))
    for split, info in manifest.splits.items():
        if info.skipped:
            named = ", ".join(info.skipped[:_MAX_NAMED])
            console.print(f"{split}: {len(info.skipped):,} empty and left out: {named}")
    if manifest.task.startswith("listops"):
        train, test = (open_split(prepared.folder, split) for split in ("train", "test"))
        assert isinstance(train, Sequences) and isinstance(test, Sequences)
        scores = baselines(train, test)
        console.print(
            f"Accuracy on test from the most common label: {scores['majority']:.1f} %; from the "
            f"root operator: {scores['root']:.1f} %; from it and its direct arguments: "
            f"{scores['root_digits']:.1f} %."
        )


def _write_tsv(prepared: Prepared, console: Console) -> None:
    for split in prepared.manifest.splits:
        sequences = open_split(prepared.folder, split)
        assert isinstance(sequences, Sequences)
        path = prepared.folder / FORMULA_FILE.format(split=split)
        labels = sequences.labels.tolist()
        write_tsv(path, ((sequences.documents(i)[0], label) for i, label in enumerate(labels)))
        console.print(f"wrote {path}")


def _summary(folder: Path, manifest: Manifest) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("split", no_wrap=True)
    for heading in ("examples", "most common label", "tokens", "median", "longest", "MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for split in manifest.splits:
        examples = open_split(folder, split)
        shares = [(examples.labels == c).mean() for c in range(manifest.n_classes)]
        lengths = ["", "", ""]
        if isinstance(examples, Sequences):
            median, longest = int(np.median(examples.lengths)), int(examples.lengths.max())
            lengths = [f"{len(examples.tokens):,}", f"{median:,}", f"{longest:,}"]
        size = sum(path.stat().st_size for path in folder.glob(f"{split}.*.npy")) / 1e6
        table.add_row(split, f"{len(examples):,}", f"{max(shares):.1%}", *lengths, f"{size:.1f}")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
