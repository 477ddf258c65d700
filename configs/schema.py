"""The configuration of a run: the owners' dataclasses composed, and how they are filled.

defaults <- the YAML file <- key=value on the command line
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import omegaconf
import yaml
from omegaconf import DictConfig, OmegaConf

from data.text.batches import DataConfig
from model import ModelConfig
from training.metrics import WandbMode
from training.numerics import Dtype
from training.optim import OptimConfig

C = TypeVar("C")

RUN_CONFIG = "config.yaml"
"""File in the folder of a run that holds its configuration."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where and how a run computes, and what it writes."""

    out_dir: str
    """Folder of the run: config.yaml, metrics.jsonl, checkpoints. Made if missing."""
    seed: int = 1111
    """Of the weights, the order of the data and dropout."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes a GPU where there is one."""
    dtype: Dtype = "bfloat16"
    """Of the activations and matrix products; the weights are always float32."""
    compile: bool = True
    """Whether torch.compile fuses the model."""
    deterministic: bool = True
    """Whether the same run must give the same bits: free with our attention (docs/results has the
    measurement); PyTorch's may be slower with it."""
    log_every: int = 10
    """Steps between records of the training loss; also how often host and GPU wait for each
    other."""
    eval_every: int = 1000
    """Steps between passes over the whole validation set; there is always one at the end."""
    save_every: int = 1000
    """Steps between checkpoints; there is always one at the end."""
    keep_last: int = 2
    """Checkpoints to keep."""
    resume: Literal["auto", "never"] = "auto"
    """auto goes on from the newest checkpoint in out_dir; never refuses a folder that has one."""
    init_from: str | None = None
    """Folder of a run whose newest weights (a classifier's: its best) this run starts with;
    optimizer, steps and data order are new. Read at the first start only: later starts go on from
    out_dir, and must name a folder that is called the same, so that config.yaml always tells where
    the weights came from."""
    wandb: WandbMode = "disabled"
    """Weights & Biases: offline keeps its files in out_dir."""
    wandb_project: str = "papilio"
    """Project that wandb files the run under."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"run.seed must lie in [0, 2^63), got {self.seed}")
        for name in ("log_every", "eval_every", "save_every", "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"run.{name} must be at least 1, got {getattr(self, name)}")
        if self.save_every % self.log_every != 0:
            raise ValueError(
                f"run.save_every={self.save_every} must be a multiple of run.log_every="
                f"{self.log_every}: a run that goes on from a checkpoint would otherwise average "
                "its first loss over fewer steps, and what is saved would not have been checked"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that `train.py` is told."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    run: RunConfig

    def __post_init__(self) -> None:
        self.grad_accum_steps(world_size=1)

    def grad_accum_steps(self, world_size: int) -> int:
        """Micro-batches that each GPU takes through the model in one optimizer step.

        Raises:
            ValueError: batch_tokens is no multiple of what the GPUs take at once.
        """
        at_once = self.optim.micro_batch_size * self.model.context_length * world_size
        if self.optim.batch_tokens % at_once != 0:
            below = self.optim.batch_tokens // at_once * at_once
            near = f"{below} or {below + at_once}" if below else f"{at_once}"
            raise ValueError(
                f"optim.batch_tokens={self.optim.batch_tokens} must be a multiple of "
                f"optim.micro_batch_size={self.optim.micro_batch_size} * "
                f"model.context_length={self.model.context_length} * {world_size} GPU(s) "
                f"= {at_once}: {near} would do"
            )
        return self.optim.batch_tokens // at_once


class ConfigError(ValueError):
    """A configuration that no run can be made of; the message says which field and why."""


def load_config(argv: Sequence[str]) -> TrainConfig:
    """What `train.py` is told by its command line: `read_config` of a TrainConfig."""
    return read_config(TrainConfig, argv)


def read_config(schema: type[C], argv: Sequence[str]) -> C:
    """The configuration from a command line: a YAML file, then any number of key=value.

    Args:
        schema: what is configured, a frozen dataclass.
        argv: the arguments.

    Raises:
        ConfigError: no or an unreadable file, an unknown key, a wrong type or value.
    """
    if not argv or ("=" in argv[0] and not Path(argv[0]).is_file()):
        raise ConfigError("name a configuration first: train.py configs/quickstart.yaml key=value")
    path, overrides = Path(argv[0]), list(argv[1:])
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; the configurations that come along are configs/*")
    from_file = _read_yaml(path)
    for override in overrides:
        if "=" not in override or override.startswith("-"):
            raise ConfigError(f"{override!r} must read key=value, for example optim.lr=3e-4")
        try:
            OmegaConf.from_dotlist([override])
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{override!r} must hold YAML after its first '=', and cannot be read as such: "
                f"{' '.join(str(error).split())}"
            ) from error
    return _config_of(schema, from_file, overrides, str(path))


def from_yaml(text: str) -> TrainConfig:
    """What `to_yaml` wrote; a setting that is new since then has its default.

    Raises:
        ConfigError: a setting is not known here.
    """
    values = OmegaConf.create(text)
    assert isinstance(values, DictConfig)
    return _config_of(TrainConfig, values, (), "the configuration of a run")


def _config_of(schema: type[C], values: DictConfig, overrides: Sequence[str], source: str) -> C:
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(schema), values, OmegaConf.from_dotlist(list(overrides))
        )
        config = OmegaConf.to_object(merged)
    except omegaconf.errors.MissingMandatoryValue as error:
        raise ConfigError(
            f"{error.full_key} has no value: set it in {source} or on the command line"
        ) from error
    except omegaconf.errors.OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{error.full_key or source}: {reason}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert isinstance(config, schema)
    return config


def _read_yaml(path: Path) -> DictConfig:
    try:
        values = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} must be a YAML file, and cannot be read as one: {reason}"
        ) from error
    if not isinstance(values, DictConfig):
        raise ConfigError(
            f"{path} must map model, data, optim and run to their values, and holds a list: see "
            "configs/quickstart.yaml"
        )
    return values


def to_yaml(config: Any) -> str:
    """The whole configuration as YAML, which `load_config` and `from_yaml` read back."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
