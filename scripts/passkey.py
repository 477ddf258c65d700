"""Measure how often runs find a pass key in a long text, by length and depth.

    python -m scripts.passkey out/gpt2_small_4k [RUN ...] [--lengths 1024 4096] [--depths 0 0.5 1]
    python -m scripts.passkey out/gpt2_small_4k [RUN ...] --task chains

A prompt is text of the validation split. At some depth, a sentence names the key of a door, which
has five digits. The prompt ends with the question for that key. --others also hides keys of other
doors. A key counts as found if greedy decoding gives all its digits. All runs get the same prompts.
Lengths that do not fit a run are left empty: a prompt must have room for the sentences, and not be
longer than learned positions.

With --task chains, an answer needs two hops: one sentence gives the code of a box, another says
which door opens with it, and the question is for the code of that door. The depth is that of the
first sentence. The other follows at a random later depth.

Models that were not trained on the task seldom solve it, however good their loss:
scripts.prepare_passkey makes text that teaches it. Writes passkey.json and passkey.png, a heat map,
to --out, or chains.json and chains.png.
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
    add("--task", choices=("key", "chains"), default="key", help="(default: %(default)s)")
    add(
        "--order", choices=("random", "box-first", "door-first"),
        help="for chains: order of the two sentences (default: random)",
    )  # fmt: skip
    add(
        "--lengths", type=int, nargs="+", metavar="TOKENS",
        help="prompt lengths (default: the run's context, a half, a quarter and an eighth of it, "
        "if a key fits)",
    )  # fmt: skip
    add(
        "--depths", type=float, nargs="+", default=[n / 10 for n in range(11)], metavar="SHARE",
        help="positions of the key, or of the first sentence of a chain, from 0 to 1 "
        "(default: eleven)",
    )  # fmt: skip
    add(
        "--trials", type=int, default=20, metavar="N",
        help="prompts per length and depth (default: %(default)s)",
    )  # fmt: skip
    add(
        "--others", type=int, metavar="N",
        help="other keys or chains in each prompt (default: 0 keys, 4 chains)",
    )  # fmt: skip
    add("--data", type=Path, metavar="FOLDER", help="token shards (default: the first run's)")
    add("--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)")
    add(
        "--batch-tokens", type=int, default=65_536,
        help="tokens per forward pass (default: %(default)s)",
    )  # fmt: skip
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--out", type=Path, default=Path("out/passkey"), help="(default: %(default)s)")
    return parser.parse_args(argv)


from data.text.passkey import tokens_of_fact
from data.text.recall_tasks import KEYS, TASKS, Task, chains_in_order
from evaluation.markdown import dict_table
from evaluation.passkey import Trials, by_length, draw, score
from evaluation.prompts import open_runs, precision_of
from evaluation.results import Row, write_result
from evaluation.runs import describe
from evaluation.style import save
from training.distributed import start_processes

SHARES = (8, 4, 2, 1)  # divisors of the context length


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    task = TASKS[args.task]
    if args.order is not None:
        if args.task != "chains":
            raise ValueError(
                f"--order={args.order} changes nothing with --task {args.task}, whose facts have a "
                "single sentence: leave it out, or add --task chains"
            )
        task = chains_in_order(args.order)
    others = task.others if args.others is None else args.others
    runs, haystack = open_runs(args.runs, args.checkpoint, args.data)
    first, *_ = runs.values()  # all runs have the tokenizer of the text
    least = (1 + others) * tokens_of_fact(task, first.tokenizer)
    found: dict[str, list[Row]] = {}
    results = []
    with start_processes(args.device) as processes:
        device = processes.device
        for label, run in runs.items():
            trials = Trials(
                lengths=args.lengths or default_lengths(run.config.model.context_length, least),
                depths=args.depths,
                n=args.trials,
                others=others,
                seed=args.seed,
                task=task,
            )
            found[label] = [
                *score(
                    run.model.to(device),
                    run.tokenizer,
                    haystack,
                    trials,
                    batch_tokens=args.batch_tokens,
                    context=precision_of(run, device),
                )
            ]
            results.append({"label": label, "rows": found[label], "about": describe(run)})
    if not any(by_length(rows) for rows in found.values()):
        contexts = [run.config.model.context_length for run in runs.values()]
        raise ValueError(nothing_fits(args.lengths, max(contexts), least))
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"seed": args.seed, "others": others}
    if args.task == "chains":
        settings["order"] = args.order or "random"
    path = args.out / f"{task.kind}.json"
    write_result(path, {**settings, "runs": results})
    save(draw(found, task=task), path.with_suffix(".png"))
    print(table_of(found, task), end="")
    print(f"wrote {path} and {path.stem}.png")


def default_lengths(context_length: int, least: int) -> list[int]:
    """Tokens of prompts: an eighth, a quarter, a half and all of a context, from `least` on.

    The whole context if it is shorter than `least`, so that the run has a line in the results.
    """
    lengths = [context_length // share for share in SHARES if context_length // share >= least]
    return lengths or [context_length]


def nothing_fits(lengths: Sequence[int] | None, longest: int, least: int) -> str:
    """Message if no length fits any run.

    Args:
        lengths: --lengths, if given.
        longest: longest context of the runs.
        least: tokens that the sentences and the question take.
    """
    if lengths is None:
        given = f"the longest model.context_length={longest} must be at least {least}"
        remedy = "a run with a longer context"
    else:
        given = (
            f"one of --lengths {' '.join(map(str, lengths))} must be at least {least}, and with "
            f"learned positions at most {longest + 1} (model.context_length + 1)"
        )
        remedy = "other lengths, a run with a longer context"
    return (
        f"{given}: the hidden sentences and the question take {least} tokens. Choose {remedy}, or "
        "fewer --others"
    )


def table_of(runs: dict[str, list[Row]], task: Task = KEYS) -> str:
    """Format the accuracy by length over all depths, with 95% intervals, as Markdown.

    Lengths that were not measured have empty cells.
    """
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for label, rows in runs.items():
        for row in rows:
            lines[label, row["length"]] = {
                "run": label,
                "tokens": f"{row['length']:,}",
                task.found: "",
                "depth of most misses": "",
            }
        for row in by_length(rows):
            lines[label, row["length"]] |= {
                task.found: f"{row['found'] / row['of']:.1%} "
                f"({row['low']:.1%} to {row['high']:.1%})",
                "depth of most misses": f"{_worst(rows, row['length']):.0%}",
            }
    return dict_table(lines.values())


def _worst(rows: Sequence[Row], length: int) -> float:
    """Return the depth at which the fewest keys are found; if several, the first."""
    measured = (row for row in rows if row["length"] == length and row["of"] is not None)
    return min(measured, key=lambda row: row["found"] / row["of"])["depth"]


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
