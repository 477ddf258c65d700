from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from configs.reader import ConfigError, from_record, from_yaml, read_config, to_yaml
from training.config import RUN_CONFIG
from training.language.config import TrainConfig, load_config
from training.tasks import config_of

ROOT = Path(__file__).parents[2]
CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs/paper").glob("*.yaml")])
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
GPT2 = str(ROOT / "configs/paper/gpt2_small_1k.yaml")
assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_file_loads(path, tmp_path):
    config = load_config([str(path)])
    copy = tmp_path / "config.yaml"
    copy.write_text(to_yaml(config))
    assert load_config([str(copy)]) == config
    assert from_yaml(TrainConfig, to_yaml(config)) == config


def test_older_yaml_gets_defaults_and_newer_yaml_is_refused():
    config = load_config([QUICKSTART])
    lines = to_yaml(config).splitlines()
    older = [line for line in lines if "document_mask" not in line]
    assert len(older) == len(lines) - 1
    assert from_yaml(TrainConfig, "\n".join(older)) == config
    with pytest.raises(ConfigError, match=r"run\.of_the_future is not a setting: run has "):
        from_yaml(TrainConfig, to_yaml(config) + "  of_the_future: 1\n")


def test_a_renamed_value_is_read_from_files_and_suggested_on_the_command_line(tmp_path):
    config = load_config([QUICKSTART, "model.attention=eager", "model.mask.pattern=dense"])
    text = to_yaml(config).replace("attention: eager", "attention: unfused")
    assert "unfused" in text
    assert from_yaml(TrainConfig, text) == config
    (tmp_path / "old.yaml").write_text(text)
    assert load_config([str(tmp_path / "old.yaml")]) == config
    record = asdict(config)
    record["model"]["attention"] = "unfused"
    assert from_record(TrainConfig, record, "a checkpoint") == config
    with pytest.raises(ConfigError, match=r"eager: unfused is now called eager$"):
        load_config([QUICKSTART, "model.attention=unfused"])


def test_removed_settings_are_read_from_runs_and_elsewhere_where_they_had_no_effect(tmp_path):
    config, path = load_config([QUICKSTART]), tmp_path / RUN_CONFIG
    without_effect = "  orthogonalization: newton_schulz\n  cautious_decay: false\n  z_loss: 0.0\n"
    with_effect = "  orthogonalization: polar_express\n  cautious_decay: true\n  z_loss: 0.001\n"
    for lines in ("", without_effect):
        path.write_text(to_yaml(config).replace("optim:\n", f"optim:\n{lines}"))
        assert load_config([str(path)]) == config_of(tmp_path, TrainConfig) == config
    text = to_yaml(config).replace("optim:\n", f"optim:\n{with_effect}")
    path.write_text(text.replace("model:\n", "model:\n  zero_init: true\n"))
    assert config_of(tmp_path, TrainConfig) == config
    record = asdict(config)
    record["optim"] |= {"cautious_decay": True}
    assert from_record(TrainConfig, record, "a checkpoint") == config
    for read in (
        lambda: load_config([str(path)]),
        lambda: from_yaml(TrainConfig, path.read_text()),
    ):
        with pytest.raises(ConfigError, match=r"optim\.z_loss is not a setting: it was removed"):
            read()
    with pytest.raises(ConfigError, match=r"model\.zero_init .*: it was removed\. Leave it out$"):
        load_config([QUICKSTART, "model.zero_init=true"])


def test_removed_settings_of_the_model_are_refused_where_they_had_an_effect(tmp_path):
    """The weights of such a run do not fit any current model."""
    config, path = load_config([QUICKSTART]), tmp_path / RUN_CONFIG
    path.write_text(to_yaml(config).replace("model:\n", "model:\n  smear: false\n"))
    assert config_of(tmp_path, TrainConfig) == config
    for earlier, line, message in (
        ("model:\n", "model:\n  smear: true\n", "model.smear is not a setting: it was removed. "),
        ("mlp: gelu", "mlp: relu_squared", "model.mlp must be gelu or swiglu: relu_squared was "),
    ):
        path.write_text(to_yaml(config).replace(earlier, line))
        with pytest.raises(ConfigError, match=message + ".*needs an earlier version of Papilio"):
            config_of(tmp_path, TrainConfig)


