"""Run folders: open them, check their settings, and label them."""

import json
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from data.files import differing, write_atomically
from data.text.shards import TOKENIZER
from data.text.tokenizer import TextTokenizer, load_tokenizer
from model.block_config import BlockConfig
from model.flops import count_params
from model.gpt import GPT
from training.checkpoint.choice import find_checkpoint
from training.checkpoint.contents import Progress
from training.checkpoint.reader import Checkpoint
from training.classification.config import ClassifyConfig
from training.config import RUN_CONFIG
from training.environment import read_starts, total_cost
from training.language.config import TrainConfig
from training.metrics import read_evaluations, read_metrics
from training.tasks import config_of

JOBS_PER_GPU = "jobs_per_gpu.json"
WHERE = ("run.out_dir", "run.init_from")  # run folders may be moved
HOW = (  # settings that do not affect training except for rounding
    *("optim.micro_batch_size", "run.device", "run.compile", "run.deterministic", "run.resume"),
    *("run.log_every", "run.save_every", "run.keep_last", "run.keep_best"),
    *("run.wandb", "run.wandb_project"),
)

Config = TrainConfig | ClassifyConfig
_LOG = logging.getLogger(__name__)
_SEED = re.compile(r"_seed(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model with its configuration, tokenizer and progress."""

    folder: Path
    config: TrainConfig
    tokenizer: TextTokenizer
    checkpoint: Path  # the newest at opening time unless another was chosen
    progress: Progress
    text_tokens: int | None = None  # length of the training text, if the checkpoint records it

    @cached_property
    def model(self) -> GPT:
        """Model with the weights of the checkpoint, read on first access.

        In float32 and evaluation mode, on the CPU until it is moved.

        Raises:
            FileNotFoundError: training has continued since and deleted the checkpoint.
            ValueError: the checkpoint is damaged.
        """
        if not self.checkpoint.exists():
            raise FileNotFoundError(
                f"{self.checkpoint} was deleted while training continued (run.keep_last="
                f"{self.config.run.keep_last}). Try again, or copy {self.folder} first"
            )
        # The configuration may claim any size: allocate nothing before the file is checked.
        with torch.device("meta"):
            like = GPT(self.config.model).state_dict()
        weights = Checkpoint.open(self.checkpoint).weights(like)
        return GPT.with_weights(self.config.model, weights).eval()

    @property
    def seed_number(self) -> int:
        """N if the folder is NAME_seedN, because continued runs have other seeds; else run.seed."""
        match = _SEED.search(self.folder.resolve().name)
        return int(match[1]) if match else self.config.run.seed

    @property
    def trained_context(self) -> int:
        """Longest context so far: with model.context_schedule, of the stages that have begun."""
        step, stages = self.progress.step, self.config.stages
        begun = [stage.context_length for stage in stages if stage.first_step < step]
        return max(begun, default=self.config.model.context_length)  # imported weights have no step


def open_run(folder: Path, checkpoint: Path | None = None) -> Run:
    """Open the run in `folder` at its newest checkpoint, or at the given one.

    Model and data settings are taken from the checkpoint. Only the paths of the data and the
    attention implementation are taken from config.yaml. A warning is logged for other differences.

    Raises:
        FileNotFoundError: the folder has no configuration, tokenizer or checkpoint.
        ConfigError: the configuration is invalid.
        ValueError: the run is a classifier, or its tokenizer.json is not the one used in training.
    """
    checkpoint = checkpoint or find_checkpoint(folder)
    folder_config = config_of(folder, TrainConfig)
    opened = Checkpoint.open(checkpoint)
    saved = opened.config(TrainConfig)
    config = replace(
        folder_config,
        model=replace(saved.model, attention=folder_config.model.attention),
        data=replace(saved.data, path=folder_config.data.path, mix=folder_config.data.mix),
    )
    if settings := _differing(folder_config, config, ()):
        _LOG.warning(
            "%s differs from the settings in %s, and those of the checkpoint are used: %s",
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
    """Raise ValueError if the tokenizer's ids are not those that the weights were trained on.

    Args:
        path: file of the tokenizer.
        tokenizer: the tokenizer in that file.
        config: configuration of the run.
        recorded: sha256 of the tokenizer according to the checkpoint; None if not recorded.
    """
    if recorded is not None and recorded != tokenizer.sha256:
        raise ValueError(
            f"{path} is not the tokenizer that the run was trained with: its sha256 is "
            f"{tokenizer.sha256[:12]}, and the checkpoint says {str(recorded)[:12]}. Copy it again "
            f"from {config.data.path}, or from the original run"
        )
    if not tokenizer.undoes_bytes:
        raise ValueError(
            f"{path} encodes text as bytes, but its decoder does not convert them back, so decoded "
            f"text would be wrong. Copy it again from {config.data.path}, or from the original run"
        )
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{path} has {tokenizer.vocab_size} entries, which must be at most "
            f"model.vocab_size={config.model.vocab_size}: it is not the model's tokenizer"
        )


def describe(run: Run) -> dict[str, Any]:
    """Settings, cost and validation losses of a run, in JSON types."""
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
        "jobs_per_gpu": jobs_per_gpu(run.folder),
        "starts": read_starts(run.folder),
        "evaluations": read_evaluations(run.folder, until=run.progress.step),
        "before": origin_cost(run.folder, run.config),
    }


