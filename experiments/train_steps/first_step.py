"""Time from a command to the end of its first training step, with cold and warm caches.

python -m experiments.train_steps.first_step out/data/mine --nanogpt FOLDER

Each contender trains GPT-2 small by its usual command, on 32,768 tokens per step at a context of
1,024, and is stopped after the first step. With cold caches, the folders of TorchInductor and
Triton are empty. karpathy/nanoGPT evaluates before its first step: that time is not counted.
"""

from pathlib import Path

from experiments.harness import Command, measure_rows

command = Command(__name__, on_gpu=True)
command.add("data", type=Path, metavar="FOLDER", help="text prepared with GPT-2's tokenizer")
command.add("--nanogpt", type=Path, help="folder of a nanoGPT checkout to compare with")
command.add(
    "--rounds",
    type=int,
    default=2,
    help="rounds of one start with cold caches and two with warm ones",
)
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
from evaluation.markdown import dict_table
from evaluation.results import Row

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
CONTEXT, BATCH = 1024, 32
NANOGPT = (
    "model.bias=false", "model.dropout=0", "model.attention_dropout=0",
    "model.scale_attn_by_inverse_layer_idx=false",
)  # fmt: skip
"""Overrides that turn the shipped configuration into the default model of nanoGPT."""


class Contender(NamedTuple):
    """A command, and the prefixes of the lines that end its phases: start, (evaluation,) step."""

    name: str
    argv: Sequence[str]
    folder: Path
    ends: Sequence[str]


def papilio(data: Path, scratch: Path, name: str, *settings: str) -> Contender:
    """Papilio: `train.py` on the shipped configuration of GPT-2 small, with some overrides."""
    overrides = [
        f"data.path={data.resolve()}", f"run.out_dir={scratch / name}", "run.log_every=1",
        f"optim.batch_tokens={BATCH * CONTEXT}", f"optim.micro_batch_size={BATCH}", *settings,
    ]  # fmt: skip
    argv = ["train.py", "configs/paper/gpt2_small_1k.yaml", *overrides]
    return Contender(name, argv, Path.cwd(), ["output directory: ", "step 1/"])


def nanogpt(data: Path, scratch: Path, checkout: Path) -> Contender:
    """nanoGPT: its train.py in a copy of the checkout, on the same tokens."""
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
    """Start a contender once and return the seconds of each phase.

    Raises:
        RuntimeError: the command ended before its first step. The message has its last lines.
    """
    folders = {name: str(caches / name) for name in CACHES}
    env = {**os.environ, **folders, "PYTHONUNBUFFERED": "1"}
    times, lines = [time.perf_counter()], []
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
        raise RuntimeError(f"{contender.name} ended before its first step:\n{''.join(lines[-20:])}")
    seconds = [after - before for before, after in pairwise(times)]
    return {"start_s": seconds[0], "step_s": seconds[-1]}


def measure(contender: Contender, rounds: int) -> Iterator[list[Row]]:
    """Yield a row per state of the caches. Each round starts once cold, then twice warm."""
    starts: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for state in ("cold", "warm", "warm"):
                starts.setdefault(state, []).append(start(contender, Path(folder) / str(number)))
                print(contender.name, state, starts[state][-1], flush=True)
    for state, rows in starts.items():
        yield [{"name": contender.name, "caches": state, "starts": rows, **medians(rows)}]


def medians(starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each phase, and of their sum."""
    sums = {"total_s": median(sum(row.values()) for row in starts)}
    return {name: median(row[name] for row in starts) for name in starts[0]} | sums


def first_step_table(result: Row) -> str:
    """Markdown table of seconds to the end of the first step."""
    return dict_table(
        {
            "trainer": row["name"],
            "caches": row["caches"],
            "startup": f"{row['start_s']:.1f} s",
            "first step": f"{row['step_s']:.1f} s",
            "total": f"{row['total_s']:.1f} s",
        }
        for row in result["rows"]
    )


@command.main
def main(args: Namespace) -> None:
    """Run the command."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        contenders = [
            papilio(args.data, scratch, "Papilio, nanoGPT's model", *NANOGPT),
            papilio(args.data, scratch, "Papilio, the paper's model"),
        ]
        if args.nanogpt is not None:
            contenders.insert(0, nanogpt(args.data, scratch, args.nanogpt))
        start(contenders[0], scratch / "caches")  # loads PyTorch's files into the page cache
        stages = [partial(measure, contender, args.rounds) for contender in contenders]
        measure_rows(args, stages, first_step_table)
