"""Runs of karpathy/nanoGPT's own train.py, from a checkout, on the text of our token shards."""

import pickle
import re
import shutil
from functools import partial
from hashlib import sha256
from math import nan, prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data.files import read_text
from data.text.batches import IGNORE, ValidationBatches
from data.text.shards import Manifest, TokenStream
from evaluation.results import Row
from experiments.gpu_pool import Task, groups_of_gpus, python_command, run_tasks
from experiments.harness import load_module
from experiments.time_to_loss.report import NANOGPT
from training.distributed import Processes
from training.environment import read_starts, record_start
from training.language.task import evaluate
from training.numerics import autocast

SOURCES = ("train.py", "model.py", "configurator.py")
SECONDS = 600  # of training
PILOT_STEPS = 60  # of a short run that measures the time of a step
SKIPPED = 10  # first iterations: they compile, and the clocks of the GPU settle
POINTS = 6  # evaluations of a run

# 32,768 tokens a step, the learning rate and the betas of the budget `minutes` of Table 4. As in
# our runs, the learning rate ends at 0 and nothing is dropped out. Its own weight decay and
# clipping are those of our GPT-2 already.
SETTINGS: dict[str, Any] = {
    "block_size": 4096,
    "batch_size": 8,
    "gradient_accumulation_steps": 1,
    "dropout": 0.0,
    "bias": False,
    "learning_rate": 1e-3,
    "min_lr": 0.0,
    "beta2": 0.95,
    # Every iteration waits for its loss, so that the time it logs is that of a whole step. With a
    # larger interval it would be the time to launch a step.
    "log_interval": 1,
    "always_save_checkpoint": True,
    "compile": True,
    "device": "cuda",
    "dtype": "bfloat16",
}
EVAL_BATCHES = 20  # of random windows, for the points of the curve before the last

# cuDNN attention is the only one left on a GPU: its fastest, and another choice would be an error.
# The compiler has a cache of its own, as cached graphs do not record the attention that was chosen
# for them.
_LAUNCHER = """\
import os, runpy, sys
os.chdir(sys.argv.pop(1))
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("cache")
import torch
if torch.cuda.is_available():
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
runpy.run_path("train.py", run_name="__main__")
"""


