"""Collect, write and restore the contents of a checkpoint: progress, settings and tensors."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from data.files import sync_folder, write_atomically
from training.checkpoint.files import (
    DamageError,
    write_sums,
    write_tensors,
)
from training.checkpoint.folders import (
    UNFINISHED,
    checkpoint_folder,
    clear_unfinished,
    latest_checkpoint,
)
from training.distributed import Processes, shard_like
from training.tasks import RunConfiguration

T = TypeVar("T")
C = TypeVar("C", bound=RunConfiguration)
Tensors = Mapping[str, Tensor]

STATE = "state.json"
MODEL, OPTIMIZER, PROCESSES = (
    f"{name}.safetensors" for name in ("model", "optimizer", "processes")
)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run."""

    step: int = 0
    """Optimizer steps taken."""
    samples: int = 0
    """Training windows seen: where the sampler continues."""
    tokens: int = 0
    """Training tokens seen."""
    gpu_hours: float = 0.0
    """Training time in hours, as counted by `Stopwatch`, times the number of processes."""
    val_loss: float | None = None
    """Validation loss, nats, if it was measured after exactly this step."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("gpu_hours", "val_loss"):
                is_valid = type(value) in (int, float) and abs(value) < 1e30
                is_valid |= field.name == "val_loss" and value is None
            else:
                is_valid = type(value) is int and 0 <= value < 2**62
            if not is_valid:
                raise ValueError(f"{field.name} cannot be {repr(value)[:40]}")


def shared_settings(config: RunConfiguration) -> dict[str, Any]:
    """Settings, common to all tasks, that must match a checkpoint to resume from it."""
    # These may differ: implementations affect only rounding, and dropout has no weights.
    free = {"attention", "residual_in_fp32", "recompute_gelu", "dropout", "attention_dropout"}
    free |= {"context_schedule"}  # the stages must match, which also depend on optim.max_steps
    shape = {f"model.{k}": v for k, v in asdict(config.model).items() if k not in free}
    # run.init_from is not read again, but config.yaml must keep naming the true origin. Only the
    # name is compared, as both folders may have been moved.
    origin = config.run.init_from and Path(config.run.init_from).absolute().name
    # The optimizer state belongs to this optimizer.
    optimizer = {"optim.name": config.optim.name}
    choice = config.run.init_checkpoint
    if isinstance(choice, str):  # a folder, which may have been moved as well
        choice = Path(choice).name
    origins = {"run.init_from": origin, "run.init_checkpoint": choice}
    return shape | optimizer | {"run.seed": config.run.seed} | origins


def write_checkpoint(
    run: Path,
    progress: Progress,
    must_match: dict[str, Any],
    config: dict[str, Any],
    tensors: Mapping[str, Tensors],
) -> Path:
    """Write a checkpoint atomically: under a temporary name, then sync and rename.

    Args:
        run: folder of the run, which must exist.
        progress: also gives the step in the name.
        must_match: settings that must match to resume from it, stored as JSON.
        config: full configuration, for readers, stored as JSON.
        tensors: tensors on the CPU by file name.

    Raises:
        OSError: It cannot be written, for example on a full disk. Its partial files are deleted;
            older checkpoints are unchanged.
    """
    state = {"progress": asdict(progress), "must_match": must_match, "config": config}
    final = checkpoint_folder(run, progress.step)
    unfinished = final.with_name(UNFINISHED + final.name)
    clear_unfinished(run)
    try:
        # Not parents=True: if the run's folder was renamed, it must not be created again.
        final.parent.mkdir(exist_ok=True)
        unfinished.mkdir()
        for name, file_tensors in tensors.items():
            write_tensors(unfinished / name, file_tensors)
        write_atomically(unfinished / STATE, (json.dumps(state, indent=2) + "\n").encode())
        write_sums(unfinished)
        unfinished.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(
            f"{final} could not be written; the disk may be full ({error}). Free some space and "
            "start again; older checkpoints are intact"
        ) from error
    return final


def save_model(run: Path, model: nn.Module, *, config: dict[str, Any], tokenizer: str) -> Path:
    """Save weights without optimizer state, as step 0 of an untrained run. Call on one process.

    `Checkpoint.weights` reads them; a run cannot resume from them. `tokenizer` is the sha256 of the
    model's tokenizer.

    Raises:
        ValueError: The run has a checkpoint already.
        OSError: It cannot be written, for example on a full disk.
    """
    existing = latest_checkpoint(run)
    if existing is not None:
        raise ValueError(f"{run} already has {existing.name}. Choose another folder for the run")
    return write_checkpoint(
        run, Progress(), {"tokenizer": tokenizer}, config, {MODEL: model.state_dict()}
    )


def put_weights(model: nn.Module, weights: Tensors) -> None:
    """Load full weights, held by every process, into a model that may be sharded."""
    own = model.state_dict()
    model.load_state_dict({name: shard_like(x, own[name]) for name, x in weights.items()})


def check_same_tensors(file: str, saved: Tensors, expected: Tensors) -> None:
    """Check that the tensors of a file are those of a model or an optimizer.

    Raises:
        DamageError: A tensor is missing, unexpected, or of another shape or dtype. The error names
            the first such tensor.
    """
    for name in sorted(saved.keys() | expected.keys()):
        if name not in saved or name not in expected:
            problem = "has no tensor" if name in expected else "has an unexpected tensor"
            raise DamageError(f"{file} {problem} {name}")
        a, b = saved[name], expected[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise DamageError(
                f"{name} in {file} is {tuple(a.shape)} {a.dtype} and must be {tuple(b.shape)} "
                f"{b.dtype}"
            )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state by weight, as NAME.exp_avg; this call creates the state if there is none."""
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    return {
        f"{name}.{key}": value
        for name, weight_state in state["state"].items()
        for key, value in weight_state.items()
    }