def jobs_per_gpu(folder: Path) -> int | None:
    """Largest number of runs that shared the GPU of a run; None if not recorded."""
    path = folder / JOBS_PER_GPU
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def note_sharing(folder: Path, most: int) -> None:
    """Record in a run's folder that up to `most` runs share its GPU; never lower the number."""
    folder.mkdir(parents=True, exist_ok=True)
    most = max(most, jobs_per_gpu(folder) or 1)
    write_atomically(folder / JOBS_PER_GPU, f"{most}\n".encode())


def mask_of(model: BlockConfig) -> str:
    """Attention mask in words: "dense", "butterfly", "window 1,024, 1 of 4 layers dense" ..."""
    parts = [] if model.mask.pattern == "dense" else [str(model.mask.pattern)]
    if model.window_size is not None:
        parts.append(f"window {model.window_size:,}")
    if model.full_every:
        parts.append(f"1 of {model.full_every} layers dense")
    return ", ".join(parts) or "dense"


def origin_cost(run: Path, config: TrainConfig) -> dict[str, Any] | None:
    """Last evaluation and total cost of the run that this one was initialized from.

    Taken from the record made at the start, or else from the folder run.init_from, or from a folder
    of that name next to this run if both were moved. None if there is none or it is unknown.
    """
    if config.run.init_from is None:
        return None
    recorded = [start["before"] for start in read_starts(run) if "before" in start]
    if recorded:
        return recorded[0]
    origin, run = Path(config.run.init_from), run.resolve()
    folders = [folder for folder in (origin, run.parent / origin.name) if folder.resolve() != run]
    return next((cost for folder in folders if (cost := total_cost(folder)) is not None), None)


def check_same_settings(folder: Path, config: Config, *, may_differ: Collection[str] = ()) -> None:
    """Raise ValueError if the folder contains a run that was started with other settings.

    Folders (run.out_dir, run.init_from) may differ, and so may the settings named in `may_differ`,
    for example "optim.max_steps".
    """
    if (folder / RUN_CONFIG).exists():
        check_settings(folder, config_of(folder, type(config)), config, may_differ=may_differ)


def check_settings(
    place: Path, there: Config, here: Config, *, may_differ: Collection[str] = ()
) -> None:
    """Raise ValueError if the settings `there`, read from `place`, differ from those of `here`."""
    if settings := _differing(there, here, (*WHERE, *may_differ)):
        raise ValueError(
            f"{place} holds a run with other settings: {settings}. Remove it, or choose another "
            "folder"
        )


def same_training(there: TrainConfig, here: TrainConfig) -> bool:
    """Whether two runs have the same settings and seed, except for the number of steps.

    Folders may differ, because runs and texts are copied between machines. Compare the texts by
    other means.
    """

    def comparable(config: TrainConfig) -> TrainConfig:
        data, origin = config.data, config.run.init_from
        mix = [replace(corpus, path=Path(corpus.path).name) for corpus in data.mix]
        return replace(
            config,
            data=replace(data, path="", mix=mix),
            run=replace(config.run, init_from=origin and Path(origin).name),
        )

    steps = "optim.max_steps", "optim.warmup_steps", "run.eval_every"
    return not _differing(comparable(there), comparable(here), ("run.out_dir", *HOW, *steps))


def _differing(there: Config, here: Config, may_differ: Collection[str]) -> str:
    """Describe settings that differ, such as "optim.lr" or "objective", with both values."""
    values = asdict(there), asdict(here)
    for settings in values:
        data = settings["data"]
        for corpus in (data, *data.get("mix", ())):  # classifiers have no mix
            corpus["path"] = str(Path(corpus["path"]).resolve())
    return "; ".join(differing(*values, may_differ))


def labels(runs: Sequence[Run]) -> list[str]:
    """Labels of the runs: their folder names without _seedN. Seeds of one model share a label.

    Raises:
        ValueError: runs with the same label differ in more than their seed, or not at all.
    """
    names = [_SEED.sub("", run.folder.resolve().name) for run in runs]
    runs_by_name: dict[str, list[Run]] = {}
    for name, run in zip(names, runs, strict=True):
        for other in runs_by_name.setdefault(name, []):
            if settings := _differing(run.config, other.config, ("run.seed", *WHERE, *HOW)):
                raise ValueError(
                    f"{run.folder} (there) and {other.folder} (here) are both called {name}, but "
                    f"differ in more than run.seed: {settings}. Rename one of the folders"
                )
            if run.progress.step != other.progress.step:
                raise ValueError(
                    f"{run.folder} is at step {run.progress.step} and {other.folder} at step "
                    f"{other.progress.step}, so they cannot be two seeds of {name}: train both to "
                    "the same step"
                )
            a, b = run.config.run, other.config.run
            if (a.seed, a.init_from) == (b.seed, b.init_from):
                raise ValueError(
                    f"{run.folder} and {other.folder} both have run.seed={run.config.run.seed}, "
                    "and would be counted as two seeds that agree: leave one out"
                )
            if run.seed_number == other.seed_number:
                raise ValueError(
                    f"{run.folder} and {other.folder} would both be seed {run.seed_number} of "
                    f"{name}: rename the folders to {name}_seed1, {name}_seed2 ..."
                )
        runs_by_name[name].append(run)
    return names
