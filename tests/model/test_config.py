"""Model configurations: defaults, parsing and errors."""

from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any, get_args

import pytest

from configs.reader import ConfigError, from_yaml, read_config, to_yaml
from kernels.attention import IMPLS
from model.block_config import Attention
from model.config import GPT2_SIZES, ModelConfig
from model.mask_config import MaskConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Minimal schema with a ModelConfig field."""

    model: ModelConfig = field(default_factory=ModelConfig)


@pytest.fixture
def resolve(tmp_path):
    """Read a configuration from a command line, as train.py does."""
    path = tmp_path / "empty.yaml"
    path.touch()
    return lambda *overrides: read_config(RunConfig, [str(path), *overrides]).model


def test_defaults_are_gpt2_small() -> None:
    config = ModelConfig()
    assert config == ModelConfig(**GPT2_SIZES["small"])
    assert (config.head_dim, config.vocab_size, config.context_length) == (64, 50_257, 1024)


ROTARY = {"positions": "rotary"}


@pytest.mark.parametrize("size", GPT2_SIZES)
def test_sizes_are_valid(size: str) -> None:
    assert ModelConfig(**GPT2_SIZES[size]).head_dim == 64


def test_every_attention_but_auto_is_a_kernel_implementation() -> None:
    assert set(get_args(Attention)) == {"auto", *IMPLS}


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "rows"),
    [(50_257, 64, 50_304), (64, 64, 64), (65, 64, 128), (7, 1, 7)],
)
def test_padded_vocab_size(vocab_size: int, multiple: int, rows: int) -> None:
    assert ModelConfig(vocab_size=vocab_size, vocab_multiple=multiple).padded_vocab_size == rows


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ModelConfig().n_layer = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 0}, "model.n_layer=0 must be at least 1"),
        ({"vocab_size": -1}, "model.vocab_size=-1 must be at least 1"),
        ({"vocab_multiple": 0}, "model.vocab_multiple=0 must be at least 1"),
        ({"context_length": 0}, "model.context_length=0 must be at least 1"),
        ({"n_head": 7}, "model.n_embd=768 must be divisible by model.n_head=7"),
        ({"n_head": 2}, "model.n_embd=768 over model.n_head=2 gives heads of 384.*to 3 or more"),
        ({"dropout": 1.0}, "model.dropout=1.0 is a rate"),
        ({"dropout": float("nan")}, "model.dropout=nan is a rate"),
        ({"attention_dropout": -0.1}, "model.attention_dropout=-0.1 is a rate"),
        ({"attention": "flash"}, "model.attention='flash' must be one of auto, hopper, triton"),
        ({"positions": "alibi"}, "model.positions='alibi' must be one of learned, rotary"),
        ({"rope_base": 500.0}, "model.rope_base=500.0 has no effect.*positions=rotary"),
        ({"rope_scaling": "yarn"}, "model.rope_scaling=yarn has no effect.*positions=rotary"),
        ({"rope_factor": 4.0}, "model.rope_factor=4.0 has no effect.*positions=rotary"),
        ({**ROTARY, "rope_scaling": "llama3"}, "='llama3' must be one of none, linear, ntk, yarn"),
        ({**ROTARY, "rope_factor": 4.0}, "rope_factor=4.0 has no effect with .*rope_scaling=none"),
        *(
            ({**ROTARY, "rope_scaling": "ntk", "rope_factor": factor}, f"rope_factor={factor} must")
            for factor in (0.5, 1.0, float("inf"), float("nan"))
        ),
        (
            {**ROTARY, "n_embd": 24, "rope_scaling": "ntk", "rope_factor": 2.0},
            "gives heads of 2, and model.rope_scaling=ntk needs more than one pair",
        ),
        ({**ROTARY, "rope_base": 1.0}, "model.rope_base=1.0 must be a finite number"),
        (
            {**ROTARY, "n_embd": 60},
            "heads of 5, and model.positions=rotary rotates pairs",
        ),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_every_field_is_read(resolve) -> None:
    config = resolve(
        "model.n_layer=4",
        "model.positions=rotary",
        "model.rope_base=5e5",
        "model.rope_scaling=yarn",
        "model.rope_factor=4",
        "model.attention=sdpa",
        "model.dropout=0.1",
        "model.scale_attn_by_inverse_layer_idx=true",
    )
    assert config == ModelConfig(
        n_layer=4,
        positions="rotary",
        rope_base=500_000.0,
        rope_scaling="yarn",
        rope_factor=4.0,
        attention="sdpa",
        dropout=0.1,
        scale_attn_by_inverse_layer_idx=True,
    )
    assert resolve() == ModelConfig()


def test_round_trip() -> None:
    mask = MaskConfig(pattern="butterfly", window_blocks=3)
    config = ModelConfig(n_layer=2, positions="rotary", rope_base=50_000.0, mask=mask)
    yaml = to_yaml(config)
    names = [line.split(":")[0] for line in yaml.splitlines() if not line.startswith(" ")]
    assert names == [f.name for f in fields(config)]
    assert from_yaml(ModelConfig, yaml) == config


@pytest.mark.parametrize(
    "argument",
    [
        "model.positions=alibi",
        "model.attention=flash",
        "model.n_layer=1.5",
        "model.n_layers=4",
        "model.n_head=7",
    ],
)
def test_invalid_overrides_are_refused(argument: str, resolve) -> None:
    with pytest.raises(ConfigError, match=argument.partition("=")[0]):
        resolve(argument)
