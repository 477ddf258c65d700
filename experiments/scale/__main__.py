"""Speed and memory of a training step on one and several GPUs, by kind of parallelism.

torchrun --standalone --nproc_per_node=2 -m experiments.scale [--parts ddp context]

Steps are those of train.py, in bfloat16 on random tokens. Cases are of one GPU or of all: those of
Muon of two or four, the others of two. In cases of one GPU, every GPU takes the same steps at the
same time. The peak memory of a GPU is printed next to the estimate of
`train.py --dry-run`. The command fails if a first loss differs from the others of its model.
"""

from experiments.harness import Command, measure_rows
from experiments.scale.cases import PARTS, Case, case_of, cases_on

command = Command(__name__, on_gpu=True)
add = command.add
add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
add(
    "--only",
    nargs="+",
    metavar="TEXT",
    default=[""],
    help="only cases whose name contains one of these",
)
add("--seconds", type=float, default=2.0, help="approximate duration of each of three timings")
command.read(out="docs/results/scale.json", resume=True)

import time
from argparse import Namespace
from dataclasses import asdict, replace
from functools import cache, partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evaluation.results import Row
from experiments.timing import reset_compiler_and_memory, spread, wall_seconds
from experiments.train_steps.contenders import check_first_loss, check_last_loss, step_of
from kernels.context.exchange import free_receive_buffers, receive_buffer_bytes
from model.flops import mfu
from training.distributed import Processes, start_processes
from training.dry_run import GIB

LONG_S = 4.0  # a step this long is not captured before it is timed, and timed once


def measure(case: Case, processes: Processes, seconds: float) -> Row:
    """Measure the median step time, the peak memory of this GPU, and the first loss."""
    config, device = case.config, processes.device
    group = Processes(rank=0, world_size=1, device=device)
    if case.n_gpus > 1:
        group = replace(processes, mesh=_mesh(processes, config.parallel.context))
    reset_compiler_and_memory()
    free_receive_buffers()
    torch.manual_seed(0)
    n_tokens = config.model.context_length + 1
    shape = config.grad_accum_steps(case.n_gpus), config.optim.micro_batch_size, n_tokens
    generator = torch.Generator().manual_seed(group.data_rank)
    text = torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
    batch = [text[..., :-1].contiguous(), text[..., 1:].contiguous()]
    if case.document is not None:
        positions = torch.arange(n_tokens - 1, dtype=torch.int32, device=device)
        batch.append((positions // case.document * case.document).expand_as(batch[0]))
    start = time.perf_counter()
    step, losses = step_of(config, group, *batch), []

    def take() -> None:
        losses[:] = [step()]

    take()
    first_loss = group.sum(losses[0].clone()).item() / group.world_size
    first_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    # Warm up: the step is captured in a graph, and clocks settle. A long step settles on its own.
    timed = partial(wall_seconds, take, barrier=processes.barrier)
    step_s = processes.agree(timed(1))
    timings = [step_s]
    if step_s < LONG_S:
        timed(14)
        n_steps = processes.agree(max(1, int(seconds / timed(2))))
        timings = [timed(n_steps) for _ in range(3)]
    check_last_loss(group.sum(losses[0].clone()).item(), case.name)
    times = spread("step_s", timings)
    tokens_per_s = config.optim.batch_tokens / times["step_s"]
    utilisation = mfu(tokens_per_s / case.n_gpus, config.model, torch.cuda.get_device_name(device))
    return {
        **case.row,
        "first_loss": first_loss,
        "first_step_s": first_s,
        **times,
        "tokens_per_s": tokens_per_s,
        "mfu": asdict(utilisation) if utilisation else None,
        "peak_gib": (torch.cuda.max_memory_allocated(device) + receive_buffer_bytes()) / GIB,
        # includes the cache of PyTorch's allocator
        "reserved_gib": (torch.cuda.max_memory_reserved(device) + receive_buffer_bytes()) / GIB,
    }


@cache
def _mesh(processes: Processes, context: int) -> DeviceMesh | None:
    shape = processes.world_size // context, context
    names = ("data", "context")
    return init_device_mesh("cuda", shape, mesh_dim_names=names) if context > 1 else None


def check_loss(rows: list[Row]) -> None:
    """Check the first loss of the last row against the first row of its model, and print it."""
    last = check_first_loss(rows, "model", lambda row: f"{row['model']}, {row['way']}")
    print(
        f"{last['part']:6} {last['model']:12} {last['context_length']:8} {last['batch_tokens']:8} "
        f"{last['n_gpus']} {last['way']:16} {last['tokens_per_s']:10,.0f} tokens/s "
        f"{last['step_s']:.4f} s  {last['peak_gib']:6.2f} GiB, "
        f"estimated {case_of(last).estimated_gib:6.2f}, reserved {last['reserved_gib']:6.2f}; "
        f"first step {last['first_step_s']:.0f} s, loss {last['first_loss']:.3f}",
        flush=True,
    )


@command.main
def main(args: Namespace) -> None:
    """Measure each case in its own stage, on all processes together."""
    torch.set_float32_matmul_precision("high")
    with start_processes("cuda") as processes:

        def stage(case: Case) -> list[list[Row]]:
            return [[measure(case, processes, args.seconds)]]

        card = torch.cuda.get_device_properties(0).total_memory
        found = cases_on(processes.world_size, args.parts, args.only, card)
        stages = [partial(stage, case) for case in found]
        if processes.is_main:
            measure_rows(args, stages, relate=check_loss)
        else:
            for run_stage in stages:
                run_stage()
