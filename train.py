"""Train a GPT.

    python train.py configs/quickstart.yaml                        one process: a GPU, or the CPU
    torchrun --standalone --nproc_per_node=8 train.py configs/gpt2_small_4k.yaml optim.lr=3e-4

The first argument is a configuration, the others replace single values of it. The run goes into
run.out_dir: config.yaml, metrics.jsonl and checkpoints. Started again, it goes on from its newest
checkpoint, with the same samples and the same losses as if it had never stopped; started while it
still runs, the second refuses. run.init_from names another run to take the first weights from.
"""

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from configs import RUN_CONFIG, TrainConfig, load_config, to_yaml
from configs.command_line import errors_as_sentences, help_if_asked
from data.files import write_atomically
from data.sampler import first_sample
from data.text.batches import Batch, TrainBatches, ValidationBatches
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import load_tokenizer
from model import GPT
from model.extend import differences, rotary_changes, with_context_length
from model.flops import mfu
from training.checkpoint import (
    Progress,
    latest_checkpoint,
    load_checkpoint,
    read_weights,
    save_checkpoint,
)
from training.distributed import Processes, start_processes
from training.environment import note_start
from training.evaluate import Evaluation, evaluate
from training.metrics import RunLog
from training.numerics import autocast, deterministic_algorithms
from training.optim import learning_rate, make_optimizer, set_learning_rate
from training.run_lock import only_run
from training.stopwatch import Stopwatch


def main(argv: Sequence[str]) -> Evaluation:
    """Train as the command line says; returns the evaluation of the last step."""
    config = load_config(argv)
    with (
        start_processes(config.run.device) as processes,
        deterministic_algorithms(config.run.deterministic),
        only_run(Path(config.run.out_dir), processes),  # before anything there is read or written
    ):
        return train(config, processes)


