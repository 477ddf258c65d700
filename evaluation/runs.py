"""Folders of runs: open one, tell whether it is the run that it should be, and what to call it."""

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from data.files import differing
from data.text.shards import TOKENIZER
from data.text.tokenizer import TextTokenizer, load_tokenizer
from model.config import BlockConfig
from model.flops import count_params
from model.gpt import GPT
from training.checkpoint.choice import chosen_checkpoint
from training.checkpoint.contents import Progress
from training.checkpoint.reader import Checkpoint
from training.classification.config import ClassifyConfig
from training.config import RUN_CONFIG
from training.environment import read_starts, whole_cost
from training.language.config import TrainConfig
from training.metrics import read_evaluations, read_metrics
from training.tasks import config_of

WHERE = ("run.out_dir", "run.init_from")  # folders may be moved
HOW = (  # settings that change nothing in what is trained but its rounding
    *("optim.micro_batch_size", "run.device", "run.compile", "run.deterministic", "run.resume"),
    *("run.log_every", "run.save_every", "run.keep_last", "run.keep_best"),
    *("run.wandb", "run.wandb_project"),
)

Config = TrainConfig | ClassifyConfig
_LOG = logging.getLogger(__name__)
_SEED = re.compile(r"_seed(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model and what belongs to it."""

    folder: Path
    config: TrainConfig
    tokenizer: TextTokenizer
    checkpoint: Path  # the newest when it was opened, or another
    progress: Progress
    text_tokens: int | None = None  # of the text that it was trained on, if its checkpoint tells

    @cached_property
    def model(self) -> GPT:
        """The weights of the checkpoint, read when they are first asked for.

        On the CPU until somebody moves it, in evaluation mode, float32.

        Raises:
            FileNotFoundError: training went on meanwhile, and the checkpoint is gone.
            ValueError: it is damaged.
        """
        if not self.checkpoint.exists():
            raise FileNotFoundError(
                f"{self.checkpoint} is gone, as training went on (run.keep_last="
                f"{self.config.run.keep_last}): start again, or copy {self.folder} first"
            )
        # A configuration may ask for any size: nothing is allocated that the file does not hold.
        with torch.device("meta"):
            like = GPT(self.config.model).state_dict()
        weights = Checkpoint.open(self.checkpoint).weights(like)
        return GPT.with_weights(self.config.model, weights).eval()

    @property
    def seed_number(self) -> int:
        """N of a folder NAME_seedN, as runs that go on have other seeds; else the seed itself."""
        named = _SEED.search(self.folder.resolve().name)
        return int(named[1]) if named else self.config.run.seed


def open_run(folder: Path, checkpoint: Path | None = None) -> Run:
    """The run in `folder` at its newest checkpoint, or at the given one.

    Model and data are those that the checkpoint was saved with; config.yaml tells where the data
    are and what computes attention, and if it differs otherwise, a warning is logged.

    Raises:
        FileNotFoundError: the folder lacks its configuration, its tokenizer or a checkpoint.
        ConfigError: the configuration is none.
        ValueError: it is a classifier's, or its tokenizer.json is not the one it was trained with.
    """
    checkpoint = checkpoint or chosen_checkpoint(folder)
    beside = config_of(folder, TrainConfig)
    opened = Checkpoint.open(checkpoint)
    saved = opened.config(TrainConfig)
    config = replace(
        beside,
        model=replace(saved.model, attention=beside.model.attention),
        data=replace(saved.data, path=beside.data.path, mix=beside.data.mix),
    )
    if settings := _differing(beside, config, ()):
        _LOG.warning(
            "%s is not what %s was saved with, and the checkpoint's values are taken: %s",
            *(folder / RUN_CONFIG, checkpoint, settings),
        )
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    _check_tokenizer(folder / TOKENIZER, tokenizer, config, opened.must_match.get("tokenizer"))
    text_tokens = opened.must_match.get("training tokens")
    return Run(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        progress=opened.progress,
        text_tokens=text_tokens if type(text_tokens) is int else None,
    )


def _check_tokenizer(
    path: Path, tokenizer: TextTokenizer, config: TrainConfig, recorded: str | None
) -> None:
    """Refuse a tokenizer whose ids are not those that the weights were trained on.

    Args:
        path: of the tokenizer.
        tokenizer: what is there.
        config: of the run.
        recorded: sha256 of the tokenizer by its checkpoint; None if that does not say.
    """
    if recorded is not None and recorded != tokenizer.sha256:
        raise ValueError(
            f"{path} is not the tokenizer that the run was trained with: its sha256 is "
            f"{tokenizer.sha256[:12]}, and the checkpoint says {str(recorded)[:12]}. Copy it again "
            f"from {config.data.path}, or from where the run came from"
        )
    if not tokenizer.undoes_bytes:
        raise ValueError(
            f"{path} encodes text as bytes, and its decoder does not undo that, so that it prints "
            f"other text. Copy it again from {config.data.path}, or from where the run came from"
        )
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{path} has {tokenizer.vocab_size} entries, and the model knows "
            f"model.vocab_size={config.model.vocab_size}: it is not the model's tokenizer"
        )


