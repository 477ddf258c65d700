"""How much faster Long Range Arena trains: the speed-up of the FlashAttention paper's Table 3.

    python -m experiments.lra.speed --data out/data/lra --out docs/results/lra_speed.json

For each task, with its data and its configuration, times whole training steps with standard
attention, ours, and ours under a butterfly: batch, forward and backward pass, clipping, optimizer,
as train.py does them. All three run in this process and take turns; once as CUDA graphs, as they
are trained, and once launched kernel by kernel. Nothing is reported of attention that gives other
logits than standard attention does.

Where Retrieval's texts are missing, its steps are timed on the in-house pairs, which are as many
and as long in memory, but have more padding. A run that is stopped leaves what it measured in
NAME.unfinished.json; --resume goes on.
"""

from pathlib import Path

from experiments.harness import Command, measure_rows
from experiments.lra.tasks import BENCHMARK, TASKS

command = Command(__name__, on_gpu=True)
add = command.add
add("--data", type=Path, default=Path("out/data/lra"))
add("--tasks", nargs="+", choices=TASKS, default=BENCHMARK, metavar="TASK")
add("--steps", type=int, default=100, help="steps of one timing")
add("--repeats", type=int, default=5, help="timings of each attention")
add("--set", nargs="+", default=[], metavar="key=value", help="as for train.py")
command.read(out="docs/results/lra_speed.json", resume=True)

import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configs.reader import read_config
from data.lra.curriculum import Curriculum
from data.lra.store import MANIFEST
from evaluation.results import Row
from experiments.lra.tables import speed_table
from experiments.lra.tasks import ATTENTIONS, arguments_of, trainable_tasks
from experiments.timing import in_turns, reset_compiler_and_memory, spread, wall_seconds
from model.classifier import Classifier
from training.classification.config import ClassifyConfig
from training.classification.objectives import answer_loss, ask_labels
from training.distributed import Processes
from training.finite_steps import FiniteSteps
from training.numerics import autocast, deterministic_algorithms
from training.optim import learning_rate, make_optimizer, set_learning_rate
from training.step import GraphedStep, train_step

BASE, EXACT = "standard", "dense"
TOLERANCE = 0.05
"""Most that a logit of exact attention may differ in the first batch: bfloat16 has 8 bits."""
WARM_UP = 5  # steps: the first compiles, and the fifth of a captured one replays


