"""Models that are trained in a second, for the tests of the sweep of Table 4."""

import shutil
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from configs.reader import to_yaml
from data.text.shards import MANIFEST
from evaluation import report as evaluation_report
from experiments import reports
from experiments.table4 import __main__ as reproduce_table4
from experiments.table4 import models, report
from experiments.table4.models import BUDGETS, Budget, Model
from scripts import evaluate
from training.config import RUN_CONFIG
from training.language.config import TrainConfig, load_config

TINY = (
    "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.positions=rotary",
    "model.dropout=0", "model.attention_dropout=0", "optim.lr=1e-2",
    "run.device=cpu", "run.dtype=float32", "run.compile=false",
)  # fmt: skip
SHORT, LONG = ("model.context_length=32",), ("model.context_length=64",)
MODELS = {
    "short": Model(context="1k", overrides=SHORT),
    "long": Model(context="4k", overrides=LONG),
    "longest": Model(context="8k", overrides=("model.context_length=128",)),
    "long_from_short": Model(
        context="4k", overrides=LONG, starts_from="short", same_time_as="long"
    ),
    "short_then_long": Model(context="4k", overrides=LONG, starts_from="short", share=1 / 2),
}
BUDGET = Budget(steps=20, batch_tokens=256, seeds=2, overrides=TINY)


class FinishedProcess:
    """A child that has already ended."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def wait(self) -> int:
        return self.code


_trained: dict[str, tempfile.TemporaryDirectory] = {}


def what_is_trained(config: TrainConfig) -> str:
    """The same for runs that differ in nothing but where they and their text lie."""
    text = (Path(config.data.path) / MANIFEST).read_text()
    plain = replace(
        config,
        data=replace(config.data, path="x"),
        run=replace(config.run, out_dir="x", init_from=None),
    )
    if config.run.init_from is not None:
        text += what_is_trained(load_config([str(Path(config.run.init_from) / RUN_CONFIG)]))
    return text + to_yaml(plain)


def train(arguments: list[str]) -> None:
    """Train, or copy what the same training wrote before: on a CPU it is the same to the bit."""
    from train import main

    config = load_config(arguments)
    out, key = Path(config.run.out_dir), what_is_trained(config)
    is_new = not (out / RUN_CONFIG).exists()  # resuming counts as another training
    if is_new and key in _trained:
        shutil.copytree(_trained[key].name, out, dirs_exist_ok=True)
        (out / RUN_CONFIG).write_text(to_yaml(config))
        return
    main(arguments)
    if is_new:
        _trained[key] = tempfile.TemporaryDirectory()
        shutil.copytree(out, _trained[key].name, dirs_exist_ok=True)


def without_pictures(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(evaluation_report, "draw", lambda *_: [])
    for module, name in ((reports, "save"), (report, "draw"), (report, "draw_positions")):
        monkeypatch.setattr(module, name, lambda *_: None)


def sweep(monkeypatch, corpus, folder):
    """A function that runs the command in this process.

    It returns where the sweep is, and the commands that it ran.
    """
    for name in [*models.MODELS]:
        monkeypatch.delitem(models.MODELS, name)
    for name, model in MODELS.items():
        monkeypatch.setitem(models.MODELS, name, model)
    monkeypatch.setitem(BUDGETS, "smoke", BUDGET)
    ran = []

    def run_here(command, *_):
        """Instead of a child, which would take seconds to start."""
        ran.append(command[1:])
        program, *arguments = command[1:]
        if program == "train.py":
            # a step of twice the context takes twice as long, on every machine
            clock = count(step=load_config(arguments).model.context_length)
            time = SimpleNamespace(perf_counter=clock.__next__)
            monkeypatch.setattr("training.profiling.time", time)
            train(arguments)
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


def trained(ran):
    """Names of the runs that these commands train."""
    words = [word for command in ran for word in command if word.startswith("run.out_dir")]
    return [word.rpartition("/")[2] for word in words]
