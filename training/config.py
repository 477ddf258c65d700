"""Settings that all tasks share: run, parallelism and optimizer. Does not import PyTorch."""

import math
from dataclasses import dataclass
from typing import Literal

from model.checks import check_choices, check_positive

Dtype = Literal["bfloat16", "float32"]
ActivationCheckpointing = Literal["none", "selective", "full"]

RUN_CONFIG = "config.yaml"
"""Name of the configuration file in a run's folder."""


def counted(n: int, noun: str) -> str:
    """`n` and a noun in the singular or plural: "1 process", "2 processes"."""
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{n:,} {noun}" + (plural if n != 1 else "")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run: device, precision, intervals and output files."""

    out_dir: str
    """Output folder of the run: config.yaml, metrics.jsonl, checkpoints. Created if missing."""
    seed: int = 1111
    """Seed of the initial weights, the data order and dropout, at least 0."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. auto: a GPU if there is one, otherwise the CPU."""
    dtype: Dtype = "bfloat16"
    """Precision of activations and matrix multiplications; weights are always float32."""
    compile: bool = True
    """Compile the model with torch.compile: the first step takes about a minute, all later ones are
    faster."""
    activation_memory: float = 1.0
    """Activation memory budget of torch.compile, as a share of its default, above 0. Below 1 it
    recomputes activations in the backward pass, the cheapest first. A value such as 0.9 costs
    little; a much lower one also recomputes matrix multiplications."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Activations that each block saves for the backward pass. none: all that it needs. selective:
    its input and the output of attention; the rest is recomputed, at a relative cost that falls
    with the context length. full: its input."""
    cuda_graph: bool = True
    """Capture each training step in a CUDA graph, including the communication between GPUs. Set
    false for debugging, or if the driver does not support it."""
    deterministic: bool = True
    """Make repeated runs identical bit for bit: free with Papilio's attention; PyTorch's attention
    may be slower."""
    log_every: int = 10
    """Optimizer steps between records of the training loss; the host waits for the GPU at each
    record."""
    eval_every: int = 1000
    """Optimizer steps between evaluations on the whole validation set; there is always one at the
    end."""
    save_every: int = 1000
    """Optimizer steps between checkpoints; there is always one at the end."""
    max_skipped: int = 10
    """Consecutive optimizer steps, skipped because their loss or gradient is not finite, that end
    the run with an error. Checked every log_every steps."""
    keep_last: int = 2
    """Number of recent checkpoints to keep. Only checkpoints followed by a successful step count; a
    newer one is kept in addition."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest validation loss. Checkpoints have one if save_every
    is a multiple of eval_every."""
    resume: Literal["auto", "previous", "never"] = "auto"
    """How to start if out_dir has checkpoints. auto: resume from the newest. previous: resume from
    the newest intact one, and rename damaged ones. never: stop with an error."""
    init_from: str | None = None
    """Folder of another run whose newest weights (a classifier's: its best) this run starts with.
    Optimizer state, step count and data order are not taken. Read at the first start only: later
    starts resume from out_dir. They must give a folder of the same name, so that config.yaml always
    records where the weights came from."""
    init_checkpoint: int | str | None = None
    """Checkpoint of run.init_from to use: a step, best (lowest validation loss), or the folder of a
    checkpoint. null: the newest one; for a classifier, its best weights."""
    exportable: bool = False
    """Refuse a GPT that transformers cannot represent, before training: scripts.export_hf could not
    export it. --dry-run prints its class in transformers, or the reason why it has none."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Also log to Weights & Biases: online, or offline into files in out_dir."""
    wandb_project: str = "papilio"
    """Weights & Biases project of the run."""
    tensorboard: bool = False
    """Also log to TensorBoard. View it with `tensorboard --logdir` on out_dir, or on a folder of
    several runs."""
    profile: int = 0
    """Number of steps to profile, after the first 15 of this start; 0 for none. Writes a table of
    where the time goes and a trace into out_dir/profile. Profiled steps take longer."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"run.seed={self.seed} must be in [0, 2^63)")
        check_positive(self, "run", "log_every", "eval_every", "save_every", "keep_last")
        check_positive(self, "run", "max_skipped")
        if self.init_checkpoint is not None and self.init_from is None:
            raise ValueError(
                f"run.init_checkpoint={self.init_checkpoint} has no effect without run.init_from. "
                "Set run.init_from to the run of that checkpoint, or remove run.init_checkpoint"
            )
        if not 0 <= self.profile <= 1000:
            raise ValueError(
                f"run.profile={self.profile} must be a number of steps from 0 to 1000. Try 5"
            )
        if not 0 < self.activation_memory <= 1:
            raise ValueError(f"run.activation_memory={self.activation_memory} must be in (0, 1]")
        if self.activation_memory < 1 and not self.compile:
            raise ValueError(
                f"run.activation_memory={self.activation_memory} has no effect with "
                "run.compile=false. Remove it, or set run.compile=true"
            )
        if self.activation_memory < 1 and self.activation_checkpointing != "none":
            raise ValueError(
                f"run.activation_memory={self.activation_memory} and run.activation_checkpointing="
                f"{self.activation_checkpointing} both control recomputation. Remove one of them"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a GPT is distributed over the GPUs of a run; no effect on one GPU."""

    mode: Literal["ddp", "fsdp"] = "ddp"
    """Distribution of weights, gradients and optimizer state. ddp: each GPU holds all of them.
    fsdp: they are sharded, and gathered block by block (FSDP2), for models that do not fit one
    GPU."""
    context: int = 1
    """Number of GPUs that share each sequence, for contexts that are too long or too slow for one
    GPU. It must divide the number of GPUs, and twice it must divide model.context_length.
    optim.micro_batch_size then counts the sequences of such a group."""
    reshard: bool = True
    """fsdp only: free a block's gathered weights after the forward pass, and gather them again for
    the backward pass."""
    gather_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """fsdp only: dtype of gathered weights, and of their local gradients before the reduction in
    float32. auto: run.dtype. float32 doubles the communication, and rounds no more than ddp
    does."""

    def __post_init__(self) -> None:
        check_positive(self, "parallel", "context", most=100_000)
        if self.mode == "ddp":
            for name, default in (("reshard", True), ("gather_dtype", "auto")):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"parallel.{name}={getattr(self, name)} has no effect with "
                        "parallel.mode=ddp. Remove it, or set parallel.mode=fsdp"
                    )


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Optimizer and learning rate schedule."""

    max_steps: int
    """Optimizer steps of the whole run."""
    name: Literal["adamw", "muon", "normuon"] = "adamw"
    """Optimizer. muon: updates of the blocks' matrices are orthogonalized (Jordan et al. 2024) and
    scaled so that AdamW's learning rate and decay suit them (arXiv 2502.16982); AdamW updates all
    other parameters. normuon: muon, and each row of an update is divided by the root of its mean
    square over time, which averages with betas[1] (Li et al. 2025, arXiv 2510.05491)."""
    lr: float = 6e-4
    """Peak learning rate, after warmup."""
    min_lr: float = 0.0
    """Learning rate at the last step, at most lr."""
    schedule: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """Decay of the learning rate from lr to min_lr after warmup. wsd (warmup, stable, decay): it
    stays at lr, then decays linearly over the last decay_share of the steps. Until the decay
    begins, a run is extended by a larger max_steps. constant: it stays at lr."""
    decay_share: float = 0.2
    """wsd only: share of max_steps in which the learning rate decays, above 0 and at most 1."""
    warmup_steps: int = 0
    """Steps in which the learning rate first rises linearly from 0 to lr: fewer than max_steps."""
    weight_decay: float = 0.1
    """Weight decay of matrices and embeddings; biases and normalization are never decayed. 0 turns
    it off."""
    adamw_lr: float | None = None
    """Muon and NorMuon only: peak learning rate of the parameters that AdamW updates, such as
    embeddings; min_lr and weight decay scale with it. It follows the schedule of lr. null: lr."""
    momentum: float = 0.95
    """Muon and NorMuon only: decay rate of the running mean of gradients, in [0, 1)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each in [0, 1). NorMuon averages the
    squares of rows at the second rate."""
    eps: float = 1e-8
    """AdamW's epsilon, which prevents a division by 0: above 0."""
    grad_clip: float = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it. 0 turns clipping off."""

    def __post_init__(self) -> None:
        check_positive(self, "optim", "max_steps")
        for name in ("lr", "adamw_lr"):
            if (rate := getattr(self, name)) is not None and not 0 < rate < math.inf:
                raise ValueError(f"optim.{name}={rate} must be a finite number above 0")
        check_choices(self, "optim")
        if self.name == "adamw" and self.adamw_lr is not None:
            raise ValueError(
                f"optim.adamw_lr={self.adamw_lr} has no effect with optim.name=adamw. Set "
                "optim.adamw_lr=null, or optim.name=muon"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum={self.momentum} must be in [0, 1)")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas} must be two numbers in [0, 1)")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"optim.eps={self.eps} must be a finite number above 0")
        if not 0 <= self.warmup_steps < self.max_steps:
            raise ValueError(
                f"optim.warmup_steps={self.warmup_steps} must be at least 0 and below "
                f"optim.max_steps={self.max_steps}. Try optim.warmup_steps={self.max_steps // 10}, "
                "or raise optim.max_steps"
            )
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(
                f"optim.min_lr={self.min_lr} must be at least 0 and at most optim.lr={self.lr}. "
                "Try optim.min_lr=0, or raise optim.lr"
            )
        if self.schedule == "constant" and self.min_lr != 0:
            raise ValueError(
                f"optim.min_lr={self.min_lr} has no effect with optim.schedule=constant. Remove it"
            )
        if not 0 < self.decay_share <= 1:
            raise ValueError(
                f"optim.decay_share={self.decay_share} must be above 0 and at most 1. Try 0.2"
            )
        if self.schedule == "wsd" and round(self.decay_share * self.max_steps) < 1:
            raise ValueError(
                f"optim.decay_share={self.decay_share} of optim.max_steps={self.max_steps} must be "
                "at least one step. Raise one of them"
            )
        if self.schedule != "wsd" and self.decay_share != 0.2:
            raise ValueError(
                f"optim.decay_share={self.decay_share} has no effect with optim.schedule="
                f"{self.schedule}. Remove it, or set optim.schedule=wsd"
            )
        for name in ("weight_decay", "grad_clip"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"optim.{name}={value} must be a finite number of at least 0")
