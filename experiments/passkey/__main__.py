"""Which attention finds a pass key in a long text: dense, a window, a butterfly; 1K, 4K, 16K.

    python -m experiments.passkey --data out/data/books

Trains configs/passkey_4k.yaml at each context with each attention, on the same tokens in all, one
run a GPU, asks each for keys in prompts of its context and of shares of it (scripts.passkey), and
reports on all runs in --out. A window has an eighth of the context; the documents with keys are up
to two contexts long. Stopped, the same command goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.passkey.attentions import ATTENTIONS
from experiments.sweep import add_options
from training.command_line import command_parser, errors_as_sentences, read_first

CONTEXTS = (1024, 4096, 16_384)
SEEDS = (1,)


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="token shards to train on")
    add("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS")
    add("--attentions", nargs="+", choices=ATTENTIONS, default=ATTENTIONS)
    add("--documents", type=int, default=60_000, help="with keys (default: %(default)s)")
    add_options(parser, Path("out/passkey"), SEEDS)
    return parser.parse_args(argv)


from itertools import product

from experiments.passkey.report import write_report
from experiments.passkey.runs import PasskeyRun, Taught
from experiments.sweep import refuse_overrides, train_and_report

SET_HERE = {
    "run.seed": "--seeds",
    "run.out_dir": "--out",
    "data.path": "--data",
    "data.mix": "--data",
    "model.context_length": "--contexts",
    "model.window_size": "--attentions",
    "model.mask.pattern": "--attentions",
}


def make_runs(args: argparse.Namespace) -> list[PasskeyRun]:
    """The runs of all contexts, attentions and seeds.

    Raises:
        ValueError: --set sets what is set here, or a folder holds a run with other settings.
    """
    refuse_overrides(args.set, SET_HERE)
    runs = [
        PasskeyRun(
            taught=Taught(data=args.data, out=args.out, context=context, documents=args.documents),
            attention=attention,
            seed=seed,
            overrides=tuple(args.set),
        )
        for seed, context, attention in product(args.seeds, args.contexts, args.attentions)
    ]
    for run in runs:
        run.check_folder()
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    runs = []
    if not args.report_only:
        runs = [run for run in make_runs(args) if not run.is_asked]
    texts = dict.fromkeys(run.taught for run in runs)
    train_and_report(
        [*(text.task() for text in texts), *(run.task() for run in runs)],
        lambda _: write_report(args.out, args.results, args.add),
    )


if __name__ == "__main__":
    with errors_as_sentences():
        main()
