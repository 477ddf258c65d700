"""Checkpoints that are whole or not there, and runs that go on from them bit for bit.

    RUN/checkpoints/step_00001000/
        state.json       progress, configuration, and what a run must share to go on from here
        *.distcp         model, optimizer and random state, written by torch.distributed.checkpoint
        .metadata

A checkpoint is written into a folder of another name, synced to disk and renamed: a run that is
killed while saving leaves its older checkpoints and nothing that could be taken for a new one.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from data.files import differing, sync_folder, write_atomically
from training.config import AdamWConfig
from training.distributed import Processes
from training.tasks import RunConfiguration

T = TypeVar("T")

CHECKPOINTS = "checkpoints"
UNFINISHED = ".unfinished_"
"""What the name of a checkpoint begins with while it is written or deleted."""
_STATE = "state.json"
_DAMAGE = (AssertionError, EOFError, FileNotFoundError, UnicodeDecodeError, UnpicklingError)
"""What torch.distributed.checkpoint raises where a file is cut short or gone."""


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


def shared_settings(config: RunConfiguration) -> dict[str, Any]:
    """What a run shares with the checkpoint that it goes on from, whatever its task is."""
    # How attention is computed changes rounding only, and dropout is no part of the weights.
    free = {"attention", "dropout", "attention_dropout"}
    shape = {f"model.{k}": v for k, v in asdict(config.model).items() if k not in free}
    # It is not read again, but config.yaml must not come to tell of another origin. Both folders
    # may have been moved since.
    origin = config.run.init_from and Path(config.run.init_from).absolute().name
    return shape | {"run.seed": config.run.seed, "run.init_from": origin}


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in the folder of a run."""
    return run / CHECKPOINTS / f"step_{step:08d}"


def latest_checkpoint(run: Path) -> Path | None:
    """The newest finished checkpoint of a run, or None."""
    found = sorted((run / CHECKPOINTS).glob("step_*"))
    return found[-1] if found else None


def save_checkpoint(
    run: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    must_match: dict[str, Any],
    processes: Processes,
    *,
    config: dict[str, Any],
    keep_last: int,
) -> Path:
    """Save a checkpoint and delete all but the newest `keep_last`. All processes call this.

    Two dictionaries are kept as JSON: `must_match`, what a run going on from here must share, and
    `config`, the whole configuration, for readers.

    Raises:
        OSError: It cannot be written, as on a full disk; older checkpoints are left as they were.
    """
    state = _model_and_optimizer(model, optimizer)
    state["rng"] = {f"rank_{processes.rank}": _random_state(processes.device)}
    final = _write(run, progress, must_match, config, state, processes)
    if processes.is_main:
        for old in sorted(final.parent.glob("step_*"))[:-keep_last]:
            # Out of the finished ones first: a deletion that is cut short must not leave half.
            doomed = old.rename(old.with_name(UNFINISHED + old.name))
            shutil.rmtree(doomed)
    processes.barrier()
    return final


