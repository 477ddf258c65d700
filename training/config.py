"""What every run is told, whatever it learns. This needs no PyTorch."""

import math
from dataclasses import dataclass
from typing import Literal

from model.config import check_positive

Dtype = Literal["bfloat16", "float32"]
ActivationCheckpointing = Literal["none", "selective", "full"]

RUN_CONFIG = "config.yaml"
"""File in the folder of a run that holds its configuration."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where and how a run computes, and what it writes."""

    out_dir: str
    """Folder of the run: config.yaml, metrics.jsonl, checkpoints. Made if missing."""
    seed: int = 1111
    """Seed of the first weights, the order of the data and dropout, at least 0."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What computes: auto takes a GPU where there is one, and the CPU elsewhere."""
    dtype: Dtype = "bfloat16"
    """Precision of the activations and matrix products; the weights are always float32."""
    compile: bool = True
    """Whether torch.compile fuses the model: the first step takes a minute or so, the others less
    time."""
    activation_memory: float = 1.0
    """Share of what torch.compile would keep for the backward pass that it may keep, above 0: below
    1 it computes the rest again, the cheapest first. A little below, 0.9 say, costs little; far
    below, matrix products are computed again, too."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What a block keeps for the backward pass. none: all that it needs. selective: what went in,
    and what attention gave; the rest is computed again, which costs less the longer the context.
    full: what went in."""
    cuda_graph: bool = True
    """Whether a GPU is told of a step's kernels at once, as a CUDA graph, rather than one by one;
    with several GPUs also of what they exchange. false: to look for a mistake, or where a driver
    does not take it."""
    deterministic: bool = True
    """Whether the same run must give the same bits: free with our attention; PyTorch's may be
    slower with it."""
    log_every: int = 10
    """Optimizer steps between records of the training loss; also how often host and GPU wait for
    each other."""
    eval_every: int = 1000
    """Optimizer steps between passes over the whole validation set; there is always one at the
    end."""
    save_every: int = 1000
    """Optimizer steps between checkpoints; there is always one at the end."""
    max_skipped: int = 10
    """Optimizer steps in a row that may be skipped, as their loss or gradient is not finite; the
    run ends with an error when log_every tells of so many."""
    keep_last: int = 2
    """How many checkpoints to keep, the newest ones from which a step was taken; a newer one is
    kept in addition."""
    keep_best: bool = True
    """Whether to keep the checkpoint with the lowest validation loss, too; it has one where
    save_every is a multiple of eval_every."""
    resume: Literal["auto", "previous", "never"] = "auto"
    """What a run does whose out_dir has checkpoints. auto: it goes on from the newest. previous: as
    auto, but from the newest that is whole; damaged ones are renamed. never: it refuses."""
    init_from: str | None = None
    """Folder of a run whose newest weights (a classifier's: its best) this run starts with;
    optimizer, steps and data order are new. Read at the first start only: later starts go on from
    out_dir, and must name a folder that is called the same, so that config.yaml always tells where
    the weights came from."""
    init_checkpoint: int | str | None = None
    """Which checkpoint of run.init_from to take: a step, best for the lowest validation loss, or
    the folder of a checkpoint. null: the newest; of a classifier its best weights."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Whether Weights & Biases keeps records, too: online, or offline in files in out_dir."""
    wandb_project: str = "papilio"
    """Project of Weights & Biases that the run belongs to."""
    tensorboard: bool = False
    """Whether TensorBoard is given the records, too: `tensorboard --logdir` of out_dir, or of the
    folder of several runs."""
    profile: int = 0
    """Steps whose time is looked into, after the first 15 of this start: a table of what it goes to
    and a trace, in out_dir/profile. These steps take longer. 0: none."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"run.seed must lie in [0, 2^63), got {self.seed}")
        check_positive(self, "run", "log_every", "eval_every", "save_every", "keep_last")
        check_positive(self, "run", "max_skipped")
        if self.init_checkpoint is not None and self.init_from is None:
            raise ValueError(
                f"run.init_checkpoint={self.init_checkpoint} has no effect without run.init_from: "
                "name the run that the checkpoint is of, or leave it out"
            )
        if not 0 <= self.profile <= 1000:
            raise ValueError(
                f"run.profile={self.profile} must be a number of steps from 0 to 1000: 5, say"
            )
        if not 0 < self.activation_memory <= 1:
            raise ValueError(
                f"run.activation_memory must lie in (0, 1], got {self.activation_memory}"
            )
        if self.activation_memory < 1 and not self.compile:
            raise ValueError(
                f"run.activation_memory={self.activation_memory} has no effect with "
                "run.compile=false: leave it out, or set run.compile=true"
            )
        if self.activation_memory < 1 and self.activation_checkpointing != "none":
            raise ValueError(
                f"run.activation_memory={self.activation_memory} and run.activation_checkpointing="
                f"{self.activation_checkpointing} both say what to compute again: leave one out"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the GPUs of a run share a GPT; one GPU has nothing to share."""

    mode: Literal["ddp", "fsdp"] = "ddp"
    """Who holds weights, gradients and the optimizer's state. ddp: each GPU all of them. fsdp: each
    its part, gathered block by block where it is computed with (FSDP2), for models that one GPU
    does not hold."""
    context: int = 1
    """GPUs that share each sequence, for contexts that one does not hold or takes too long for: it
    divides their number, and twice it model.context_length. optim.micro_batch_size is then of them
    together."""
    reshard: bool = True
    """fsdp only: whether a block's weights are gathered once more for the backward pass, rather
    than kept from the forward pass on."""
    gather_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """fsdp only: dtype in which weights are gathered, and in which a GPU has their gradients before
    they are added up in float32. auto: that of run.dtype. float32 exchanges twice as much, and
    rounds no more than ddp does."""

    def __post_init__(self) -> None:
        check_positive(self, "parallel", "context", most=100_000)
        if self.mode == "ddp":
            for name, default in (("reshard", True), ("gather_dtype", "auto")):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"parallel.{name}={getattr(self, name)} has no effect with "
                        "parallel.mode=ddp: leave it out, or set parallel.mode=fsdp"
                    )


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """The optimizer and its schedule."""

    max_steps: int
    """Optimizer steps of the whole run."""
    name: Literal["adamw", "muon"] = "adamw"
    """Which optimizer. muon: the matrices of the blocks move along orthogonal directions (Jordan et
    al. 2024), scaled so that AdamW's learning rate and decay suit them (arXiv 2502.16982); all else
    is AdamW's."""
    lr: float = 6e-4
    """Learning rate at its highest, after the warm-up."""
    min_lr: float = 0.0
    """Learning rate at the last step, at most lr."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls from lr to min_lr after the warm-up; constant: it stays lr."""
    warmup_steps: int = 0
    """First steps, in which the learning rate rises linearly from 0 to lr: fewer than max_steps."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices and embeddings; biases and normalisation are never decayed. 0 turns
    it off."""
    momentum: float = 0.95
    """Muon only: decay rate of its mean of gradients, from 0 to below 1."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each from 0 to below 1."""
    eps: float = 1e-8
    """AdamW's epsilon, which keeps it from dividing by 0: above 0."""
    grad_clip: float = 1.0
    """Largest norm of the gradient, which is scaled down to it; 0 turns clipping off."""

    def __post_init__(self) -> None:
        check_positive(self, "optim", "max_steps")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"optim.lr must be a finite number above 0, got {self.lr}")
        if self.name not in ("adamw", "muon"):
            raise ValueError(f"optim.name must be adamw or muon, got {self.name!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum must lie in [0, 1), got {self.momentum}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"optim.eps must be a finite number above 0, got {self.eps}")
        if not 0 <= self.warmup_steps < self.max_steps:
            raise ValueError(
                f"optim.warmup_steps={self.warmup_steps} must be at least 0 and below "
                f"optim.max_steps={self.max_steps}: set optim.warmup_steps={self.max_steps // 10}, "
                "or raise optim.max_steps"
            )
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(
                f"optim.min_lr={self.min_lr} must be at least 0 and at most optim.lr={self.lr}: "
                "set optim.min_lr=0, or raise optim.lr"
            )
        if self.schedule == "constant" and self.min_lr != 0:
            raise ValueError(
                f"optim.min_lr={self.min_lr} has no effect with optim.schedule=constant: "
                "leave it out"
            )
        for name in ("weight_decay", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"optim.{name} must be a finite number of at least 0, got {getattr(self, name)}"
                )