@pytest.mark.parametrize(("factor", "kind"), [(1, "none"), (1.0, "none"), (2.5, "linear")])
def test_an_earlier_rope_scaling_is_read_from_files(tmp_path, factor, kind):
    rotary = [QUICKSTART, "model.positions=rotary"]
    config = load_config(
        [*rotary, *([f"model.rope_scaling={kind}", f"model.rope_factor={factor}"])]
    )
    lines = [x for x in to_yaml(config).splitlines() if "rope_factor" not in x]
    text = "\n".join(lines).replace(f"rope_scaling: {kind}", f"rope_scaling: {factor}")
    assert from_yaml(TrainConfig, text) == config
    record = asdict(config)
    del record["model"]["rope_factor"]
    record["model"]["rope_scaling"] = factor
    assert from_record(TrainConfig, record, "a checkpoint") == config
    with pytest.raises(ConfigError, match=rf"{factor} is now called {kind} with model.rope_factor"):
        load_config([*rotary, f"model.rope_scaling={factor}"])


@pytest.mark.parametrize(
    "path", [p for p in CONFIGS if p.stem.startswith("gpt2")], ids=lambda p: p.stem
)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_gpt2_batches_divide_over_gpus(path, world_size):
    config = load_config([str(path)])
    assert config.optim.batch_tokens == 524_288
    assert config.grad_accum_steps(world_size) * world_size == config.grad_accum_steps(1)


