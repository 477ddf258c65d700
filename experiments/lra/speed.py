"""Training speedup on Long Range Arena: Table 3 of the FlashAttention paper.

    python -m experiments.lra.speed --data out/data/lra --out docs/results/lra_speed.json
    python -m experiments.lra.speed --approximate --out docs/results/lra_speed_approximate.json

Times whole training steps of each task, with its data and configuration: batch, forward and
backward pass, clipping, optimizer, as in train.py. Attention is standard, Papilio's dense, or its
butterfly. All alternate in this process, once with CUDA graphs, as in training, and once
without. The command fails if the logits of Papilio's dense attention differ from standard ones.
--approximate adds approximations of attention from public packages (experiments.attention). They
save some work: they have no masks for padding and no dropout, need not be deterministic, and their
own parameters are not trained. BigBird cannot be captured in a CUDA graph. The command fails if a
task can have none of them.

If Retrieval's texts are missing, its steps are timed on the in-house pairs. These have the same
number and length of sequences, but more padding. An interrupted run leaves its measurements in
NAME.unfinished.json; --resume continues it.
"""

from pathlib import Path

from experiments.harness import Command, measure_rows
from experiments.lra.tasks import BENCHMARK, TASKS

command = Command(__name__, on_gpu=True)
add = command.add
add("--data", type=Path, default=Path("out/data/lra"))
add("--tasks", nargs="+", choices=TASKS, default=BENCHMARK, metavar="TASK")
add("--approximate", action="store_true", help="also approximations; pip install '.[peers]'")
add("--steps", type=int, default=100, help="steps per timing")
add("--repeats", type=int, default=5, help="timings of each attention")
add("--set", nargs="+", default=[], metavar="key=value", help="as in train.py")
command.read(out="docs/results/lra_speed.json", resume=True)

import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from configs.reader import read_config
from data.lra.curriculum import Curriculum
from data.lra.store import MANIFEST
from evaluation.results import Row
from experiments.attention.approximate import CAPTURABLE, EAGER
from experiments.attention.cases import Attention, Case, UnsupportedError
from experiments.lra.tables import approximate_speed_table, speed_table
from experiments.lra.tasks import ATTENTIONS, arguments_of, trainable_tasks
from experiments.timing import in_turns, reset_compiler_and_memory, spread, wall_seconds
from kernels.fused.linear import linear
from model.attention import SelfAttention
from model.classifier import Classifier
from model.residual import DeferredResidual, defer
from training.classification.config import ClassifyConfig
from training.classification.objectives import label_targets, target_loss
from training.distributed import Processes
from training.finite_steps import FiniteSteps
from training.numerics import autocast, deterministic_algorithms
from training.optim import learning_rate, make_optimizer, set_learning_rate
from training.step import GraphedStep, train_step

BASE, EXACT = "standard", "dense"
TOLERANCE = 0.05
"""Largest difference of a logit of exact attention in the first batch: bfloat16 has 8 bits."""
WARM_UP = 5  # steps: the first compiles, and the fifth replays a captured graph


class ApproximateAttention(nn.Module):
    """Self-attention with the layers of another one, and a function of q, k and v in between."""

    def __init__(self, inner: SelfAttention, attend: Attention) -> None:
        super().__init__()
        self.inner, self.attend = inner, attend

    def forward(self, x: Tensor, rotary: None = None, **options: Any) -> DeferredResidual:
        """Apply to x (B, T, C); the options of exact attention have no effect."""
        inner = self.inner
        qkv = linear(x, inner.qkv_proj.weight, inner.qkv_proj.bias)
        q, k, v = qkv.view(*x.shape[:2], 3, inner.n_head, inner.head_dim).unbind(2)
        branch = linear(self.attend(q, k, v).flatten(2), inner.out_proj.weight)
        return defer(branch, inner.out_proj.bias, inner.resid_dropout)


