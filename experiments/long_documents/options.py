"""Options that the fine-tuned model and the baselines share."""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command

LEAST = {"lengths": 1, "seeds": 0, "folds": 2, "epochs": 1}


def add_options(command: Command) -> None:
    """Add the documents, their lengths and folds."""
    command.add("--text", type=Path, nargs="+", required=True, help=".jsonl or .jsonl.xz")
    lengths = [512, 1024, 2048, 4096, 8192, 16_384]
    command.add("--lengths", type=int, nargs="+", default=lengths, help="tokens of each document")
    command.add("--folds", type=int, default=5)


def check(args: Namespace) -> None:
    """Raise ValueError if a number is too small, or repeated."""
    for name, value in vars(args).items():
        values = value if isinstance(value, list) else [value]
        if name in LEAST and min(values) < LEAST[name]:
            raise ValueError(f"--{name}={value} must be at least {LEAST[name]}")
        if name in LEAST and len(set(values)) < len(values):
            raise ValueError(f"--{name}={value} must not repeat a number: each is measured once")
