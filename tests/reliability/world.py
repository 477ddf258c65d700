"""A text, images, and runs of a GPT and of a classifier that learn them in a second or two."""

import io
import json
import random
import shutil
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import train
from data.text.prepare import prepare
from data.text.sources import open_source
from tests.training.classification.tiny_classifier import CPU, make_config
from training.command_line import errors_as_sentences
from training.metrics import read_metrics

TIMES = ("tokens_per_s", "examples_per_s", "gpu_hours", "memory_gib", "wall_s")
FINE, SENTENCE, TRACEBACK = "went on", "a sentence", "a traceback"
KINDS = ("silent", "traceback", "hang", "leak")
"""Of failures: what nobody notices, an error that is not a sentence, an endless wait, and what was
read or run that must not be."""


class World:
    """A folder with data, and finished runs to copy: `gpt` of 8 steps, `classifier` of 24."""

    def __init__(self, folder: Path) -> None:
        """Make and train all of it; takes some seconds."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        generator = random.Random(0)
        words = ["the", "cat", "a", "dog", "one", "bird", "sees", "hears", "follows"]
        for name, count in (("train", 40), ("val", 8)):
            lines = [
                json.dumps({"text": " ".join(generator.choices(words, k=150))})
                for _ in range(count)
            ]
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        source = open_source([str(folder / "train.jsonl")], val=[str(folder / "val.jsonl")])
        prepare(source, folder / "text", train_bpe=300)
        self.config = folder / "gpt.yaml"
        self.config.write_text(
            f"""
            model: {{context_length: 32, n_layer: 2, n_head: 2, n_embd: 32, dropout: 0.1}}
            data: {{path: {folder / "text"}}}
            optim: {{max_steps: 8, batch_tokens: 256, micro_batch_size: 2, lr: 1.0e-2,
                     warmup_steps: 2}}
            run: {{out_dir: {folder / "gpt"}, device: cpu, dtype: float32, compile: false,
                   log_every: 1, eval_every: 4, save_every: 4}}
            """
        )
        self.classes = make_config(folder)
        for argv in (
            [self.config],
            [self.classes, *CPU, f"run.out_dir={folder / 'classifier'}"],
        ):
            assert outcome(train.main, *argv)[0] == FINE

    def copy(self, name: str, to: str) -> Path:
        """A copy of a run or of data, in place of an earlier one."""
        shutil.rmtree(self.folder / to, ignore_errors=True)
        return shutil.copytree(self.folder / name, self.folder / to)


def outcome(command: Callable[[list[str]], object], *arguments: object) -> tuple[str, str]:
    """How a command ended, called as from a terminal, and the last that it said."""
    heard = io.StringIO()
    try:
        with redirect_stdout(heard), redirect_stderr(heard), errors_as_sentences():
            command([*map(str, arguments)])
    except SystemExit as end:
        said = str(end.code)
        return (SENTENCE if said.startswith("error: ") or end.code == 2 else FINE), said
    except BaseException as error:  # noqa: BLE001 a panic of a library counts, too
        return TRACEBACK, f"{type(error).__name__}: {error}"
    return FINE, ""


def told(run: Path) -> list[dict]:
    """The records of a run without what depends on the clock."""
    return [{k: v for k, v in r.items() if k not in TIMES} for r in read_metrics(run)]


def counted(what: str, tries: int, failures: Iterable[str], **counts: int) -> dict:
    """A row of the result; each failure begins with its kind, one of KINDS, and a colon."""
    failures = [*failures]
    return {"what": what, "tries": tries, "failed": len(failures), **counts, "failures": failures}
