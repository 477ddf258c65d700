"""Time from a command to the end of its first training step: GPT-2 small, cold and warm caches.

python -m experiments.train_steps.first_step out/data/mine --nanogpt FOLDER

Each contender is started as its user starts it, on 32,768 tokens a step at a context of 1,024, and
stopped after the first step. With cold caches, the folders of TorchInductor and Triton are new.
karpathy/nanoGPT evaluates before its first step: that time is measured, and not counted.
"""

from pathlib import Path

from experiments.harness import Command, measure_rows

command = Command(__name__, on_gpu=True)
command.add("data", type=Path, metavar="FOLDER", help="text prepared with GPT-2's tokenizer")
command.add("--nanogpt", type=Path, help="folder of a nanoGPT checkout, to compare")
command.add("--starts", type=int, default=3, help="with warm caches; with cold ones one less")
command.read(out="docs/results/first_step.json")

import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from data.text.shards import TokenStream
from evaluation.results import Row
from experiments.reports import table

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
CONTEXT, BATCH = 1024, 32


class Contender(NamedTuple):
    """A command, and how the lines begin with which its phases end: start, (evaluation,) step."""

    name: str
    argv: Sequence[str]
    folder: Path
    ends: Sequence[str]


def papilio(data: Path, scratch: Path) -> Contender:
    """`train.py` on the shipped configuration of GPT-2 small, without biases as nanoGPT's."""
    settings = {
        "data.path": data.resolve(), "run.out_dir": scratch / "run", "run.log_every": 1,
        "model.bias": "false", "model.dropout": 0, "model.attention_dropout": 0,
        "optim.batch_tokens": BATCH * CONTEXT, "optim.micro_batch_size": BATCH,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()]
    argv = ["train.py", "configs/gpt2_small_1k.yaml", *overrides]
    return Contender("Papilio", argv, Path.cwd(), ["output directory: ", "step 1/"])


def nanogpt(data: Path, scratch: Path, checkout: Path) -> Contender:
    """nanoGPT's train.py in a copy of its checkout, on the same tokens."""
    folder = scratch / "nanogpt"
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
    (folder / "data" / "text").mkdir(parents=True)
    for split in ("train", "val"):
        stream = TokenStream(data, split)
        stream.read(0, len(stream)).astype(np.uint16).tofile(folder / f"data/text/{split}.bin")
    argv = [
        "train.py", "--dataset=text", "--eval_iters=1", f"--block_size={CONTEXT}",
        f"--batch_size={BATCH}", "--gradient_accumulation_steps=1",
    ]  # fmt: skip
    return Contender("nanoGPT", argv, folder, ["compiling the model", "step 0: ", "iter 0: "])


def start(contender: Contender, caches: Path) -> dict[str, float]:
    """Seconds of each phase of one start.

    Raises:
        RuntimeError: the command ended before its first step; the error has its last lines.
    """
    folders = {name: str(caches / name) for name in CACHES}
    env = {**os.environ, **folders, "PYTHONUNBUFFERED": "1"}
    begun = time.perf_counter()
    times, lines = [begun], []
    with subprocess.Popen(
        [sys.executable, *contender.argv], cwd=contender.folder, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(contender.ends[len(times) - 1]):
                times.append(time.perf_counter())
                if len(times) > len(contender.ends):
                    break
        process.kill()
    if len(times) <= len(contender.ends):
        raise RuntimeError(f"{contender.name} took no step:\n{''.join(lines[-20:])}")
    seconds = [after - before for before, after in pairwise(times)]
    return {"start_s": seconds[0], "step_s": seconds[-1]}


def measure(data: Path, checkout: Path | None, starts: int) -> Iterator[list[Row]]:
    """A row for each contender and state of the caches."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        contenders = [papilio(data, scratch)]
        if checkout is not None:
            contenders.append(nanogpt(data, scratch, checkout))
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for contender in contenders:  # reads its files and PyTorch's from the disk
            start(contender, scratch / contender.name)
        for number in range(starts):
            for contender in contenders:
                shutil.rmtree(scratch / "run", ignore_errors=True)
                warm = start(contender, scratch / contender.name)
                found.setdefault((contender.name, "warm"), []).append(warm)
                if number:
                    shutil.rmtree(scratch / "run", ignore_errors=True)
                    cold = start(contender, scratch / f"{contender.name}_{number}")
                    found.setdefault((contender.name, "cold"), []).append(cold)
        for (name, caches), rows in sorted(found.items(), reverse=True):
            yield [{"name": name, "caches": caches, "starts": rows, **medians(rows)}]


def medians(starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians of the phases and of their sum."""
    sums = {"total_s": median(sum(row.values()) for row in starts)}
    return {name: median(row[name] for row in starts) for name in starts[0]} | sums


def first_step_table(result: Row) -> str:
    """Seconds to the end of the first step, in Markdown."""
    return table(
        {
            "trainer": row["name"],
            "caches": row["caches"],
            "start-up": f"{row['start_s']:.1f} s",
            "first step": f"{row['step_s']:.1f} s",
            "together": f"{row['total_s']:.1f} s",
        }
        for row in result["rows"]
    )


@command.main
def main(args: Namespace) -> None:
    """Run the command."""
    measure_rows(args, [partial(measure, args.data, args.nanogpt, args.starts)], first_step_table)
