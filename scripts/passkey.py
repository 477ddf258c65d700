"""Measure how often runs find a pass key in a long text, by length and depth.

    python -m scripts.passkey out/gpt2_small_4k [RUN ...] [--lengths 1024 4096] [--depths 0 0.5 1]

A prompt is text of the validation split. At some depth, a sentence names the key of a door, which
has five digits. The prompt ends with the question for that key. --others also hides keys of other
doors. A key counts as found if greedy decoding gives all its digits. All runs get the same prompts.
Models that were not trained on the task seldom solve it, however good their loss:
scripts.prepare_passkey makes text that teaches it. Writes passkey.json and passkey.png, a heat map,
to --out.
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


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add_checkpoint_option(parser)
    add(
        "--lengths", type=int, nargs="+", metavar="TOKENS",
        help="prompt lengths (default: the run's context, a half, a quarter and an eighth of it, "
        "if a key fits)",
    )  # fmt: skip
    add(
        "--depths", type=float, nargs="+", default=[n / 10 for n in range(11)], metavar="SHARE",
        help="positions of the key in the prompt, from 0 to 1 (default: eleven)",
    )  # fmt: skip
    add(
        "--trials", type=int, default=20, metavar="N",
        help="prompts per length and depth (default: %(default)s)",
    )  # fmt: skip
    add("--others", type=int, default=0, metavar="N", help="other keys (default: %(default)s)")
    add("--data", type=Path, metavar="FOLDER", help="token shards (default: the first run's)")
    add("--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)")
    add(
        "--batch-tokens", type=int, default=65_536,
        help="tokens per forward pass (default: %(default)s)",
    )  # fmt: skip
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--out", type=Path, default=Path("out/passkey"), help="(default: %(default)s)")
    return parser.parse_args(argv)


from functools import partial

from data.text.passkey import tokens_of_key
from data.text.shards import TokenStream
from evaluation.markdown import dict_table
from evaluation.passkey import Trials, by_length, draw, score
from evaluation.results import Row, write_result
from evaluation.runs import describe, labels, open_run
from evaluation.score import check_tokenizer
from evaluation.style import save
from training.checkpoint.choice import find_checkpoint
from training.distributed import start_processes
from training.numerics import autocast

SHARES = (8, 4, 2, 1)  # divisors of the context length


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    runs = [open_run(folder, find_checkpoint(folder, args.checkpoint)) for folder in args.runs]
    haystack = TokenStream(args.data or runs[0].config.data.path, "val")
    names = labels(runs)
    found: dict[str, list[Row]] = {}
    results = []
    with start_processes(args.device) as processes:
        device = processes.device
        for name, run in zip(names, runs, strict=True):
            check_tokenizer(run, haystack)
            context_length = run.config.model.context_length
            least = (1 + args.others) * tokens_of_key(run.tokenizer)
            trials = Trials(
                lengths=args.lengths or default_lengths(context_length, least),
                depths=args.depths,
                n=args.trials,
                others=args.others,
                seed=args.seed,
            )
            dtype = run.config.run.dtype if device.type == "cuda" else "float32"
            label = name if names.count(name) == 1 else f"{name}, seed {run.seed_number}"
            found[label] = []
            for row in score(
                run.model.to(device),
                run.tokenizer,
                haystack,
                trials,
                batch_tokens=args.batch_tokens,
                context=partial(autocast, dtype, device),
            ):
                found[label].append(row)
            results.append({"label": label, "rows": found[label], "about": describe(run)})
    args.out.mkdir(parents=True, exist_ok=True)
    write_result(
        args.out / "passkey.json", {"seed": args.seed, "others": args.others, "runs": results}
    )
    save(draw(found), args.out / "passkey.png")
    print(table_of(found), end="")
    print(f"wrote {args.out / 'passkey.json'} and passkey.png")


def default_lengths(context_length: int, least: int) -> list[int]:
    """Tokens of prompts: an eighth, a quarter, a half and all of a context, from `least` on.

    Raises:
        ValueError: the context is shorter than `least`.
    """
    lengths = [context_length // share for share in SHARES if context_length // share >= least]
    if not lengths:
        raise ValueError(
            f"model.context_length={context_length} must be at least {least}: the keys and the "
            "question take that many tokens. Choose a run with a longer context"
        )
    return lengths


def table_of(runs: dict[str, list[Row]]) -> str:
    """Format the accuracy by length over all depths, with 95% intervals, as Markdown."""
    return dict_table(
        {
            "run": label,
            "tokens": f"{row['length']:,}",
            "keys found": f"{row['found'] / row['of']:.1%} ({row['low']:.1%} to {row['high']:.1%})",
            "depth of most misses": f"{_worst(rows, row['length']):.0%}",
        }
        for label, rows in runs.items()
        for row in by_length(rows)
    )


def _worst(rows: Sequence[Row], length: int) -> float:
    """Return the depth at which the fewest keys are found; if several, the first."""
    return min(
        (row for row in rows if row["length"] == length), key=lambda row: row["found"] / row["of"]
    )["depth"]


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