def check_nanogpt(checkout: Path, data: Path) -> None:
    """Check that the checkout has all sources, and that nanoGPT can read the ids of the text.

    Raises:
        FileNotFoundError: a source or the text is missing.
        ValueError: the ids are not uint16.
    """
    missing = [name for name in SOURCES if not (checkout / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"--nanogpt={checkout} must be a checkout of karpathy/nanoGPT, but it has no "
            f"{', '.join(missing)}. Try git clone https://github.com/karpathy/nanoGPT"
        )
    manifest = Manifest.load(data)
    if manifest.dtype != "uint16":
        raise ValueError(
            f"--data={data} has ids in {manifest.dtype} for a vocabulary of "
            f"{manifest.tokenizer.vocab_size:,}, but nanoGPT reads uint16 only. Prepare the text "
            "with a tokenizer of at most 65,535 entries, such as GPT-2's"
        )


def measure(checkout: Path, data: Path, folder: Path) -> Row:
    """Train for SECONDS and score the result; the run is a row of the result.

    A training that is finished in `folder` is not repeated.

    Raises:
        SystemExit: nanoGPT failed.
        ValueError: its steps are too slow.
    """
    set_up(checkout, data, folder)
    pilot = train(folder, PILOT_STEPS, eval_every=PILOT_STEPS + 1, eval_batches=1)
    eval_every = int(SECONDS / pilot.step_s / POINTS)
    if POINTS * eval_every <= PILOT_STEPS:
        raise ValueError(
            f"a step of nanoGPT took {pilot.step_s:.2f} s, so that {SECONDS} s are too short for "
            f"more than {PILOT_STEPS} steps. Use a GPU"
        )
    steps = POINTS * eval_every
    log = train(folder, steps, eval_every=eval_every, eval_batches=EVAL_BATCHES)
    run = folder / f"steps_{steps}"
    val_loss = score(checkout, run / "ckpt.pt", data)
    losses = {step: loss for step, loss in log.losses.items() if step > 0} | {steps: val_loss}
    torch.cuda.empty_cache()  # other runs follow
    sizes = ("block_size", "batch_size", "gradient_accumulation_steps")
    return {
        "contender": NANOGPT,
        "steps": steps,
        "tokens": steps * prod(SETTINGS[name] for name in sizes),
        "seconds": steps * log.step_s,
        "compile_s": pilot.first_s,
        "val_loss": val_loss,
        "curve": [
            {"steps": step, "seconds": step * log.step_s, "val_loss": loss}
            for step, loss in losses.items()
        ],
        "sources": {name: sha256((checkout / name).read_bytes()).hexdigest() for name in SOURCES},
        "starts": read_starts(run),
    }


def set_up(checkout: Path, data: Path, folder: Path) -> None:
    """Create a working folder: links to the sources, and the text as nanoGPT reads it."""
    text = folder / "data" / "text"
    text.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to((checkout / name).resolve())
    for split in ("train", "val"):
        stream = TokenStream(data, split)
        stream.verify()
        with (text / f"{split}.bin").open("wb") as whole:
            for shard in stream.info.shards:
                with (data / shard.name).open("rb") as part:
                    shutil.copyfileobj(part, whole)
    # As nanoGPT's default for GPT-2, a multiple of 64 entries: 50,304 for 50,257.
    vocab_size = -(-Manifest.load(data).tokenizer.vocab_size // 64) * 64
    (text / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


class Log(NamedTuple):
    """Times and losses that nanoGPT printed."""

    last: int
    """Last iteration; -1 if there is none."""
    first_s: float
    """Seconds of the first iteration, which compiles and evaluates."""
    step_s: float
    """Median seconds of an iteration after the first SKIPPED."""
    losses: dict[int, float]
    """Its own estimates of the validation loss, by step."""


def parse_log(text: str) -> Log:
    """Parse the output of nanoGPT's train.py; NaN for times that are not there yet."""
    iterations = re.findall(r"^iter (\d+): loss \S+, time ([\d.]+)ms", text, re.MULTILINE)
    seconds = [float(ms) / 1000 for _, ms in iterations]
    evaluations = re.findall(
        r"^step (\d+): train loss \S+, val loss ([-+.\w]+)", text, re.MULTILINE
    )
    return Log(
        last=int(iterations[-1][0]) if iterations else -1,
        first_s=seconds[0] if seconds else nan,
        # Iterations with an evaluation take longer, but they are too few to move the median.
        step_s=median(seconds[SKIPPED:]) if len(seconds) > SKIPPED else nan,
        losses={int(step): float(loss) for step, loss in evaluations},
    )


def train(folder: Path, steps: int, *, eval_every: int, eval_batches: int) -> Log:
    """Run train.py in a working folder for some steps, or read the log of a finished run.

    Its weights are those after exactly `steps` updates if `eval_every` divides them: it saves
    before the last iteration, whose update is lost.

    Raises:
        SystemExit: nanoGPT failed, or was stopped.
    """
    run, log = folder / f"steps_{steps}", folder / f"steps_{steps}.log"
    if not log.exists() or parse_log(read_text(log)).last < steps:
        log.unlink(missing_ok=True)  # tasks append to it
        run.mkdir(exist_ok=True)
        record_start(run, 0)
        settings = SETTINGS | {
            "dataset": "text",
            "out_dir": run.name,
            "max_iters": steps,
            "lr_decay_iters": steps,
            "warmup_iters": min(steps // 4, max(steps // 100, 200)),  # as in our runs
            "eval_interval": eval_every,
            "eval_iters": eval_batches,
        }
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        command = ("-u", "-c", _LAUNCHER, str(folder.resolve()), *arguments)
        task = Task(
            name=f"nanoGPT, {steps:,} steps",
            needs=frozenset(),
            commands=lambda n_gpu: [python_command(n_gpu, *command)],
            log=log,
        )
        run_alone(task)
    return parse_log(read_text(log))


def run_alone(task: Task) -> None:
    """Run a task on the first GPU.

    Raises:
        SystemExit: it failed or was stopped; what failed was printed.
    """
    if run_tasks([task], groups_of_gpus(1)[:1], partial(print, flush=True)):
        raise SystemExit(1)


class _SummedLoss(nn.Module):
    """nanoGPT's model, called as ours in a validation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, *, doc_start: None, reduction: str
    ) -> Tensor:
        """Loss summed over all targets but IGNORE, which nanoGPT calls -1."""
        ignored = targets == IGNORE
        _, mean = self.model(tokens, targets.masked_fill(ignored, -1))
        return mean * (~ignored).sum()


def score(checkout: Path, checkpoint: Path, data: Path) -> float:
    """Validation loss of a checkpoint of nanoGPT, computed like `val_loss` in our runs, nats."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    module = load_module("nanogpt_model", checkout / "model.py")
    model = module.GPT(module.GPTConfig(**saved["model_args"]))
    # Weights of a compiled model have this prefix.
    model.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()})
    stream = TokenStream(data, "val")
    batches = ValidationBatches(stream, SETTINGS["block_size"], SETTINGS["batch_size"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    activations = partial(autocast, "bfloat16" if device.type == "cuda" else "float32", device)
    processes = Processes(rank=0, world_size=1, device=device)
    loss, _ = evaluate(_SummedLoss(model).to(device), batches, processes, activations)
    return loss
