"""Speed and memory of a training step on one GPU and on several, for what is shared and how.

torchrun --standalone --nproc_per_node=2 -m experiments.scale [--parts ddp context]

Steps as train.py takes them, in bfloat16 on random tokens; also those of one GPU, by each at the
same time. Beside the peak of a GPU's memory stands what `train.py --dry-run` tells of it. Nothing
is printed of a step whose first loss differs from that of the others of its model.
"""

from experiments.harness import Command, measure_rows
from experiments.scale.cases import PARTS, Case, case_of, cases

command = Command(__name__, on_gpu=True)
add = command.add
add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
add("--only", nargs="+", metavar="TEXT", default=[""], help="cases with one of these in a name")
add("--seconds", type=float, default=2.0, help="of each of three timings, about")
command.read(out="docs/results/scale.json", resume=True)

import time
from argparse import Namespace
from dataclasses import asdict, replace
from functools import cache, partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evaluation.results import Row
from experiments.timing import reset_compiler_and_memory, spread, wall_seconds
from experiments.train_steps.contenders import check_first_loss, step_of
from kernels.context.exchange import free_receive_buffers, receive_buffer_bytes
from model.flops import mfu
from training.distributed import Processes, start_processes
from training.dry_run import GIB

LONG_S, VERY_LONG_S = 2.0, 4.0


def measure(case: Case, processes: Processes, seconds: float) -> Row:
    """Median time of a step, the peak of this GPU's memory, and the first loss."""
    config, device = case.config, processes.device
    together = Processes(rank=0, world_size=1, device=device)
    if case.n_gpus > 1:
        together = replace(processes, mesh=_mesh(processes, config.parallel.context))
    reset_compiler_and_memory()
    free_receive_buffers()
    torch.manual_seed(0)
    n_tokens = config.model.context_length + 1
    shape = config.grad_accum_steps(case.n_gpus), config.optim.micro_batch_size, n_tokens
    generator = torch.Generator().manual_seed(together.data_rank)
    text = torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
    batch = [text[..., :-1].contiguous(), text[..., 1:].contiguous()]
    if case.document is not None:
        places = torch.arange(n_tokens - 1, dtype=torch.int32, device=device)
        batch.append((places // case.document * case.document).expand_as(batch[0]))
    start = time.perf_counter()
    step = step_of(config, together, *batch)
    first_loss = together.sum(step().clone()).item() / together.world_size
    first_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    # captured in a graph, and clocks have settled; in a long one they do before it ends
    timed = partial(wall_seconds, step, barrier=processes.barrier)
    step_s = processes.agree(timed(1))
    if step_s < LONG_S:
        timed(14)
        step_s = timed(2)
    taken = [step_s]
    if step_s < VERY_LONG_S:
        n_steps = processes.agree(max(1, int(seconds / step_s)))
        taken = [timed(n_steps) for _ in range(3)]
    times = spread("step_s", taken)
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
        # with what PyTorch holds ready
        "reserved_gib": (torch.cuda.max_memory_reserved(device) + receive_buffer_bytes()) / GIB,
    }


@cache
def _mesh(processes: Processes, context: int) -> DeviceMesh | None:
    shape = processes.world_size // context, context
    names = ("data", "context")
    return init_device_mesh("cuda", shape, mesh_dim_names=names) if context > 1 else None


def check_loss(rows: list[Row]) -> None:
    """Print the last row, if its first loss is that of the first of its model."""
    last = check_first_loss(rows, "model", lambda row: f"{row['model']}, {row['way']}")
    print(
        f"{last['part']:6} {last['model']:12} {last['context_length']:8} {last['batch_tokens']:8} "
        f"{last['n_gpus']} {last['way']:16} {last['tokens_per_s']:10,.0f} tokens/s "
        f"{last['step_s']:.4f} s  {last['peak_gib']:6.2f} GiB, told {case_of(last).told_gib:6.2f}, "
        f"reserved {last['reserved_gib']:6.2f}; "
        f"first step {last['first_step_s']:.0f} s, loss {last['first_loss']:.3f}",
        flush=True,
    )


@command.main
def main(args: Namespace) -> None:
    """Measure each case in a stage of its own, by all processes together."""
    torch.set_float32_matmul_precision("high")
    with start_processes("cuda") as processes:

        def stage(case: Case) -> list[list[Row]]:
            return [[measure(case, processes, args.seconds)]]

        stages = [
            partial(stage, case)
            for case in cases(args.parts, torch.cuda.get_device_properties(0).total_memory)
            if case.n_gpus <= processes.world_size and any(text in case.name for text in args.only)
        ]
        if processes.is_main:
            measure_rows(args, stages, relate=check_loss)
        else:
            for one in stages:
                one()