def process_state(device: torch.device, kept: Tensors = MappingProxyType({})) -> dict[str, Tensor]:
    """RNG state of this process, and its tensors `kept`, on the CPU."""
    state = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(device)
    return state | {f"kept.{name}": value.cpu() for name, value in kept.items()}


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Tensors) -> None:
    """Load saved `optimizer_tensors` into an optimizer.

    Raises:
        DamageError: They do not match this model and optimizer.
    """
    check_same_tensors(OPTIMIZER, saved, optimizer_tensors(model, optimizer))
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    for name, weight_state in state["state"].items():
        state["state"][name] = {
            key: shard_like(saved[f"{name}.{key}"], value) for key, value in weight_state.items()
        }
    # torch replaces the objects in the settings, but a captured step reads one of them, a tensor.
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for group in state["param_groups"]:
        group["lr"] = float(group["lr"])
    set_optimizer_state_dict(model, optimizer, state)  # pyright: ignore[reportArgumentType]
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def restore_process_state(saved: Tensors, processes: Processes, kept: Tensors) -> None:
    """Restore the RNG state and the tensors `kept` of this process, from those saved by all.

    Raises:
        DamageError: The RNG state is invalid, or a `kept` tensor is missing or has another shape.
    """
    ranks: dict[str, dict[str, Tensor]] = {}
    for name, value in saved.items():
        rank, _, key = name.partition(".")
        ranks.setdefault(rank, {})[key] = value
    own = ranks.get(f"rank_{processes.rank}", {})
    try:
        if "random.cpu" in own:
            torch.set_rng_state(own["random.cpu"])
        if "random.cuda" in own and processes.device.type == "cuda":
            torch.cuda.set_rng_state(own["random.cuda"], processes.device)
    except (RuntimeError, TypeError) as error:
        raise DamageError(f"{PROCESSES} has an invalid RNG state: {error}") from error
    sources = [own] if len(ranks) == processes.world_size else [*ranks.values()]
    for name, tensor in kept.items():
        values = [source[f"kept.{name}"] for source in sources if f"kept.{name}" in source]
        if len(values) != len(sources) or any(value.shape != tensor.shape for value in values):
            raise DamageError(f"{PROCESSES} has no valid {name}")
        tensor.copy_(torch.stack(values).double().mean(0))