class Contender:
    """A model with one attention, and its training steps.

    Raises:
        UnsupportedError: an approximation cannot take the task's length, or is not installed.
    """

    def __init__(
        self,
        config: ClassifyConfig,
        curriculum: Curriculum,
        device: torch.device,
        approximation: str | None = None,
    ) -> None:
        self._config, self._curriculum, self._device = config, curriculum, device
        torch.manual_seed(config.run.seed)  # the same weights for all
        self.model = Classifier(config.model).to(device)
        self._stage = curriculum.stages[-1]  # the task itself
        self._deterministic = config.run.deterministic and approximation is None
        if approximation is not None:
            shape = config.model
            rows = self._stage.batch_size * shape.documents
            dtype = getattr(torch, config.run.dtype)
            case = Case(rows, shape.context_length, shape.n_head, shape.head_dim, dtype)
            for block in self.model.blocks:
                assert isinstance(block.attn, SelfAttention)
                block.attn = ApproximateAttention(block.attn, EAGER[approximation](case, device))
        self._optimizer = make_optimizer(self.model, config.optim, capturable=device.type == "cuda")
        compiles = partial(torch.compile, fullgraph=True, dynamic=False)
        fast: Any = compiles(self.model) if config.run.compile else self.model
        self._autocast = partial(autocast, config.run.dtype, device)
        alone = Processes(rank=0, world_size=1, device=device)
        finite = FiniteSteps(
            self._optimizer, alone, ["loss", "accuracy"], grad_clip=config.optim.grad_clip
        )
        answer = partial(target_loss, label_targets, self._autocast, alone)
        loss_of = lambda model, *batch: answer(model, self._stage.batch(*batch))  # noqa: E731
        self._step = partial(train_step, loss_of, fast, finite)
        self.batch_size, self._next = self._stage.batch_size, self._stage.first_step

    def prepare(self, *, captured: bool) -> None:
        """Turn CUDA graphs on or off, and take warm-up steps, of which the first compiles."""
        self._take = GraphedStep(self._step, self._optimizer, self._device, capture=captured)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        """Take one training step; call `prepare` first."""
        set_learning_rate(self._optimizer, learning_rate(self._next, self._config.optim))
        numbers, changes = self._curriculum.draw(self._next)
        with deterministic_algorithms(self._deterministic):
            self._take(numbers[None], changes[None])
        self._next += 1

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of the first batch without dropout, (examples, n_classes) float32."""
        numbers, changes = self._curriculum.draw(self._stage.first_step)
        batch = self._stage.batch(numbers.to(self._device), changes.to(self._device))
        self.model.eval()
        with self._autocast():
            logits = self.model(batch.tokens, batch.lengths, batch.positions).float()
        self.model.train()
        return logits


def timed_tasks(
    tasks: Sequence[str], data: Path, overrides: Sequence[str]
) -> dict[str, dict[str, ClassifyConfig]]:
    """Configurations by task and attention, for prepared tasks; prints skipped tasks.

    Raises:
        FileNotFoundError: a task is not prepared, and no other task can replace it.
    """
    retrieval, pairs = (
        (data / TASKS[name].folder / MANIFEST).exists() for name in ("retrieval", "pairs")
    )
    source = {task: task for task in tasks}
    if "retrieval" in source and pairs and not retrieval:
        source["retrieval"] = "pairs"  # it has the same configuration
    trainable = trainable_tasks([*source.values()], data)

    def configure(task: str, attention: str) -> ClassifyConfig:
        # Steps are those of the task itself, which need no images of earlier phases
        settings = ("data.phases=[]", *overrides)
        return read_config(ClassifyConfig, arguments_of(task, attention, data, overrides=settings))

    return {
        task: {attention: configure(used, attention) for attention in ATTENTIONS}
        for task, used in source.items()
        if used in trainable
    }


def measure(
    task: str,
    configs: dict[str, ClassifyConfig],
    device: torch.device,
    approximate: Sequence[str] = (),
    *,
    steps: int,
    repeats: int,
) -> Iterator[list[Row]]:
    """Yield the rows of a task: each attention of `configs`, with and without CUDA graphs.

    Of the approximations of `approximate`, those that cannot take the task are left out.

    Raises:
        ValueError: the logits of Papilio's exact attention differ from those of standard attention,
            torch.compile would replace standard attention, or none of `approximate` is installed
            and can take the task.
    """
    # Reset, because PyTorch counts recompilations per code object, which all models share, and
    # because contenders are in reference cycles, which keep the memory of the last task's graphs.
    reset_compiler_and_memory()
    config, on_gpu = configs[BASE], device.type == "cuda"
    if config.run.compile and config.run.dtype == "float32":
        raise ValueError(
            "run.dtype=float32 must be bfloat16: in float32, torch.compile replaces standard "
            "attention by PyTorch's fused one. Try --set run.dtype=bfloat16"
        )
    curriculum = Curriculum(
        config.data, config.model.context_length, config.optim.batch_size,
        seed=config.run.seed, rank=0, world_size=1, device=device,
    )  # fmt: skip
    configs = configs | dict.fromkeys(approximate, config)
    compiler = torch._dynamo.config
    limit = max(compiler.recompile_limit, len(configs))  # the model has a version for each
    with deterministic_algorithms(config.run.deterministic), compiler.patch(recompile_limit=limit):
        contenders, logits, peaks = {}, {}, {}
        for attention, its_config in configs.items():
            before = torch.cuda.memory_allocated() if on_gpu else 0
            approximation = attention if attention in approximate else None
            try:
                contender = Contender(its_config, curriculum, device, approximation)
            except UnsupportedError as reason:
                print(f"{task}: leaving out {attention}, which {reason}")
                continue
            contenders[attention] = contender
            logits[attention] = contender.logits()
            contender.prepare(captured=False)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                contender.step()
            peaks[attention] = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        if approximate and contenders.keys().isdisjoint(approximate):
            raise ValueError(
                f"{task}: none of the approximations can be timed, for the reasons above. If their "
                "packages are missing, install them: pip install '.[peers]'"
            )
        difference = logit_difference(logits, task)
        # share of non-padding tokens in a batch, over many examples
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
                        "density": None
                        if attention in approximate
                        else mask.density(config.model.context_length, causal=False),
                        **spread("step_ms", [1e3 * seconds for seconds in times]),
                        "peak_gib": peaks[attention] / 2**30,
                        "logits_differ_by": difference if attention == EXACT else None,
                    }
                )
    yield rows


def logit_difference(logits: dict[str, Tensor], task: str) -> float:
    """Largest difference of a logit between Papilio's exact attention and standard attention.

    Raises:
        ValueError: it exceeds TOLERANCE.
    """
    difference = (logits[EXACT] - logits[BASE]).abs().max().item()
    if not difference <= TOLERANCE:  # also where it is NaN
        raise ValueError(
            f"{task}: logits of Papilio's dense attention differ from standard attention's by up "
            f"to {difference:.3g} (allowed {TOLERANCE}): no speed is reported. Run the tests of "
            "kernels/ on this device"
        )
    return difference


def add_speedups(rows: list[Row], means: dict[str, Any]) -> None:
    """Add the `speedup` over standard attention to the rows, and its means over tasks to `means`.

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
            tasks = list(dict.fromkeys(r["task"] for r in counted))
            speedups: dict[str, list[float]] = {}
            for row in counted:
                speedups.setdefault(row["attention"], []).append(row["speedup"])
            means[mode] = {
                "tasks": tasks,
                "speedup": {
                    attention: statistics.geometric_mean(x)
                    for attention, x in speedups.items()
                    if len(x) == len(tasks)
                },
            }


@command.main
def main(args: Namespace) -> None:
    """Measure each task in its own stage."""
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda", torch.cuda.current_device())
    timing = {"steps": args.steps, "repeats": args.repeats}
    tasks = timed_tasks(args.tasks, args.data, args.set)
    approximate = CAPTURABLE if args.approximate else ()
    stages = [partial(measure, *task, device, approximate, **timing) for task in tasks.items()]
    means: dict[str, Any] = {}  # filled by add_speedups, and written with the rows
    relate = partial(add_speedups, means=means)
    table = approximate_speed_table if args.approximate else speed_table
    measure_rows(args, stages, table, relate, **timing, geometric_means=means)
