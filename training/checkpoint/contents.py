"""Contents of a checkpoint: progress, settings and tensors, and how they are written."""

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
from training.distributed import Processes, shared_as
from training.tasks import RunConfiguration

T = TypeVar("T")
C = TypeVar("C", bound=RunConfiguration)
Tensors = Mapping[str, Tensor]

STATE = "state.json"
MODEL, OPTIMIZER, PROCESSES = (
    f"{what}.safetensors" for what in ("model", "optimizer", "processes")
)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run has done so far."""

    step: int = 0
    """Optimizer steps taken."""
    samples: int = 0
    """Training windows seen: where the sampler goes on."""
    tokens: int = 0
    """Training tokens seen."""
    gpu_hours: float = 0.0
    """Hours of training alone, as `Stopwatch` counts them, times the number of processes."""
    val_loss: float | None = None
    """Loss on the validation split, nats, where it was measured after this very step."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("gpu_hours", "val_loss"):
                right = type(value) in (int, float) and abs(value) < 1e30
                right |= field.name == "val_loss" and value is None
            else:
                right = type(value) is int and 0 <= value < 2**62
            if not right:
                raise ValueError(f"{field.name} cannot be {repr(value)[:40]}")


def shared_settings(config: RunConfiguration) -> dict[str, Any]:
    """What a run shares with the checkpoint that it goes on from, whatever its task is."""
    # Who computes what changes rounding at most, and dropout is no part of the weights.
    free = {"attention", "residual_in_fp32", "recompute_gelu", "dropout", "attention_dropout"}
    shape = {f"model.{k}": v for k, v in asdict(config.model).items() if k not in free}
    # It is not read again, but config.yaml must not come to tell of another origin. Both folders
    # may have been moved since.
    origin = config.run.init_from and Path(config.run.init_from).absolute().name
    # whose state it is
    optimizer = {"optim.name": config.optim.name}
    choice = config.run.init_checkpoint
    if isinstance(choice, str):  # a folder may have been moved as well
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
    """Write a checkpoint of a run, whose folder is there, under another name; sync and rename it.

    Two dictionaries are kept as JSON: `must_match`, what a run going on from here must share, and
    `config`, the whole configuration, for readers. `tensors` are on the CPU, by the names of files.

    Raises:
        OSError: It cannot be written, as on a full disk: what was written of it is gone, and older
            checkpoints are as they were.
    """
    state = {"progress": asdict(progress), "must_match": must_match, "config": config}
    final = checkpoint_folder(run, progress.step)
    unfinished = final.with_name(UNFINISHED + final.name)
    clear_unfinished(run)
    try:
        final.parent.mkdir(exist_ok=True)  # not the run's: one that was renamed must not come anew
        unfinished.mkdir()
        for name, of_file in tensors.items():
            write_tensors(unfinished / name, of_file)
        write_atomically(unfinished / STATE, (json.dumps(state, indent=2) + "\n").encode())
        write_sums(unfinished)
        unfinished.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(
            f"{final} could not be written, and its disk may be full ({error}): make room "
            "there and start again; older checkpoints are whole"
        ) from error
    return final


def save_model(run: Path, model: nn.Module, *, config: dict[str, Any], tokenizer: str) -> Path:
    """Save weights alone, as step 0 of a run in which nothing was trained. One process calls this.

    `Checkpoint.weights` reads them; a run cannot resume there. `tokenizer` is the sha256 of theirs.

    Raises:
        ValueError: The run has a checkpoint already.
        OSError: It cannot be written, as on a full disk.
    """
    existing = latest_checkpoint(run)
    if existing is not None:
        raise ValueError(f"{run} already has {existing.name}: choose another folder for the run")
    return write_checkpoint(
        run, Progress(), {"tokenizer": tokenizer}, config, {MODEL: model.state_dict()}
    )


def put_weights(model: nn.Module, weights: Tensors) -> None:
    """Give a model weights that each process has all of; of one that is shared out, its parts."""
    there = model.state_dict()
    model.load_state_dict({name: shared_as(x, there[name]) for name, x in weights.items()})


def check_same_tensors(file: str, there: Tensors, here: Tensors) -> None:
    """Refuse tensors of a file that are not those of a model or an optimizer.

    Raises:
        DamageError: Some are missing, left over, or of another shape or dtype; it names the first.
    """
    for name in sorted(there.keys() | here.keys()):
        if name not in there or name not in here:
            raise DamageError(f"{file} {'lacks' if name in here else 'has the unknown'} {name}")
        a, b = there[name], here[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise DamageError(
                f"{name} of {file} is {tuple(a.shape)} {a.dtype}, and must be {tuple(b.shape)} "
                f"{b.dtype}"
            )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer keeps of each weight, as NAME.exp_avg; it has a state after this call."""
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    return {
        f"{name}.{what}": value for name, of in state["state"].items() for what, value in of.items()
    }


def own_state(device: torch.device, kept: Tensors = MappingProxyType({})) -> dict[str, Tensor]:
    """The random state of a process and what else it kept, on the CPU."""
    state = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(device)
    return state | {f"kept.{name}": value.cpu() for name, value in kept.items()}


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Tensors) -> None:
    """Give an optimizer the tensors of `optimizer_tensors`, as they were saved.

    Raises:
        DamageError: They are not those of this model and optimizer.
    """
    check_same_tensors(OPTIMIZER, saved, optimizer_tensors(model, optimizer))
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    for name, of_weight in state["state"].items():
        state["state"][name] = {
            what: shared_as(saved[f"{name}.{what}"], value) for what, value in of_weight.items()
        }
    # torch puts other objects in the place of settings, and a captured step reads a tensor of them
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for group in state["param_groups"]:
        group["lr"] = float(group["lr"])
    set_optimizer_state_dict(model, optimizer, state)  # pyright: ignore[reportArgumentType]
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def set_own_state(saved: Tensors, processes: Processes, kept: Tensors) -> None:
    """Set the random state of this process, and fill the tensors `kept`, from those of all ranks.

    Raises:
        DamageError: There is no usable random state, or `kept` has other names or shapes.
    """
    ranks: dict[str, dict[str, Tensor]] = {}
    for name, value in saved.items():
        rank, _, what = name.partition(".")
        ranks.setdefault(rank, {})[what] = value
    own = ranks.get(f"rank_{processes.rank}", {})
    try:
        if "random.cpu" in own:
            torch.set_rng_state(own["random.cpu"])
        if "random.cuda" in own and processes.device.type == "cuda":
            torch.cuda.set_rng_state(own["random.cuda"], processes.device)
    except (RuntimeError, TypeError) as error:
        raise DamageError(f"{PROCESSES} has no random state that torch takes: {error}") from error
    sources = [own] if len(ranks) == processes.world_size else [*ranks.values()]
    for name, here in kept.items():
        found = [source[f"kept.{name}"] for source in sources if f"kept.{name}" in source]
        if len(found) != len(sources) or any(there.shape != here.shape for there in found):
            raise DamageError(f"{PROCESSES} lacks {name}")
        here.copy_(torch.stack(found).double().mean(0))