def test_command_line_wins_over_the_file():
    config = load_config([QUICKSTART, "optim.lr=3e-4", "model.n_layer=2", "run.wandb=offline"])
    assert (config.optim.lr, config.model.n_layer, config.run.wandb) == (3e-4, 2, "offline")
    assert config.model.n_head == load_config([QUICKSTART]).model.n_head


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name a configuration first"),
        (["optim.lr=1"], "name a configuration first"),
        (["configs/none.yaml"], "configs/none.yaml is not a file"),
        ([QUICKSTART, "model.n_layers=4"], "model.n_layers is not .*mean model.n_layer?"),
        ([QUICKSTART, "--optim.lr=1"], "must be key=value"),
        ([QUICKSTART, "--dryrun"], r"'--dryrun' must be key=value, .* or --help, --dry-run\["),
        ([QUICKSTART, "optim.lr"], "'optim.lr' must be key=value"),
        ([QUICKSTART, "optim.betas=[0.9,{a: [0.1]"], "'optim.betas=.*' must have YAML after"),
        ([QUICKSTART, "=1"], "'=1' must be key=value"),
        ([QUICKSTART, "optim.lr=abc"], "^optim.lr=abc must be a number$"),
        ([QUICKSTART, "model.n_layer=four"], "^model.n_layer=four must be a whole number$"),
        ([QUICKSTART, "model.n_layer=1.5"], "^model.n_layer=1.5 must be a whole number$"),
        ([QUICKSTART, "optim.batch_tokens=1e6"], "number, without exponent or point: 1000000$"),
        ([QUICKSTART, "optim.betas=1.0"], "^optim.betas=1.0 must be a list of 2, each a number$"),
        ([QUICKSTART, "run.compile=maybe"], "^run.compile=maybe must be true or false$"),
        ([QUICKSTART, "run.dtype=float16"], "^run.dtype=float16 must be bfloat16 or float32$"),
        (
            [QUICKSTART, "model.context_schedule=[64]"],
            r"must be a list of lists of numbers, .*\. It is: Contexts .*\[\[1024, 0.75\], ",
        ),
        ([QUICKSTART, "optim.betas=[0.9]"], r"^optim.betas=\[0.9\] must be a list of 2, each a n"),
        ([QUICKSTART, "optim.betas=[0.9,b]"], r'^optim.betas=\[0.9,"b"\] must be a list of 2'),
        ([QUICKSTART, "run.seed=null"], "^run.seed=null must be a whole number$"),
        (
            [QUICKSTART, "data=3"],
            "^data=3 must be a section, with values of path, weight, mix, document_mask",
        ),
        (
            [QUICKSTART, "run.seed=${optim.seed}"],
            r"^run.seed=.* contains \$\{, which is not",
        ),
        ([QUICKSTART, "run.out_dir=${oc.env:HOME}"], r"^run.out_dir=.* contains \$\{, which"),
        ([QUICKSTART, "run.out_dir=???"], r"^run.out_dir=\?\?\? is \?\?\?, which means a missing"),
        (
            [QUICKSTART, "run.out_dir=2024"],
            """must be text: put .* quotes, run.out_dir='"2024"'$""",
        ),
        ([QUICKSTART, "run.out_dir=true"], "^run.out_dir=true must be text: put it in quotes"),
        ([QUICKSTART, 'run.out_dir="a\\0b"'], "^run.out_dir=.* contains a control character"),
        ([QUICKSTART, "optim.max_steps=1:30"], "^optim.max_steps=1:30 must be a whole number$"),
        ([QUICKSTART, "optim.max_steps=010"], "^optim.max_steps=010 must be a whole number$"),
        ([QUICKSTART, "optim.max_steps='8'"], "^optim.max_steps=8 must be a whole number$"),
        ([QUICKSTART, "run.compile=1"], "^run.compile=1 must be true or false$"),
        ([QUICKSTART, "run.compile=no"], "^run.compile=no must be true or false$"),
        ([QUICKSTART, "optim=[]"], r"^optim=\[\] must be a section, with values of max_steps"),
        ([QUICKSTART, "optim=null"], "^optim=null must be a section, with values of max_steps"),
        ([QUICKSTART, "data.mix=[3]"], r"^data.mix=\[3\] must be a list of settings"),
        ([QUICKSTART, "data.mix[0].path=x"], r"^data.'mix\[0\]'.path is not a setting: "),
        ([QUICKSTART, "model.n_head=3"], "model.n_embd=128 must be divisible by model.n_head=3"),
        (
            [QUICKSTART, "run.activation_memory=0"],
            r"run.activation_memory=0.0 must be in \(0, 1\]",
        ),
        (
            [QUICKSTART, "run.activation_memory=0.9", "run.compile=false"],
            r"run.activation_memory=0.9 has no effect with run.compile=false. Remove it",
        ),
        (
            [GPT2, "run.activation_memory=0.9", "run.activation_checkpointing=full"],
            "run.activation_memory=0.9 and run.activation_checkpointing=full both control",
        ),
        (
            [QUICKSTART, "parallel.gather_dtype=float32"],
            "parallel.gather_dtype=float32 has no effect with parallel.mode=ddp. Remove it",
        ),
        (
            [QUICKSTART, "parallel.reshard=false"],
            "parallel.reshard=False has no effect with parallel.mode=ddp",
        ),
        (
            ["configs/long_4k.yaml", "model.window_grows=true", "parallel.context=2"],
            "model.window_grows=true does not support parallel.context=2",
        ),
        ([QUICKSTART, "parallel.context=0"], "parallel.context=0 must be at least 1"),
        (
            [GPT2, "model.attention_dropout=0", "model.context_length=1000", "parallel.context=3"],
            "context_length=1000 must be a multiple of 6: .* into 6 chunks. Try 1002",
        ),
        (
            [GPT2, "model.mask.pattern=butterfly", "parallel.context=8"],
            "=1024 must be a multiple of 2048: .* 16 chunks of whole blocks. Try 2048",
        ),
        (
            [GPT2, "model.attention=sdpa", "parallel.context=2"],
            "model.attention=sdpa does not support parallel.context=2: only Papilio",
        ),
        ([QUICKSTART, "run.seed=-1"], r"run.seed=-1 must be in \[0, 2\^63\)"),
        ([QUICKSTART, "optim.lr=0"], "optim.lr=0.0 must be a finite number above 0"),
        ([QUICKSTART, "optim.lr=nan"], "optim.lr=nan must be a finite number above 0"),
        ([QUICKSTART, "optim.betas=[0.9,1.0]"], "optim.betas=.* must be two numbers in"),
        ([QUICKSTART, "optim.eps=0"], "optim.eps=0.0 must be a finite number above 0"),
        ([QUICKSTART, "optim.weight_decay=inf"], "optim.weight_decay=inf must be a finite number"),
        ([QUICKSTART, "run.log_every=0"], "run.log_every=0 must be at least 1"),
        (
            [QUICKSTART, "optim.batch_tokens=5000"],
            r"batch_tokens=5000 must be a multiple of 2048 \(.*=4 x .*=512 x 1 GPU.*"
            "Try 4096 or 6144",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_the_field(argv, message):
    with pytest.raises(ConfigError, match=message):
        load_config(argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lr: [", "must be a YAML file: .* line 1"),
        ("- model\n- data", "must map model, data, optim and run .* contains a list"),
        ("hello", "must map model, data, optim and run .* contains a single value: see"),
        ("", "^data.path has no value"),
        ("\xff\xfe", "must be a YAML file"),
    ],
)
def test_files_that_are_not_configurations_are_refused(tmp_path, text, message):
    path = tmp_path / "a=b.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        load_config([str(path)])


def test_a_file_of_another_task_is_refused():
    image = str(ROOT / "configs/lra/image.yaml")
    with pytest.raises(ConfigError, match=r"image.yaml, line \d+: task must be language$"):
        load_config([image])
    with pytest.raises(ConfigError, match=r", line \d+: model.n_classes is not a setting: "):
        load_config([image, "task=language"])


def test_defaults_that_depend_on_the_data():
    @dataclass(frozen=True)
    class Inner:
        size: int = 1
        path: str = "nowhere"

    @dataclass(frozen=True)
    class Schema:
        inner: Inner = field(default_factory=Inner)
        name: str = "here"

        @staticmethod
        def from_data(given):
            return {"inner.size": 3} if given.get("inner.path") == "here" else {}

    def read(text):
        return from_yaml(Schema, text).inner

    assert read("{}") == Inner()
    assert read("inner: {path: here}") == Inner(size=3, path="here")
    assert read("inner: {path: here, size: 2}") == Inner(size=2, path="here")


def test_missing_value(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("optim: {max_steps: 1, batch_tokens: 1024, micro_batch_size: 1}\n"
                    "data: {path: x}\n")  # fmt: skip
    with pytest.raises(
        ConfigError, match="out_dir has no value: set it in .* line. It is: Output folder"
    ):
        load_config([str(path)])


def test_batch_that_does_not_divide_over_the_gpus():
    config = load_config([QUICKSTART])
    with pytest.raises(ValueError, match=r"of 6144 \(.* x 3 GPUs\)\. Try 6144"):
        config.grad_accum_steps(world_size=3)


def test_all_errors_in_a_file_are_reported_with_its_name(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {n_layers: 4, mask: {blocks: 64}}\noptim: {learning_rate: 1}\n")
    with pytest.raises(ConfigError) as error:
        load_config([str(path), "run.output_dir=out"])
    assert str(error.value).splitlines() == [
        f"{path}, line 1: model.n_layers is not a setting: did you mean model.n_layer?",
        f"{path}, line 1: model.mask.blocks is not a setting: did you mean model.mask.block_size?",
        f"{path}, line 2: optim.learning_rate is not a setting: did you mean optim.lr?",
        "run.output_dir is not a setting: did you mean run.out_dir?",
    ]
    path.write_text("model: {n_layer: 1.5}\noptim: {lr: fast}\n")
    with pytest.raises(ConfigError) as error:
        load_config([str(path)])
    assert str(error.value).splitlines() == [
        f"{path}, line 1: model.n_layer must be a whole number",
        f"{path}, line 2: optim.lr must be a number",
    ]


def test_items_of_a_list(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("{}")

    @dataclass(frozen=True)
    class Item:
        steps: int = 1
        path: str | None = None

    @dataclass(frozen=True)
    class Schema:
        items: list[Item] = field(default_factory=list)

    def read(items):
        return read_config(Schema, [str(path), f"items={items}"])

    assert read("[{steps: 2}, {path: a}]").items == [Item(2), Item(path="a")]
    with pytest.raises(ConfigError, match=r"^items\[\].step is not .* items\[\].steps\?$"):
        read("[{steps: 2}, {step: 2}]")
    with pytest.raises(ConfigError, match=r"^items\[\].steps=x must be a whole number$"):
        read("[{steps: 2}, {steps: x}]")
