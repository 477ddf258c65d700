"""Models that are trained in a second, for the tests of experiments.table4."""

from itertools import count
from types import SimpleNamespace

from configs import load_config
from experiments.table4 import __main__ as reproduce_table4
from experiments.table4 import jobs
from experiments.table4.models import BUDGETS, Budget, Model
from scripts import evaluate

TINY = (
    "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.positions=rotary",
    "model.dropout=0", "model.attention_dropout=0", "optim.lr=1e-2",
    "run.device=cpu", "run.dtype=float32", "run.compile=false",
)  # fmt: skip
SHORT, LONG = ("model.context_length=32",), ("model.context_length=64",)
BUTTERFLY = ("model.mask.pattern=butterfly", "model.mask.block_size=16")
MODELS = {
    "short": Model(context="1k", overrides=SHORT),
    "long": Model(context="4k", overrides=LONG),
    "longest": Model(context="8k", overrides=("model.context_length=128",)),
    "long_butterfly": Model(context="4k", overrides=(*LONG, *BUTTERFLY)),
    "long_from_short": Model(
        context="4k", overrides=LONG, starts_from="short", same_time_as="long"
    ),
    "short_then_long": Model(context="4k", overrides=LONG, starts_from="short", share=1 / 2),
    "short_documents": Model(context="1k", overrides=(*SHORT, "data.document_mask=true")),
}
BUDGET = Budget(steps=20, batch_tokens=256, seeds=2, overrides=TINY)


class FinishedProcess:
    def wait(self):
        return 0


def sweep(monkeypatch, corpus, folder):
    """A function that runs the command in this process.

    It returns where the sweep is, and the commands that it ran.
    """
    for module in (jobs, reproduce_table4):
        monkeypatch.setattr(module, "MODELS", MODELS)
    monkeypatch.setitem(BUDGETS, "smoke", BUDGET)
    ran = []

    def run_here(command, *_):
        """Instead of a child, which would take seconds to start."""
        from train import main

        ran.append(command[1:])
        program, *arguments = command[1:]
        if program == "train.py":
            # a step of twice the context takes twice as long, on every machine
            clock = count(step=load_config(arguments).model.context_length)
            time = SimpleNamespace(perf_counter=clock.__next__)
            monkeypatch.setattr("training.stopwatch.time", time)
            main(arguments)
        else:
            assert arguments[0] == "scripts.evaluate"
            evaluate.main([*arguments[1:], "--device", "cpu"])
        return FinishedProcess()

    monkeypatch.setattr("experiments.gpu_pool._start", run_here)

    def reproduce(*options):
        ran.clear()
        out = folder / "out"
        reproduce_table4.main(
            ["--data", str(corpus), "--budget", "smoke", "--out", str(out), "--stride", "16",
             *options]
        )  # fmt: skip
        return out, list(ran)

    return reproduce
