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
from dataclasses import replace
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
        "if its prompts fit)",
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


from data.text.recall_tasks import KEYS, TASKS, Task, chains_in_order
from data.text.shards import TokenStream
from evaluation.markdown import dict_table
from evaluation.passkey import Trials, by_length, draw, lengths_that_fit, score
from evaluation.prompts import open_runs, precision_of
from evaluation.results import Row, write_result
from evaluation.runs import Run, describe
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
    trials = Trials(
        lengths=args.lengths or [max(run.config.model.context_length for run in runs.values())],
        depths=args.depths,
        n=args.trials,
        others=others,
        seed=args.seed,
        task=task,
    )
    found: dict[str, list[Row]] = {}
    results = []
    with start_processes(args.device) as processes:
        device = processes.device
        for label, run in runs.items():
            context_length = run.config.model.context_length
            lengths = args.lengths or [max(1, context_length // share) for share in SHARES]
            rows = [
                *score(
                    run.model.to(device),
                    run.tokenizer,
                    haystack,
                    replace(trials, lengths=lengths),
                    batch_tokens=args.batch_tokens,
                    context=precision_of(run, device),
                )
            ]
            found[label] = rows if args.lengths else lengths_that_fit(rows)
            results.append({"label": label, "rows": found[label], "about": describe(run)})
    if not any(by_length(rows) for rows in found.values()):
        raise ValueError(nothing_fits([*runs.values()], haystack, trials, args.lengths))
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"seed": args.seed, "others": others}
    if args.task == "chains":
        settings["order"] = args.order or "random"
    path = args.out / f"{task.kind}.json"
    write_result(path, {**settings, "runs": results})
    save(draw(found, task=task), path.with_suffix(".png"))
    print(table_of(found, task), end="")
    print(f"wrote {path} and {path.stem}.png")


def nothing_fits(
    runs: Sequence[Run], haystack: TokenStream, trials: Trials, lengths: Sequence[int] | None
) -> str:
    """Message if no length fits any run.

    Args:
        runs: the runs, which all have the tokenizer of the haystack.
        haystack: source of the filler text.
        trials: the prompts, of the longest context without `lengths`.
        lengths: --lengths, if given.
    """
    models = [run.config.model for run in runs]
    longest = max(model.context_length for model in models)
    least = trials.least_length(runs[0].tokenizer, haystack)
    bounded = [model.context_length for model in models if model.positions == "learned"]
    remedies = ["a run with a longer context"]
    if lengths is None:
        given = f"the longest model.context_length={longest} must be at least {least}"
    else:
        given = f"one of --lengths {' '.join(map(str, lengths))} must be at least {least}"
        if bounded:
            given += (
                f", and with learned positions at most {max(bounded) + 1} (model.context_length + "
                "1)"
            )
        if len(bounded) < len(runs):
            remedies = ["longer --lengths"]
        elif least <= max(bounded) + 1:
            remedies = ["other --lengths"]
    if trials.others:
        remedies.append("fewer --others")
    return (
        f"{given}: the hidden sentences and the question take up to {least} tokens. Choose "
        f"{' or '.join(remedies)}"
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
                "depth of most misses": _worst(rows, row["length"]),
            }
    return dict_table(lines.values())


def _worst(rows: Sequence[Row], length: int) -> str:
    """Depth at which the fewest keys are found, the first of several; "all" if all are equal.

    A dash if there is no miss.
    """
    shares = {
        row["depth"]: row["found"] / row["of"]
        for row in rows
        if row["length"] == length and row["of"] is not None
    }
    if min(shares.values()) == 1:
        return "-"
    if len(shares) > 1 and len(set(shares.values())) == 1:
        return "all"
    return f"{min(shares, key=shares.__getitem__):.0%}"


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
