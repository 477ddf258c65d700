"""Pass-key retrieval from long texts by dense, window and butterfly attention, 1K to 16K tokens.

    python -m experiments.passkey --data out/data/books

Trains configs/passkey_4k.yaml at each context with each attention, on the same number of tokens,
one run per GPU. Then scripts.passkey asks each run for keys in prompts of its context and of
fractions of it, and a report on all runs in --out is written. A window has an eighth of the
context. The documents with keys are up to two contexts long. To resume, run the same command.
"""

from pathlib import Path

from experiments.harness import Command
from experiments.passkey.attentions import ATTENTIONS
from experiments.sweep import add_options

CONTEXTS = (1024, 4096, 16_384)
SEEDS = (1,)


command = Command(__name__)
command.add("--data", type=Path, required=True, help="token shards to train on")
command.add("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS")
command.add("--attentions", nargs="+", choices=ATTENTIONS, default=ATTENTIONS)
command.add(
    "--documents",
    type=int,
    default=60_000,
    help="documents with keys (default: %(default)s)",
)
add_options(command.add, Path("out/passkey"), SEEDS)
command.read()

from argparse import Namespace
from itertools import product

from configs.reader import read_config
from evaluation.runs import HOW, check_same_settings
from experiments.gpu_pool import Task, python_command
from experiments.passkey.attentions import settings_of
from experiments.passkey.report import ASKED, write_report
from experiments.sweep import Run, refuse_overrides, run_in, task_of, train_and_report
from training.language.config import TrainConfig

CONFIG = "configs/passkey_4k.yaml"
QUESTIONS: tuple[str, ...] = ()
"""Additional options of scripts.passkey."""
SET_HERE = {
    "data.path": "--data",
    "data.mix": "--data",
    "model.context_length": "--contexts",
    "model.window_size": "--attentions",
    "model.mask.pattern": "--attentions",
}


def text_folder(out: Path, context: int) -> Path:
    """Folder of the token shards with keys for a context."""
    return out / f"text_{context}"


def prepare_text(args: Namespace, context: int) -> Task:
    """Task that prepares missing documents: up to two contexts long, as training cuts anywhere."""
    folder = text_folder(args.out, context)
    numbers = ("--longest", str(2 * context), "--documents", str(args.documents))
    arguments = ("scripts.prepare_passkey", str(args.data), "--out", str(folder), *numbers)
    return task_of(folder, lambda _: [python_command(1, "-m", *arguments)])


def make_runs(args: Namespace) -> list[Run[TrainConfig]]:
    """Build the runs of all contexts, attentions and seeds, in OUT/ATTENTION_CONTEXT_seedN.

    Raises:
        ValueError: --set has a setting that the sweep controls, or a folder has a run with other
            settings.
    """
    refuse_overrides(args.set, SET_HERE)
    runs = []
    for seed, context, attention in product(args.seeds, args.contexts, args.attentions):
        text, length = text_folder(args.out, context), f"model.context_length={context}"
        small = read_config(TrainConfig, [CONFIG, length, "optim.micro_batch_size=1", *args.set])
        batch_size = small.optim.batch_tokens // context  # a step is one micro-batch
        settings = (
            *(CONFIG, f"data.path={args.data}", f"data.mix=[{{path: {text}}}]", length),
            *(f"optim.micro_batch_size={batch_size}", *settings_of(attention, context), *args.set),
        )
        name = f"{attention}_{context}"
        folder = args.out / f"{name}_seed{seed}"
        ask = ("-m", "scripts.passkey", str(folder), "--out", str((folder / ASKED).parent))
        run = run_in(
            args.out, name, seed, TrainConfig, settings, needs=(text,), then=(*ask, *QUESTIONS)
        )
        check_same_settings(run.folder, run.config, may_differ=HOW)
        runs.append(run)
    return runs


@command.main
def main(args: Namespace) -> None:
    """Run the command."""
    runs = [] if args.report_only else make_runs(args)
    runs = [run for run in runs if not (run.folder / ASKED).exists()]
    contexts = dict.fromkeys(run.config.model.context_length for run in runs)
    train_and_report(
        [*(prepare_text(args, context) for context in contexts), *(run.task() for run in runs)],
        lambda _: write_report(args.out, args.results, args.add),
    )