def describe(run: Run) -> dict[str, Any]:
    """Settings, cost and validation losses of a run, as JSON can hold them."""
    config, records = run.config, read_metrics(run.folder)
    speeds = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
    return {
        "folder": run.folder.resolve().name,
        "seed": config.run.seed,
        "context_length": config.model.context_length,
        "positions": config.model.positions,
        "mask": mask_of(config.model),
        "document_mask": config.data.document_mask,
        "text_tokens": run.text_tokens,
        "parameters_without_positions": count_params(config.model),
        "step": run.progress.step,
        "tokens": run.progress.tokens,
        "gpu_hours": run.progress.gpu_hours,
        "tokens_per_s": median(speeds) if speeds else None,
        "starts": read_starts(run.folder),
        "evaluations": read_evaluations(run.folder, until=run.progress.step),
        "before": origin_cost(run.folder, run.config),
    }


def mask_of(model: BlockConfig) -> str:
    """What its layers attend to: "dense", "butterfly", "window 1,024, 1 of 4 layers dense" ..."""
    parts = [] if model.mask.pattern == "dense" else [str(model.mask.pattern)]
    if model.window_size is not None:
        parts.append(f"window {model.window_size:,}")
    if model.full_every:
        parts.append(f"1 of {model.full_every} layers dense")
    return ", ".join(parts) or "dense"


def origin_cost(run: Path, config: TrainConfig) -> dict[str, Any] | None:
    """The last evaluation of the run whose weights this one started with, with all its cost.

    As it was noted, or else of the run in run.init_from, or beside this one if both moved. None if
    there is none or it is not known.
    """
    if config.run.init_from is None:
        return None
    noted = [start["before"] for start in read_starts(run) if "before" in start]
    if noted:
        return noted[0]
    origin, here = Path(config.run.init_from), run.resolve()
    folders = [folder for folder in (origin, here.parent / origin.name) if folder.resolve() != here]
    return next((cost for folder in folders if (cost := whole_cost(folder)) is not None), None)


def check_same_settings(folder: Path, config: Config, *, may_differ: Collection[str] = ()) -> None:
    """Refuse a folder whose run, if there is one, was begun with other settings.

    Where a run lies may differ, and what else `may_differ` names, as "optim.max_steps".
    """
    if (folder / RUN_CONFIG).exists():
        check_settings(folder, config_of(folder, type(config)), config, may_differ=may_differ)


def check_settings(
    place: Path, there: Config, here: Config, *, may_differ: Collection[str] = ()
) -> None:
    """Refuse settings that were found in `place` and are not those of `here`."""
    if settings := _differing(there, here, (*WHERE, *may_differ)):
        raise ValueError(
            f"{place} holds a run with other settings: {settings}. Remove it, or choose another "
            "folder"
        )


def _differing(there: Config, here: Config, may_differ: Collection[str]) -> str:
    """Settings that differ, as "optim.lr" or "objective", with both values."""
    values = asdict(there), asdict(here)
    for settings in values:
        data = settings["data"]
        for corpus in (data, *data.get("mix", ())):  # a classifier has no others
            corpus["path"] = str(Path(corpus["path"]).resolve())
    return "; ".join(differing(*values, may_differ))


def labels(runs: Sequence[Run]) -> list[str]:
    """What each run is called: its folder, without the seed where it is one of several.

    Raises:
        ValueError: runs that are called the same differ in more than their seed, or not at all.
    """
    names = [_SEED.sub("", run.folder.resolve().name) for run in runs]
    known: dict[str, list[Run]] = {}
    for name, run in zip(names, runs, strict=True):
        for other in known.setdefault(name, []):
            if settings := _differing(run.config, other.config, ("run.seed", *WHERE, *HOW)):
                raise ValueError(
                    f"{run.folder} (there) and {other.folder} (here) are both called {name}, but "
                    f"differ in more than run.seed: {settings}. Rename one of the folders"
                )
            if run.progress.step != other.progress.step:
                raise ValueError(
                    f"{run.folder} is at step {run.progress.step} and {other.folder} at step "
                    f"{other.progress.step}, so they are no two seeds of {name}: train both to "
                    "the same step"
                )
            a, b = run.config.run, other.config.run
            if (a.seed, a.init_from) == (b.seed, b.init_from):
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
