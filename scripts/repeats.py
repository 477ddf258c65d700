"""Measure how much runs gain from an earlier copy of a passage, by its distance and length.

    python -m scripts.repeats out/gpt2_small_4k [RUN ...] [--distances 1024 2048] [--lengths 64 256]

A passage of the validation split is scored twice: in its document as it is, and with a copy of the
passage inserted some distance before. Only the second half of the passage is scored. The difference
of the two losses is what the model gains from the copy, in nats per token. Both prompts of a
passage have the same length, and the text after the copy does not change.

All runs get the same prompts. Distances that do not fit the context of a run are left empty.
Documents must be long enough for the longest distance that fits a run. The 95% intervals are over
documents, or over passages if fewer than five documents are long enough. Writes repeats.json and
repeats.png to --out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import (
    add_checkpoint_option,
    command_parser,
    parse_before_imports,
    user_errors_as_messages,
)

DISTANCES = (1024, 2048, 4096, 8192, 15_360)
SHORT_DISTANCES = (64, 128, 256, 512)
"""For contexts that none of DISTANCES fits."""
LENGTHS = (64, 128, 256, 512)


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add_checkpoint_option(parser)
    add(
        "--distances", type=int, nargs="+", metavar="TOKENS",
        help="tokens from the start of the copy to that of the passage (default: those of "
        f"{' '.join(map(str, DISTANCES))} that fit a run, or else of "
        f"{' '.join(map(str, SHORT_DISTANCES))})",
    )  # fmt: skip
    add(
        "--lengths", type=int, nargs="+", metavar="TOKENS",
        help=f"tokens of the passages (default: {' '.join(map(str, LENGTHS))}, up to the shortest "
        "distance)",
    )  # fmt: skip
    add(
        "--passages", type=int, default=100, metavar="N",
        help="passages per distance and length (default: %(default)s)",
    )  # fmt: skip
    add("--data", type=Path, metavar="FOLDER", help="token shards (default: the first run's)")
    add("--seed", type=int, default=0, help="seed of the passages (default: %(default)s)")
    add(
        "--batch-tokens", type=int, default=65_536,
        help="tokens per forward pass (default: %(default)s)",
    )  # fmt: skip
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--out", type=Path, default=Path("out/repeats"), help="(default: %(default)s)")
    return parser.parse_args(argv)


from evaluation.prompts import open_runs, precision_of
from evaluation.repeats import TEXT_BEFORE, Repeats, draw, score, table_of, tabulate
from evaluation.results import Row, write_result
from evaluation.runs import describe
from evaluation.style import save
from training.distributed import start_processes


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    runs, stream = open_runs(args.runs, args.checkpoint, args.data)
    stream.verify()
    longest = max(run.config.model.context_length for run in runs.values())
    distances = args.distances or default_distances(longest, args.lengths or LENGTHS[:1])
    lengths = args.lengths or [n for n in LENGTHS if n <= min(distances)] or LENGTHS
    repeats = Repeats(distances=distances, lengths=lengths, n=args.passages, seed=args.seed)
    passages = repeats.passages(stream, longest)
    rows: dict[str, list[Row]] = {}
    with start_processes(args.device) as processes:
        for label, run in runs.items():
            losses = score(
                run.model.to(processes.device),
                stream,
                repeats,
                passages,
                batch_tokens=args.batch_tokens,
                context=precision_of(run, processes.device),
            )
            rows[label] = tabulate(losses, repeats, passages)
    args.out.mkdir(parents=True, exist_ok=True)
    units = "passages" if passages.are_units else "documents"
    settings = {
        "seed": args.seed,
        "passages": args.passages,
        "documents": passages.n_documents,
        "intervals_over": units,
    }
    results = [
        {"label": label, "rows": rows[label], "about": describe(run)} for label, run in runs.items()
    ]
    write_result(args.out / "repeats.json", {**settings, "runs": results})
    save(draw(rows), args.out / "repeats.png")
    print(table_of(rows), end="")
    print(
        f"{args.passages:,} passages of {min(args.passages, passages.n_documents):,} documents; "
        f"95% intervals over {units}"
    )
    print(f"wrote {args.out / 'repeats.json'} and repeats.png")


def default_distances(context_length: int, lengths: Sequence[int]) -> Sequence[int]:
    """Default distances that fit a context and these lengths of passages.

    If none fits, the shortest ones: they are refused with the context that they need.
    """
    for distances in (DISTANCES, SHORT_DISTANCES):
        longest = context_length + 1 - TEXT_BEFORE - min(lengths)
        if fitting := [n for n in distances if max(lengths) <= n <= longest]:
            return fitting
    return SHORT_DISTANCES


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
