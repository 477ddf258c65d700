"""Runs of train.py that other scripts start and read."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from configs.reader import read_config
from evaluation.runs import HOW, check_settings
from training.classification.config import ClassifyConfig
from training.config import RUN_CONFIG
from training.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class ClassifierRun:
    """One run, by its folder and by what it is told."""

    folder: Path
    arguments: tuple[str, ...]
    """Of train.py."""

    @cached_property
    def config(self) -> ClassifyConfig:
        """What the arguments mean."""
        return read_config(ClassifyConfig, self.arguments)

    @property
    def is_finished(self) -> bool:
        """Whether its best weights were scored on the test split."""
        return is_finished(self.folder)

    def check_folder(self) -> None:
        """Raise ValueError where the folder holds a run with other settings."""
        if (self.folder / RUN_CONFIG).exists():
            check_settings(self.folder, read_run_config(self.folder), self.config, may_differ=HOW)


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has come to its end, the score on the test split."""
    records = read_metrics(folder)
    return bool(records) and "test_accuracy" in records[-1]


def read_run_config(folder: Path) -> ClassifyConfig:
    """What the run in `folder` was told."""
    return read_config(ClassifyConfig, [str(folder / RUN_CONFIG)])
