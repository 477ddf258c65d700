"""The runs that are asked for pass keys: what teaches them, and how each is trained and asked."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from configs.reader import read_config
from evaluation.runs import HOW, check_same_settings
from experiments.gpu_pool import Task, python_command
from experiments.passkey.attentions import settings_of
from training.language.config import TrainConfig

CONFIG = "configs/passkey_4k.yaml"
ASKED = Path("asked/passkey.json")
"""In a run's folder: what scripts.passkey wrote."""
QUESTIONS: tuple[str, ...] = ()
"""Options of scripts.passkey."""


@dataclass(frozen=True, kw_only=True)
class Taught:
    """Documents with keys for a context: token shards in OUT/text_CONTEXT."""

    data: Path
    out: Path
    context: int
    documents: int

    @property
    def folder(self) -> Path:
        return self.out / f"text_{self.context}"

    def task(self) -> Task:
        """Prepare them, or see that they are there; of up to two contexts, as training cuts texts
        anywhere."""
        numbers = ("--longest", str(2 * self.context), "--documents", str(self.documents))
        words = ("scripts.prepare_passkey", str(self.data), "--out", str(self.folder), *numbers)
        return Task(
            name=self.folder.name,
            needs=frozenset(),
            commands=lambda _: [python_command(1, "-m", *words)],
            log=self.folder.with_suffix(".log"),
        )


@dataclass(frozen=True, kw_only=True)
class PasskeyRun:
    """One model, in OUT/ATTENTION_CONTEXT_seedN."""

    taught: Taught
    attention: str
    seed: int
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.taught.out / f"{self.attention}_{self.taught.context}_seed{self.seed}"

    @property
    def is_asked(self) -> bool:
        return (self.folder / ASKED).exists()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of train.py."""
        context = self.taught.context
        shape = (f"model.context_length={context}", "optim.micro_batch_size=1")
        config = read_config(TrainConfig, [CONFIG, *shape, *self.overrides])
        at_once = config.optim.batch_tokens // context  # as one micro-batch
        return (
            CONFIG,
            *(f"data.path={self.taught.data}", f"data.mix=[{{path: {self.taught.folder}}}]"),
            *(f"model.context_length={context}", f"optim.micro_batch_size={at_once}"),
            *settings_of(self.attention, context),
            *(f"run.seed={self.seed}", f"run.out_dir={self.folder}"),
            *self.overrides,
        )

    @cached_property
    def config(self) -> TrainConfig:
        """What the arguments mean."""
        return read_config(TrainConfig, self.arguments)

    def check_folder(self) -> None:
        """Raise ValueError where the folder holds a run with other settings."""
        check_same_settings(self.folder, self.config, may_differ=HOW)

    def task(self) -> Task:
        """Train, or go on, and ask."""
        ask = ("scripts.passkey", str(self.folder), "--out", str((self.folder / ASKED).parent))
        return Task(
            name=self.folder.name,
            needs=frozenset({self.taught.folder.name}),
            commands=lambda n_gpu: [
                python_command(n_gpu, "train.py", *self.arguments),
                python_command(1, "-m", *ask, *QUESTIONS),
            ],
            log=self.folder.with_suffix(".log"),
        )