class Contender:
    """A model with one kind of attention, and its training steps."""

    def __init__(self, config: ClassifyConfig, curriculum: Curriculum, device: torch.device):
        self._config, self._curriculum, self._device = config, curriculum, device
        torch.manual_seed(config.run.seed)  # the same weights for all
        self.model = Classifier(config.model).to(device)
        self._optimizer = make_optimizer(self.model, config.optim, capturable=device.type == "cuda")
        compiles = partial(torch.compile, fullgraph=True, dynamic=False)
        fast: Any = compiles(self.model) if config.run.compile else self.model
        self._autocast = partial(autocast, config.run.dtype, device)
        alone = Processes(rank=0, world_size=1, device=device)
        finite = FiniteSteps(
            self._optimizer, alone, ["loss", "accuracy"], grad_clip=config.optim.grad_clip
        )
        answer = partial(answer_loss, ask_labels, self._autocast, alone)
        loss_of = lambda model, *batch: answer(model, self._lesson.batch(*batch))  # noqa: E731
        self._step = partial(train_step, loss_of, fast, finite)
        self._lesson = curriculum.lessons[curriculum.number(config.optim.max_steps - 1)]
        self.batch_size, self._next = self._lesson.batch_size, self._lesson.first_step

    def prepare(self, *, captured: bool) -> None:
        """Steps are CUDA graphs from now on, or not; takes some, of which the first compiles."""
        self._take = GraphedStep(self._step, self._optimizer, self._device, capture=captured)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        """Train for one step, once `prepare` was called."""
        set_learning_rate(self._optimizer, learning_rate(self._next, self._config.optim))
        numbers, changes = self._curriculum.draw(self._next)
        self._take(numbers[None], changes[None])
        self._next += 1

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Of the first batch, without dropout; (examples, n_classes) float32."""
        numbers, changes = self._curriculum.draw(self._lesson.first_step)
        batch = self._lesson.batch(numbers.to(self._device), changes.to(self._device))
        self.model.eval()
        with self._autocast():
            found = self.model(batch.tokens, batch.lengths, batch.places).float()
        self.model.train()
        return found


def timed_tasks(
    tasks: Sequence[str], data: Path, overrides: Sequence[str]
) -> dict[str, dict[str, ClassifyConfig]]:
    """Configurations by task and attention, of what is prepared; prints what is left out.

    Raises:
        FileNotFoundError: a task is not prepared, and no other can stand in.
    """
    retrieval, pairs = (
        (data / TASKS[name].folder / MANIFEST).exists() for name in ("retrieval", "pairs")
    )
    source = {task: task for task in tasks}
    if "retrieval" in source and pairs and not retrieval:
        source["retrieval"] = "pairs"  # whose configuration is the same
    there = trainable_tasks([*source.values()], data)

    def configure(task: str, attention: str) -> ClassifyConfig:
        return read_config(ClassifyConfig, arguments_of(task, attention, data, overrides=overrides))

    return {t: {a: configure(of, a) for a in ATTENTIONS} for t, of in source.items() if of in there}


def measure(
    task: str, configs: dict[str, ClassifyConfig], device: torch.device, *, steps: int, repeats: int
) -> Iterator[list[Row]]:
    """The rows of a task: each attention of `configs`, as CUDA graphs and without.

    Raises:
        ValueError: our exact attention gives other logits than standard attention, or standard
            attention would not be timed.
    """
    # recompilations are counted by code, which all models share; contenders are in cycles, so that
    # those of the last task would keep the memory of their graphs
    reset_compiler_and_memory()
    config, on_gpu = configs[BASE], device.type == "cuda"
    if config.run.compile and config.run.dtype == "float32":
        raise ValueError(
            "run.dtype=float32: torch.compile then recognizes standard attention and runs "
            "PyTorch's fused one in its place; take --set run.dtype=bfloat16"
        )
    curriculum = Curriculum(
        config.data, config.model.context_length, config.optim.batch_size,
        seed=config.run.seed, rank=0, world_size=1, device=device,
    )  # fmt: skip
    with deterministic_algorithms(config.run.deterministic):
        contenders, logits, peaks = {}, {}, {}
        for attention, its_config in configs.items():
            before = torch.cuda.memory_allocated() if on_gpu else 0
            contender = contenders[attention] = Contender(its_config, curriculum, device)
            logits[attention] = contender.logits()
            contender.prepare(captured=False)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                contender.step()
            peaks[attention] = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        difference = logit_difference(logits, task)
        # the share of the places in a batch that hold no padding, over many examples
        numbers = torch.arange(min(len(curriculum.task), 1024), device=device)
        batch = curriculum.task.batch(numbers, torch.zeros_like(numbers))
        n_tokens = batch.tokens.shape[1]
        share = 1.0 if batch.lengths is None else batch.lengths.double().mean().item() / n_tokens
        rows = []
        for captured in (False, True) if on_gpu else (False,):
            if captured:
                for contender in contenders.values():
                    contender.prepare(captured=True)
            calls = {attention: contender.step for attention, contender in contenders.items()}
            seconds = in_turns(calls, repeats, partial(wall_seconds, n=steps))
            for attention, times in seconds.items():
                mask = configs[attention].model.mask
                rows.append(
                    {
                        "task": task,
                        "data": Path(config.data.path).name,
                        "context_length": config.model.context_length,
                        "documents": config.model.documents,
                        "tokens_share": share,
                        "batch_size": contenders[BASE].batch_size,
                        "dtype": config.run.dtype,
                        "attention": attention,
                        "captured": captured,
                        "block_size": None if mask.pattern == "dense" else mask.block_size,
                        "density": mask.density(config.model.context_length, causal=False),
                        **spread("step_ms", [1e3 * seconds for seconds in times]),
                        "peak_gib": peaks[attention] / 2**30,
                        "logits_differ_by": difference if attention == EXACT else None,
                    }
                )
    yield rows


def logit_difference(logits: dict[str, Tensor], task: str) -> float:
    """The largest difference of a logit between our exact attention and standard attention.

    Raises:
        ValueError: further than TOLERANCE.
    """
    found = (logits[EXACT] - logits[BASE]).abs().max().item()
    if not found <= TOLERANCE:  # also where it is NaN
        raise ValueError(
            f"{task}: logits of our dense attention differ from standard attention's by up to "
            f"{found:.3g} (allowed {TOLERANCE}): no speed is reported. Run the tests of kernels/ "
            "on this device"
        )
    return found


def add_speedups(rows: list[Row], means: dict[str, Any]) -> None:
    """Add `speedup` over standard attention to the rows, and the means over tasks to `means`.

    The paper counts "the speedup as the geometric mean of the wall-clock speedup of each task"
    (appendix E.3).
    """
    base = {(r["task"], r["captured"]): r["step_ms"] for r in rows if r["attention"] == BASE}
    for row in rows:
        row["speedup"] = base[row["task"], row["captured"]] / row["step_ms"]
    means.clear()
    for mode, captured in (("captured", True), ("plain", False)):
        counted = [r for r in rows if r["captured"] == captured and r["task"] in BENCHMARK]
        if counted:
            of = {a: [r["speedup"] for r in counted if r["attention"] == a] for a in ATTENTIONS}
            means[mode] = {
                "tasks": list(dict.fromkeys(r["task"] for r in counted)),
                "speedup": {a: statistics.geometric_mean(x) for a, x in of.items()},
            }


@command.main
def main(args: Namespace) -> None:
    """Measure each task in a stage of its own."""
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda", torch.cuda.current_device())
    how = {"steps": args.steps, "repeats": args.repeats}
    tasks = timed_tasks(args.tasks, args.data, args.set)
    stages = [partial(measure, *task, device, **how) for task in tasks.items()]
    means: dict[str, Any] = {}  # filled by add_speedups, and written with the rows
    relate = partial(add_speedups, means=means)
    measure_rows(args, stages, speed_table, relate, **how, geometric_means=means)