def train(config: TrainConfig, processes: Processes) -> Evaluation:
    """One run, from its first or its last saved step to optim.max_steps.

    Raises:
        ValueError, FileNotFoundError: data, checkpoint and configuration do not fit together.
        FloatingPointError: the loss is no longer finite.
    """
    run_dir = Path(config.run.out_dir)
    device = processes.device
    optim = config.optim
    grad_accum_steps = config.grad_accum_steps(processes.world_size)

    # data
    stream = TokenStream(config.data.path, "train")
    check_vocabulary(config, stream)
    train_batches = TrainBatches(
        stream,
        config.model.context_length,
        seed=config.run.seed,
        document_mask=config.data.document_mask,
        consecutive_windows=config.data.consecutive_windows,
    )
    validation = ValidationBatches(
        TokenStream(config.data.path, "val"),
        config.model.context_length,
        optim.micro_batch_size,
        rank=processes.rank,
        world_size=processes.world_size,
        document_mask=config.data.document_mask,
    )

    # model and optimizer; the same weights on every process, then dropout of its own
    torch.manual_seed(config.run.seed)
    torch.set_float32_matmul_precision("high")
    model = GPT(config.model).to(device)
    optimizer = make_optimizer(model, optim)
    torch.manual_seed(config.run.seed + 1 + processes.rank)

    # resume, or start with the weights of another run
    progress = Progress()
    source: Path | None = None
    origin: str | None = None
    must_match = what_must_match(config, stream)
    checkpoint = processes.agree(latest_checkpoint(run_dir))
    if checkpoint is not None:
        if config.run.resume == "never":
            raise ValueError(
                f"run.out_dir={run_dir} already has {checkpoint.name} and run.resume=never: choose "
                "another folder, or run.resume=auto to go on from it"
            )
        progress = load_checkpoint(checkpoint, model, optimizer, must_match, processes)
    elif config.run.init_from is not None:
        source = Path(config.run.init_from)
        origin = load_first_weights(source, model, stream, processes)
    if processes.is_main:
        write_atomically(run_dir / RUN_CONFIG, to_yaml(config).encode())
        # a run outlives its data: who samples from it needs the tokenizer
        write_atomically(run_dir / TOKENIZER, (stream.path / TOKENIZER).read_bytes())
        if progress.step < optim.max_steps:
            note_start(run_dir, progress.step, world_size=processes.world_size, origin=source)

    # what runs the model: fused by torch.compile, its gradients averaged over the processes
    fast_model: nn.Module = model
    if config.run.compile:
        # fullgraph: a graph break would be slow, and nobody would see it
        fast_model = torch.compile(model, fullgraph=True)  # pyright: ignore
    parallel: nn.Module = fast_model
    if processes.world_size > 1:
        parallel = DistributedDataParallel(
            fast_model,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,  # tables of constants, the same everywhere
        )

    def activations() -> AbstractContextManager:
        return autocast(config.run.dtype, device)

    with RunLog(
        run_dir,
        is_main=processes.is_main,
        start_step=progress.step,
        max_steps=optim.max_steps,
        wandb=config.run.wandb,
        wandb_project=config.run.wandb_project,
        config=asdict(config),
    ) as log:
        log.say(describe(config, processes, model, stream, grad_accum_steps))
        if progress.step >= optim.max_steps:
            log.say(f"finished before, see {checkpoint}: evaluating once more")
        elif progress.step:
            log.say(f"going on from {checkpoint}")
        elif origin is not None:
            log.say(f"starting with the weights of {origin}")

        result: Evaluation | None = None
        step = progress.step
        watch = Stopwatch(device, n_processes=processes.world_size, gpu_hours=progress.gpu_hours)
        loss_sum = torch.zeros((), device=device)
        loss_steps = 0
        while True:
            # evaluate and save, on all processes, between two steps
            last = step >= optim.max_steps
            if last or (step % config.run.eval_every == 0 and step > progress.step):
                with watch.paused():
                    result = evaluate(fast_model, validation, processes, activations)
                    log.record(
                        f"val loss {result.loss:.4f}  perplexity {result.perplexity:.2f}  "
                        f"({result.tokens:,} tokens)",
                        step=step,
                        tokens=step * optim.batch_tokens,
                        val_loss=result.loss,
                        val_perplexity=result.perplexity,
                        val_tokens=result.tokens,
                        gpu_hours=watch.gpu_hours,
                    )
            if step > progress.step and (last or step % config.run.save_every == 0):
                with watch.paused():
                    save_checkpoint(
                        run_dir,
                        Progress(
                            step=step,
                            samples=step * optim.batch_tokens // config.model.context_length,
                            tokens=step * optim.batch_tokens,
                            gpu_hours=watch.gpu_hours,
                        ),
                        model,
                        optimizer,
                        must_match,
                        processes,
                        config=asdict(config),
                        keep_last=config.run.keep_last,
                    )
            if last:
                assert result is not None
                return result

            # one step: gradients of all micro-batches add up, and are exchanged with the last
            lr = learning_rate(step, optim)
            set_learning_rate(optimizer, lr)
            for micro_step in range(grad_accum_steps):
                first = first_sample(
                    step=step,
                    micro_step=micro_step,
                    rank=processes.rank,
                    grad_accum_steps=grad_accum_steps,
                    world_size=processes.world_size,
                    micro_batch_size=optim.micro_batch_size,
                )
                batch = train_batches.batch(first, optim.micro_batch_size)
                batch = to_device(batch, device)
                if isinstance(parallel, DistributedDataParallel):
                    parallel.require_backward_grad_sync = micro_step == grad_accum_steps - 1
                with activations():
                    loss = parallel(batch.tokens, batch.targets, doc_start=batch.doc_start)
                (loss / grad_accum_steps).backward()
                loss_sum += loss.detach() / grad_accum_steps
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip or math.inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            loss_steps += 1
            watch.count(optim.batch_tokens)

            # reading the loss is the only time that the host waits for the GPU
            if step % config.run.log_every == 0 or step == optim.max_steps:
                mean_loss = processes.sum(loss_sum).item() / (processes.world_size * loss_steps)
                norm = grad_norm.item()
                if not (math.isfinite(mean_loss) and math.isfinite(norm)):
                    raise FloatingPointError(
                        f"the training loss is {mean_loss} and the norm of its gradient {norm} "
                        f"at step {step}: lower optim.lr or "
                        f"raise optim.warmup_steps; checkpoints in {run_dir} are from before"
                    )
                with watch.paused():
                    record_step(log, config, processes, step, mean_loss, lr, norm, watch)
                loss_sum.zero_()
                loss_steps = 0


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on `device`, copied while the GPU still works on what came before."""

    def copy(part: Tensor) -> Tensor:
        return part.pin_memory().to(device, non_blocking=True)

    if device.type == "cpu":
        return batch
    doc_start = None if batch.doc_start is None else copy(batch.doc_start)
    return Batch(copy(batch.tokens), copy(batch.targets), doc_start)


def check_vocabulary(config: TrainConfig, stream: TokenStream) -> None:
    """Refuse data made with another tokenizer than the model is for, or than lies beside them.

    The model of another run may know more ids than its tokenizer: `load_first_weights` compares
    the tokenizers themselves.
    """
    tokenizer = stream.manifest.tokenizer
    known = config.model.vocab_size
    fresh = config.run.init_from is None
    if tokenizer.vocab_size > known or (fresh and tokenizer.vocab_size != known):
        raise ValueError(
            f"data.path={config.data.path} was made with the tokenizer {tokenizer.name!r} of "
            f"{tokenizer.vocab_size} entries, and model.vocab_size={known}: "
            f"prepare the data with the model's tokenizer, or set model.vocab_size="
            f"{tokenizer.vocab_size}; only run.init_from may bring a model of more ids"
        )
    beside = stream.path / TOKENIZER
    if load_tokenizer(str(beside)).sha256 != tokenizer.sha256:
        raise ValueError(f"{beside} was replaced: prepare data.path={config.data.path} again")


def load_first_weights(folder: Path, model: GPT, stream: TokenStream, processes: Processes) -> str:
    """Give `model` the weights of the newest checkpoint of another run.

    Returns:
        The checkpoint, and how rotary positions are turned otherwise there.

    Raises:
        ValueError, FileNotFoundError: `folder` is no run, or one of another model or tokenizer.
    """
    checkpoint = processes.agree(latest_checkpoint(folder))
    if checkpoint is None:
        raise FileNotFoundError(
            f"run.init_from={folder} has no checkpoint: name the folder of a run that has one in "
            "checkpoints/, or leave it out to start with random weights"
        )
    config = load_config([str(folder / RUN_CONFIG)]).model
    differing = differences(config, model.config)
    there, here = load_tokenizer(str(folder / TOKENIZER)).sha256, stream.manifest.tokenizer.sha256
    if there != here:
        differing.append(f"the tokenizer has sha256 {there} there and {here} here")
    if differing:
        raise ValueError(
            f"run.init_from={folder} is a run of another model: {'; '.join(differing)}. "
            "Use the values there, or start with other weights"
        )
    weights = read_weights(checkpoint)
    model.load_state_dict(with_context_length(weights, model.config.context_length))
    return "; ".join([str(checkpoint), *rotary_changes(config, model.config)])


def what_must_match(config: TrainConfig, stream: TokenStream) -> dict[str, Any]:
    """What a run must share with the checkpoint that it goes on from."""
    # How attention is computed changes rounding only, and dropout is no part of the weights.
    free = {"attention", "dropout", "attention_dropout"}
    shape = {f"model.{k}": v for k, v in asdict(config.model).items() if k not in free}
    return shape | {
        "data.document_mask": config.data.document_mask,
        "data.consecutive_windows": config.data.consecutive_windows,
        "optim.batch_tokens": config.optim.batch_tokens,
        "run.seed": config.run.seed,
        # It is not read again, but config.yaml must not come to tell of another origin. Both
        # folders may have been moved since.
        "run.init_from": config.run.init_from and Path(config.run.init_from).absolute().name,
        "tokenizer": stream.manifest.tokenizer.sha256,
        "training tokens": len(stream),
    }


def describe(
    config: TrainConfig,
    processes: Processes,
    model: GPT,
    stream: TokenStream,
    grad_accum_steps: int,
) -> str:
    """What is about to run, with the arithmetic of a batch."""
    if processes.device.type == "cuda":
        device = torch.cuda.get_device_name(processes.device)
    else:
        device = f"CPU, {torch.get_num_threads()} threads"
    epochs = config.optim.max_steps * config.optim.batch_tokens / len(stream)
    return (
        f"{model.n_params() / 1e6:.1f}M parameters, context {config.model.context_length:,}, "
        f"attention {config.model.attention} on {processes.world_size} x {device}\n"
        f"a step: {grad_accum_steps} micro-batches x {processes.world_size} processes x "
        f"{config.optim.micro_batch_size} sequences x {config.model.context_length:,} tokens "
        f"= {config.optim.batch_tokens:,} tokens\n"
        f"{config.optim.max_steps:,} steps over {len(stream):,} tokens: {epochs:.2f} epochs\n"
        f"everything goes into {config.run.out_dir}"
    )


def record_step(
    log: RunLog,
    config: TrainConfig,
    processes: Processes,
    step: int,
    loss: float,
    lr: float,
    grad_norm: float,
    watch: Stopwatch,
) -> None:
    """Log one training record: loss in nats, speed of the whole run, memory of this GPU."""
    utilisation, memory_gib = None, None
    tokens_per_s = watch.tokens_per_s()
    text = f"loss {loss:.4f}"
    if tokens_per_s is None:
        text += "  (the first step compiles: not timed)"
    else:
        text += f"  {tokens_per_s:,.0f} tokens/s"
    if processes.device.type == "cuda":
        memory_gib = torch.cuda.max_memory_allocated(processes.device) / 2**30
        if tokens_per_s is not None:
            name = torch.cuda.get_device_name(processes.device)
            utilisation = mfu(tokens_per_s / processes.world_size, config.model, name)
            if utilisation is None:
                text += "  unknown GPU: MFU not reported"
            else:
                text += f"  MFU {utilisation.causal:.1%} causal, {utilisation.full:.1%} full"
        text += f"  {memory_gib:.1f} GiB"
    log.record(
        text,
        step=step,
        tokens=step * config.optim.batch_tokens,
        loss=loss,
        lr=lr,
        grad_norm=grad_norm,
        tokens_per_s=tokens_per_s,
        gpu_hours=watch.gpu_hours,
        mfu_causal=utilisation.causal if utilisation else None,
        mfu_full=utilisation.full if utilisation else None,
        memory_gib=memory_gib,
    )


if __name__ == "__main__":
    help_if_asked(__doc__)
    with errors_as_sentences():
        main(sys.argv[1:])
