"""Folders of runs: open one, tell whether it is the run that it should be, and what to call it."""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from configs import RUN_CONFIG, TrainConfig, load_config
from data.shards import TOKENIZER
from data.tokenizer import TextTokenizer, load_tokenizer
from model import GPT
from training.checkpoint import Progress, latest_checkpoint, load_model, read_progress

_SEED = re.compile(r"_seed(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model and what belongs to it."""

    folder: Path
    config: TrainConfig
    tokenizer: TextTokenizer
    checkpoint: Path
    """Its newest."""
    progress: Progress
    """How far it was trained."""

    @cached_property
    def model(self) -> GPT:
        """The weights of the checkpoint, read when they are first asked for.

        On the CPU until somebody moves it, in evaluation mode, float32.
        """
        model = GPT(self.config.model)
        load_model(self.checkpoint, model)
        return model.eval()

    @property
    def seed_number(self) -> int:
        """N of a folder NAME_seedN; of another folder the seed itself.

        Not the seed: that of a run which starts with another's weights is another one's.
        """
        named = _SEED.search(self.folder.resolve().name)
        return int(named[1]) if named else self.config.run.seed


def open_run(folder: Path) -> Run:
    """The run in `folder` at its newest checkpoint.

    Raises:
        FileNotFoundError: the folder lacks its configuration, its tokenizer or a checkpoint.
        ConfigError: the configuration is none.
    """
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise FileNotFoundError(f"{folder} has no checkpoint yet: train it first, with train.py")
    config = load_config([str(folder / RUN_CONFIG)])
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    progress, _ = read_progress(checkpoint)
    return Run(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        progress=progress,
    )


def check_same_settings(
    folder: Path, config: TrainConfig, *, may_differ: Collection[str] = ()
) -> None:
    """Refuse to take a run for one of `config` that was begun with other settings.

    Args:
        folder: of the run; nothing is refused if there is none yet.
        config: that it should have. Where it lies may differ: a folder may have been moved.
        may_differ: more such settings, as "optim.max_steps".

    Raises:
        ValueError: names the settings with both values.
    """
    begun = folder / RUN_CONFIG
    if not begun.exists():
        return
    there, here = (asdict(c) for c in (load_config([str(begun)]), config))
    for settings in (there, here):
        settings["data"]["path"] = str(Path(settings["data"]["path"]).resolve())
    differing = [
        f"{group}.{name} is {there[group][name]!r} there and {value!r} here"
        for group, values in here.items()
        for name, value in values.items()
        if value != there[group][name]
        and f"{group}.{name}" not in {"run.out_dir", "run.init_from", *may_differ}
    ]
    if differing:
        raise ValueError(
            f"{folder} holds a run with other settings: {'; '.join(differing)}. Remove it, or "
            "choose another folder"
        )


def labels(runs: Sequence[Run]) -> list[str]:
    """What each run is called: its folder, without the seed where it is one of several.

    Raises:
        ValueError: runs that are called the same differ in more than their seed, or not at all.
    """
    names = [_SEED.sub("", run.folder.resolve().name) for run in runs]
    known: dict[str, list[Run]] = {}
    for name, run in zip(names, runs, strict=True):
        for other in known.setdefault(name, []):
            if _without_seed(run.config) != _without_seed(other.config):
                raise ValueError(
                    f"{run.folder} and {other.folder} are both called {name}, but differ in more "
                    "than run.seed: rename one of the folders"
                )
            if run.progress.step != other.progress.step:
                raise ValueError(
                    f"{run.folder} is at step {run.progress.step} and {other.folder} at step "
                    f"{other.progress.step}, so they are no two seeds of {name}: train both to "
                    "the same step"
                )
            if _origin(run.config) == _origin(other.config):
                raise ValueError(
                    f"{run.folder} and {other.folder} both have run.seed={run.config.run.seed}: "
                    "two seeds would seem to agree, leave one out"
                )
            if run.seed_number == other.seed_number:
                raise ValueError(
                    f"{run.folder} and {other.folder} would both be seed {run.seed_number} of "
                    f"{name}: name the folders {name}_seed1, {name}_seed2 ..."
                )
        known[name].append(run)
    return names


def _without_seed(config: TrainConfig) -> TrainConfig:
    run = replace(config.run, seed=0, out_dir="", init_from=None)
    return replace(config, run=run)


def _origin(config: TrainConfig) -> tuple[int, str | None]:
    """What two seeds of one model differ in."""
    return config.run.seed, config.run.init_from
