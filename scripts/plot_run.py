"""Draw the loss curves of one run, or of several in one picture.

python -m scripts.plot_run out/quickstart [RUN ...] [--out loss.png]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from configs.command_line import errors_as_sentences
from training.metrics import METRICS, read_metrics


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Training loss (line) and validation loss (dots) over tokens, one colour a run, into `out`.

    Raises:
        FileNotFoundError: a folder has no records.
    """
    # Not at the top: matplotlib takes a second to load, which --help should not wait for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        records = read_metrics(run)
        if not records:
            raise FileNotFoundError(
                f"{run} has no records in {METRICS}: is it the folder of a run?"
            )
        colour = f"C{number}"
        train = [(r["tokens"] / 1e6, r["loss"]) for r in records if "loss" in r]
        val = [(r["tokens"] / 1e6, r["val_loss"]) for r in records if "val_loss" in r]
        if train:
            axes.plot(*zip(*train, strict=True), color=colour, lw=1, label=f"{run.name}, training")
        if val:
            axes.plot(
                *zip(*val, strict=True), color=colour, marker="o", ls="--",
                label=f"{run.name}, validation",
            )  # fmt: skip
    axes.set_xlabel("tokens seen, millions")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.plot_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="picture (default: loss.png in the first run)")
    args = parser.parse_args(argv)
    out = args.out or args.runs[0] / "loss.png"
    plot_runs(args.runs, out)
    print(f"drew {out}")


if __name__ == "__main__":
    with errors_as_sentences():
        main()
