"""Is a longer context better? Table 4 of the paper, with equal tokens, seeds and intervals.

    python -m experiments.table4 --data out/data/books --budget minutes
    python -m experiments.table4 --data out/data/openwebtext --budget paper --gpus-per-run 8

Trains each model of --models with each seed on all GPUs of this machine, one run per GPU (or per
group of --gpus-per-run). All runs have the same tokens per step, total tokens, schedule and text.
They are scored on the same validation tokens (scripts.evaluate), and a report is written. To
resume, run the same command. If a model starts from another one's weights, or is trained for
another one's time, the other one is trained too. Several machines can share the work, on several
days, each with its own --only: --add names the folders of scores that others wrote. The report
needs only these files. A run whose folder is missing is not trained again if its sums exist, unless
--only has its full name.

For LongPPL, a run outside of the sweep chooses key tokens, for example one more seed: python -m
scripts.evaluate RUN --write-key-tokens FILE, with --data for each text of --score-on, and --near of
the shortest context. Pass --key-tokens FILE to the sweep. Runs that were scored without it are
scored again, from cached losses, if their folders are in --out.
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command
from experiments.table4.models import BUDGETS, MODELS
from experiments.table4.options import add_sweep_options, check_sweep_options

command = Command(__name__)
command.add("--budget", choices=BUDGETS, default="minutes")
command.add(
    "--models", nargs="+", choices=MODELS, metavar="MODEL", help=f"models: {', '.join(MODELS)}"
)
add_sweep_options(command, "out/table4_BUDGET")
command.read(check=check_sweep_options)

from experiments.table4.sweep import sweep


@command.main
def main(args: Namespace) -> None:
    """Run the command."""
    out = args.out or Path(f"out/table4_{args.budget}")
    sweep(args, args.models or BUDGETS[args.budget].models, args.budget, out)
