"""What a checkpoint holds, and how it is written and read."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from configs.reader import from_record
from data.files import differing, leaves, parse_json, sync_folder, write_atomically
from model.config import ModelConfig
from training.checkpoint.files import (
    DamageError,
    check_declared,
    check_sums,
    read_tensors,
    write_sums,
    write_tensors,
)
from training.checkpoint.folders import (
    UNFINISHED,
    checkpoint_folder,
    checkpoints,
    clear_unfinished,
    latest_checkpoint,
)
from training.config import AdamWConfig
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

    `read_weights` reads them; a run cannot resume there. `tokenizer` is the sha256 of theirs.

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


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    must_match: dict[str, Any],
    processes: Processes,
    kept: Tensors = MappingProxyType({}),
) -> Progress:
    """Put model, optimizer, random state and the tensors `kept` back as they were saved.

    A process whose rank the saving run did not have keeps the random state it has. Of another
    number of processes, each takes the mean of what they kept.

    Raises:
        ValueError: The checkpoint is damaged, was made by a run that differs in `must_match`, or
            holds weights alone.
    """
    progress, saved = read_progress(folder)
    if progress.step == 0:
        run = folder.parent.parent
        raise ValueError(
            f"{folder} holds weights and no state of an optimizer, so no run can go on from it: to "
            f"start from its weights, choose another run.out_dir and set run.init_from={run}"
        )
    if changes := differing(_with_later_settings(saved, must_match), must_match):
        raise ValueError(
            f"{folder} is a checkpoint of another run: {'; '.join(changes)}. "
            "Give these the checkpoint's values to resume it. To start a new run with its weights, "
            f"set run.init_from={folder.parent.parent} and another run.out_dir"
        )
    with _reading(folder):
        check_declared(folder / MODEL, model.state_dict())
        check_declared(folder / OPTIMIZER, optimizer_tensors(model, optimizer))
        check_sums(folder, (MODEL, OPTIMIZER, PROCESSES))
        weights = read_tensors(folder / MODEL)
        check_same_tensors(MODEL, weights, model.state_dict())
        put_weights(model, weights)
        _load_optimizer(model, optimizer, read_tensors(folder / OPTIMIZER))
        _set_own_state(read_tensors(folder / PROCESSES), processes, kept)
    return progress


def _with_later_settings(saved: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says, and of settings that are newer than it their defaults.

    A new setting's default is what was always so before.
    """
    defaults = {"model": asdict(ModelConfig()), "optim": asdict(AdamWConfig(max_steps=1))}
    known, always_so = dict(leaves(saved)), dict(leaves(defaults))
    later = (dict(leaves(wanted)).keys() - known.keys()) & always_so.keys()
    return known | {name: always_so[name] for name in later}


def read_weights(folder: Path, like: Tensors | None = None) -> dict[str, Tensor]:
    """The weights of a checkpoint by their names in the model, on the CPU.

    Nothing else is read, so the checkpoint need not have an optimizer. `like` are the tensors that
    it must have, of which only names, shapes and dtypes are looked at; None takes any.

    Raises:
        FileNotFoundError: There is no finished checkpoint in the folder.
        ValueError: It is damaged, or its weights are not those of the model, or not finite.
    """
    read_progress(folder)
    with _reading(folder):
        if like is not None:
            check_declared(folder / MODEL, like)
        check_sums(folder, (MODEL,))
        weights = read_tensors(folder / MODEL)
        if like is not None:
            check_same_tensors(MODEL, weights, like)
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(
                f"{folder} is of a model that is broken: {name} has values that are not finite. "
                "Take an older checkpoint"
            )
    return weights


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


def read_progress(folder: Path) -> tuple[Progress, dict[str, Any]]:
    """Progress of a checkpoint, and what a run must share with it.

    Raises:
        FileNotFoundError: There is no finished checkpoint in the folder.
        ValueError: It is damaged.
    """
    return _read_state(
        folder, lambda state: (Progress(**state["progress"]), _settings_in(state, "must_match"))
    )


def recorded_config(folder: Path, schema: type[C]) -> C:
    """The configuration of the run as it saved a checkpoint.

    Raises:
        FileNotFoundError: There is no finished checkpoint in the folder.
        ValueError: It is damaged, or of another task.
    """
    values = _read_state(folder, lambda state: _settings_in(state, "config"))
    return from_record(schema, values, str(folder / STATE))


def read_task(folder: Path) -> str | None:
    """What the run learned that saved a checkpoint, as its `task`; None if it does not tell."""
    task = _read_state(folder, lambda state: _settings_in(state, "config")).get("task")
    return task if isinstance(task, str) else None


def read_optim(folder: Path) -> AdamWConfig:
    """The optimizer's settings of the run as it saved a checkpoint.

    Raises:
        FileNotFoundError: There is no finished checkpoint in the folder.
        ValueError: It is damaged.
    """
    names = {field.name for field in fields(AdamWConfig)}

    def take(state: dict[str, Any]) -> AdamWConfig:
        saved = _settings_in(_settings_in(state, "config"), "optim")
        known = {name: saved[name] for name in names & saved.keys()}
        return from_record(AdamWConfig, known, "optim")  # what is new since then has its default

    return _read_state(folder, take)


def val_loss_of(folder: Path) -> float | None:
    """The validation loss that a checkpoint tells of; None also where it is damaged.

    Raises:
        OSError: It cannot be read, which is not a reason to delete it.
    """
    try:
        return read_progress(folder)[0].val_loss
    except (ValueError, FileNotFoundError):
        return None


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


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Tensors) -> None:
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


def _set_own_state(saved: Tensors, processes: Processes, kept: Tensors) -> None:
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


def _read_state(folder: Path, take: Callable[[dict[str, Any]], T]) -> T:
    path = folder / STATE
    if (folder / ".metadata").exists():
        raise ValueError(
            f"{folder} was saved by version 0.2 or older, in a format that can hold code, which "
            "this version does not read: go on with the version that wrote it"
        )
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} holds no finished checkpoint ({STATE} is missing): give a folder named "
            "checkpoints/step_... of a run"
        )
    with _reading(folder):
        check_sums(folder, (STATE,))
        try:
            return take(parse_json(path.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamageError(f"{STATE}: {type(error).__name__}: {error}") from error


def _settings_in(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of state.json, whose author may be anybody."""
    if not isinstance(values[name], dict):
        raise ValueError(f"{name} must be an object")
    return values[name]


def is_whole(folder: Path) -> bool:
    """Whether every file that a checkpoint must have is as it was written."""
    try:
        progress, _ = read_progress(folder)
        check_sums(folder, (MODEL,) if progress.step == 0 else (MODEL, OPTIMIZER, PROCESSES))
    except (ValueError, OSError):
        return False
    return True


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Say which checkpoint it is that is damaged, and what to do about it."""
    try:
        yield
    except DamageError as error:
        run = folder.parent.parent
        older = takewhile(lambda other: other != folder, checkpoints(run))
        whole = next(filter(is_whole, reversed([*older])), None)
        remedy = (
            f"copy it again, or go on from {whole}, which is whole, with run.resume=previous"
            if whole
            else "copy it again; no older one is whole"
        )
        raise ValueError(f"{folder} is damaged, or was copied in part ({error}): {remedy}") from (
            error
        )
