"""Seconds of a training step of the modern recipe, without each of its parts and with candidates.

python -m experiments.train_steps.recipe_step [--parts PART ...]

Each model of experiments.recipe takes the step of train.py, compiled, on random tokens, at each
context and batch size of its training. Models are measured one after the other in this process, the
recipe first and last.
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command, Result, measure_rows
from experiments.table4.parts import NAMES, WITH, WITHOUT

TIMED = {name: model for name, model in NAMES.items() if not {**WITHOUT, **WITH}[model].same_steps}

command = Command(__name__, on_gpu=True)
command.add("--parts", nargs="+", choices=TIMED, default=[*TIMED], metavar="PART",
    help=f"parts and candidates (default: {', '.join(TIMED)})")  # fmt: skip
command.add("--steps", type=int, default=10, help="steps per timing, of five")
command.read(out="docs/results/recipe_step.json", resume=True)

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.table4.jobs import make_jobs
from experiments.table4.models import BUDGETS
from experiments.timing import reset_compiler_and_memory, spread, wall_seconds
from experiments.train_steps.contenders import Step, check_last_loss, step_of
from training.distributed import Processes
from training.language.config import TrainConfig
from training.language.stages import Stage

AGAIN = "recipe, again"
VOCABULARY = 50_257  # of GPT-2's tokenizer
BATCH_TOKENS = BUDGETS["minutes"].batch_tokens


def configs_of(models: Sequence[str]) -> dict[str, TrainConfig]:
    """Configurations of models, as experiments.recipe trains them."""
    jobs = make_jobs(
        models, BUDGETS["minutes"], Path("unused"),
        data=Path("unused"), vocab_size=VOCABULARY, seeds=1,
    )  # fmt: skip
    return {job.name: job.config for job in jobs}


def step_at(config: TrainConfig, stage: Stage, device: torch.device) -> Step:
    """Training step at the context and batch size of a stage, on random tokens."""
    torch.manual_seed(0)
    micro_batch = stage.micro_batch_size, stage.context_length
    shape = stage.batch_tokens // math.prod(micro_batch), *micro_batch
    tokens = torch.randint(config.model.vocab_size, shape, device=device)
    targets = tokens.roll(-1, dims=-1)
    return step_of(config, Processes(rank=0, world_size=1, device=device), tokens, targets)


def measure(
    name: str, config: TrainConfig, steps: int, make: Callable[..., Step] = step_at
) -> Iterator[list[Row]]:
    """Yield a row for each stage of a model: tokens and seconds of a step."""
    for stage in config.stages:
        row = {"name": name, "context_length": stage.context_length, "steps": stage.steps}
        reset_compiler_and_memory()
        step = make(config, stage, torch.device("cuda"))
        for _ in range(6):  # compiles, and captures if the run does
            step()
        times = spread("step_s", [wall_seconds(step, steps) for _ in range(5)])
        check_last_loss(step().item(), f"{name} at {stage.context_length:,} tokens")
        yield [row | {"tokens": stage.batch_tokens, **times}]


def seconds_per_token(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds of a token of each model, the mean over the steps of its rows."""
    seconds, tokens = Counter[str](), Counter[str]()
    for row in rows:
        seconds[row["name"]] += row["steps"] * row["step_s"]
        tokens[row["name"]] += row["steps"] * row["tokens"]
    return {name: seconds[name] / tokens[name] for name in seconds}


def relative_time(seconds: Mapping[str, float], with_it: str, without: str) -> float | None:
    """Time of a token with a part over that without it, 1 if the steps are the same.

    None if one of the models was not measured.
    """
    parts = {**WITHOUT, **WITH}
    if parts[without if without in parts else with_it].same_steps:
        return 1.0
    if not {with_it, without} <= seconds.keys():
        return None
    return seconds[with_it] / seconds[without]


def step_table(result: Result) -> str:
    """Markdown table of milliseconds of BATCH_TOKENS by context, and relative over the training."""
    rows = result["rows"]
    seconds = seconds_per_token(rows)
    by_context = {
        context: seconds_per_token([row for row in rows if row["context_length"] == context])
        for context in sorted({row["context_length"] for row in rows})
    }
    return dict_table(
        {
            "model": f"`{name}`",
            **{
                f"ms at {context:,}": _milliseconds(context_seconds.get(name))
                for context, context_seconds in by_context.items()
            },
            "relative time of a token": f"{seconds[name] / seconds['recipe']:.3f}",
        }
        for name in seconds
    )


def _milliseconds(seconds: float | None) -> str:
    """Milliseconds of BATCH_TOKENS at these seconds per token, or a dash."""
    return "-" if seconds is None else f"{1000 * BATCH_TOKENS * seconds:.1f}"


def _line(row: Row) -> str:
    return f"{row['name']:40} {row['context_length']:6} {1000 * row['step_s']:8.2f} ms"


@command.main
def main(args: Namespace) -> None:
    """Measure each model in its own stage."""
    torch.set_float32_matmul_precision("high")
    configs = configs_of(["recipe", *(TIMED[name] for name in args.parts)])
    order = ["recipe", *(TIMED[name] for name in args.parts)]
    stages = [partial(measure, name, configs[name], args.steps) for name in order]
    stages.append(partial(measure, AGAIN, configs["recipe"], args.steps))
    measure_rows(args, stages, step_table, lambda rows: print(_line(rows[-1]), flush=True))