def save_model(run: Path, model: nn.Module, *, config: dict[str, Any]) -> Path:
    """Save weights alone, as step 0 of a run in which nothing was trained. One process calls this.

    `read_weights` reads them, and no run can go on from there.

    Raises:
        ValueError: The run has a checkpoint already.
        OSError: It cannot be written, as on a full disk.
    """
    existing = latest_checkpoint(run)
    if existing is not None:
        raise ValueError(f"{run} already has {existing.name}: choose another folder for the run")
    alone = Processes(rank=0, world_size=1, device=torch.device("cpu"))
    return _write(run, Progress(), {}, config, {"model": model.state_dict()}, alone)


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    must_match: dict[str, Any],
    processes: Processes,
) -> Progress:
    """Put model, optimizer and random state back as they were saved.

    A process whose rank the saving run did not have keeps the random state it has.

    Raises:
        ValueError: The checkpoint was made by a run that differs in `must_match`, or holds weights
            alone.
    """
    progress, saved = read_progress(folder)
    saved_keys = _saved(folder)
    if not any(key.startswith("optimizer.") for key in saved_keys):
        run = folder.parent.parent
        raise ValueError(
            f"{folder} holds weights and no state of an optimizer, so no run can go on from it: to "
            f"start from its weights, choose another run.out_dir and set run.init_from={run}"
        )
    if changes := differing(saved, must_match):
        raise ValueError(
            f"{folder} is a checkpoint of another run: {'; '.join(changes)}. "
            "Give these the checkpoint's values to go on from it, or choose another run.out_dir"
        )
    state = _model_and_optimizer(model, optimizer)
    with _reading(folder):
        dcp.load(state, checkpoint_id=folder, no_dist=processes.world_size == 1)
    model.load_state_dict(state["model"])
    # The saved state holds betas, decay and the like too, and the configuration is to win.
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)

    rank = f"rank_{processes.rank}"
    if any(key.startswith(f"rng.{rank}.") for key in saved_keys):
        random = {"rng": {rank: _random_state(processes.device)}}
        # Each process reads its own state: nothing here for the processes to agree on.
        with _reading(folder):
            dcp.load(random, checkpoint_id=folder, no_dist=True)
        _set_random_state(random["rng"][rank], processes.device)
    return progress


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint by their names in the model, on the CPU.

    Nothing else is read, so the checkpoint need not have an optimizer.

    Raises:
        FileNotFoundError: There is no finished checkpoint in the folder.
    """
    read_progress(folder)
    prefix = "model."
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _saved(folder).items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with _reading(folder):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(prefix): weights for name, weights in state.items()}


def read_progress(folder: Path) -> tuple[Progress, dict[str, Any]]:
    """Progress of a checkpoint, and what a run must share with it.

    Raises:
        FileNotFoundError: There is no finished checkpoint in the folder.
        ValueError: It is damaged.
    """
    return _read_state(folder, lambda state: (Progress(**state["progress"]), state["must_match"]))


def read_task(folder: Path) -> str | None:
    """What the run learned that saved a checkpoint, as its `task`; None if it does not tell."""
    return _read_state(folder, lambda state: state["config"].get("task"))


def read_optim(folder: Path) -> AdamWConfig:
    """The optimizer's settings of the run as it saved a checkpoint.

    Raises:
        FileNotFoundError: There is no finished checkpoint in the folder.
        ValueError: It is damaged.
    """
    names = {field.name for field in fields(AdamWConfig)}

    def take(state: dict[str, Any]) -> AdamWConfig:
        saved = state["config"]["optim"]  # what is new since then has its default
        return AdamWConfig(**{name: saved[name] for name in names & saved.keys()})

    return _read_state(folder, take)


def _read_state(folder: Path, take: Callable[[dict[str, Any]], T]) -> T:
    path = folder / _STATE
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} holds no finished checkpoint ({_STATE} is missing): give a folder named "
            "checkpoints/step_... of a run"
        )
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from error


def _saved(folder: Path) -> dict[str, Any]:
    """What torch.distributed.checkpoint tells of each tensor and value in a checkpoint."""
    with _reading(folder):
        return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Say which checkpoint it is that cannot be read, where it is not all there."""
    try:
        with _without_warning():
            yield
    except dcp.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, _DAMAGE):
            raise _damaged(folder, cause) from error
        raise  # no memory left, say: the checkpoint may be whole
    except _DAMAGE as error:
        raise _damaged(folder, error) from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say which checkpoint it is that cannot be written, where the disk may be to blame."""
    try:
        with _without_warning():
            yield
    except dcp.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        # torch's own writer tells of a full disk by a RuntimeError; those of a GPU are subclasses
        if isinstance(cause, OSError) or type(cause) is RuntimeError:
            reason = str(cause).partition("\n")[0]
            raise OSError(
                f"{folder} could not be written, and its disk may be full ({reason}): make room "
                "there and start again; older checkpoints are whole"
            ) from error
        raise


def _damaged(folder: Path, error: BaseException) -> ValueError:
    return ValueError(
        f"{folder} is damaged, or was copied in part ({type(error).__name__}: {error}): copy it "
        "again, or move it away to go on from the checkpoint before it"
    )


@contextmanager
def _without_warning() -> Iterator[None]:
    """Silence torch's warning that one process saves or loads alone: it was told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _write(
    run: Path,
    progress: Progress,
    must_match: dict[str, Any],
    config: dict[str, Any],
    state: dict[str, Any],
    processes: Processes,
) -> Path:
    """Write a checkpoint under another name, sync it and rename it."""
    state_json = {"progress": asdict(progress), "must_match": must_match, "config": config}
    final = checkpoint_folder(run, progress.step)
    unfinished = final.with_name(UNFINISHED + final.name)
    if processes.is_main:
        for stale in final.parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(stale)
        unfinished.mkdir(parents=True)
    processes.barrier()
    with _writing(final):
        dcp.save(state, checkpoint_id=unfinished, no_dist=processes.world_size == 1)
    if processes.is_main:
        write_atomically(unfinished / _STATE, json.dumps(state_json, indent=2).encode())
        unfinished.rename(final)
        sync_folder(final.parent)
    return final


def _model_and_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    for group in state["param_groups"]:
        # a tensor where steps are captured in a CUDA graph: others must be able to go on from it
        group["lr"] = float(group["lr"])
    return {"model": model.state_dict(), "optimizer": state}


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
