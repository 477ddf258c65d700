"""--dry-run prints the requirements of a run and starts nothing."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.reader import from_yaml
from data.text.batches import TrainBatches
from data.text.config import DataConfig
from data.text.shards import Manifest, TokenStream
from experiments.reliability.dots import make_config
from experiments.scale.cases import PARTS, case_of
from model.classifier import Classifier
from model.config import GPT2_SIZES, ModelConfig
from training.config import ParallelConfig, RunConfig
from training.dry_run import (
    GIB,
    duration,
    estimate,
    fitting_micro_batch,
    handle_dry_run,
    largest_micro_batch,
    startup_notes,
)
from training.language.config import OptimConfig, TrainConfig, load_config
from training.tasks import read_run

SMALL, MODERN = "configs/paper/gpt2_small_1k.yaml", "configs/long_4k.yaml"


def printed(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        handle_dry_run(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_numbers_of_gpt2_small(capsys, monkeypatch) -> None:
    out = printed(capsys, SMALL, "--dry-run", "data.path=nowhere", "model.dropout=0")
    assert "124,439,808 parameters, 786,432 of them learned positions" in out
    assert "16 micro-batches x 1 GPU x 32 sequences x 1,024 tokens = 524,288 tokens" in out
    # 6 N + 6 L C T, N without positions
    assert f"{6 * (124_439_808 - 786_432) + 6 * 12 * 768 * 1024:.3g} FLOPs a token" in out
    assert "about 10.0 GiB a GPU" in out and "on 1 x H100" in out
    assert "data.path=nowhere is not there yet" in out


def test_an_untied_head_is_counted(capsys) -> None:
    out = printed(capsys, SMALL, "--dry-run", "model.tie_embeddings=false")
    assert f"{124_439_808 + 50_257 * 768:,} parameters" in out
    models = ModelConfig(), ModelConfig(tie_embeddings=False)
    tied, untied = (estimate(config_of(model), 32, 1) for model in models)
    # weights and two moments in float32, and a cast to bfloat16
    assert untied.state - tied.state == pytest.approx(14 * 50_304 * 768)
    assert untied.gradients - tied.gradients == 4 * 50_304 * 768


def test_print_config_prints_the_whole_configuration(capsys) -> None:
    config = from_yaml(TrainConfig, printed(capsys, SMALL, "--print-config", "optim.lr=0.5"))
    assert (config.optim.lr, config.model.n_layer) == (0.5, 12)


@pytest.mark.parametrize(
    ("hours", "text"),
    [(0.001, "1 min"), (1.5, "90 min"), (4.75, "4.75 hours"), (672, "28 days")],
)
def test_durations(hours, text) -> None:
    assert duration(hours) == text


def test_no_time_estimate_for_narrow_models(capsys) -> None:
    assert "no estimate of the time" in printed(capsys, QUICK, "--dry-run")


def test_gpus_share_the_batch(capsys) -> None:
    out = printed(capsys, SMALL, "--dry-run=8")
    assert "2 micro-batches x 8 GPUs x" in out
    with pytest.raises(ValueError, match="3 GPUs"):
        handle_dry_run([SMALL, "--dry-run=3"])
    for wrong in ("0", "many", "-1"):
        with pytest.raises(ValueError, match=f"--dry-run={wrong} must be a number of GPUs"):
            handle_dry_run([SMALL, f"--dry-run={wrong}"])


def test_gpus_share_sequences_and_weights(capsys) -> None:
    shared = ("configs/paper/gpt2_small_16k.yaml", "parallel.context=4", "parallel.mode=fsdp")
    out = printed(capsys, *shared, "--dry-run=8")
    assert "8 micro-batches x 2 groups of 4 GPUs x 2 sequences x 16,384 tokens" in out
    assert "to exchange keys" not in out  # keys are gathered if attention has dropout
    assert "0.1 to exchange keys" in printed(
        capsys, *shared, "model.attention_dropout=0", "--dry-run=8"
    )
    with pytest.raises(ValueError, match=r"parallel.context=4 must divide the number of GPUs, 6"):
        handle_dry_run([*shared, "--dry-run=6"])


def test_a_classifier(capsys) -> None:
    changes = ("model.n_embd=512", "model.n_head=8", "model.n_inner=1024")
    out = printed(capsys, "configs/lra/image.yaml", "--dry-run", *changes)
    model = read_run(["configs/lra/image.yaml", *changes]).model
    blocks = [p for block in Classifier(model).blocks for p in block.parameters() if p.ndim == 2]
    T, C = model.context_length, model.n_embd
    flops = 6 * T * sum(p.numel() for p in blocks) + 12 * model.n_layer * C * T * T
    assert f"{flops:.3g} FLOPs an example" in out and " on 1 x H100, " in out
    assert f"{sum(p.numel() for p in Classifier(model).parameters()):,} parameters" in out
    assert "examples of 1,024 tokens on 1 GPU" in out


QUICK = "configs/quickstart.yaml"


def test_epochs_are_reported_with_a_warning_if_too_many(capsys, corpus) -> None:
    n_tokens = Manifest.load(corpus).splits["train"].tokens
    options = (QUICK, "--dry-run", f"data.path={corpus}")
    batch = (
        *("optim.batch_tokens=64", "optim.micro_batch_size=1", "model.context_schedule=[[64,1]]"),
        "optim.warmup_steps=0",
    )
    out = printed(capsys, *options, *batch, f"optim.max_steps={5 * n_tokens // 64}")
    assert f"epochs of the {n_tokens:,} tokens of {corpus}" in out and "warning" not in out
    match = re.search(r"([\d.]+) epochs of", out)
    assert match and 4.5 < float(match[1]) <= 5
    out = printed(capsys, *options, *batch, f"optim.max_steps={11 * n_tokens // 64}")
    match = re.search(r"warning: .* more than 10 times. Set optim.max_steps=(\d+) for 4", out)
    assert match and 3.9 * n_tokens < int(match[1]) * 64 <= 4 * n_tokens
    mixed = f"data.mix=[{{path: {corpus.parent / 'none'}, weight: 1.0}}]"
    half = printed(capsys, *options, *batch, f"optim.max_steps={11 * n_tokens // 64}", mixed)
    assert "warning" not in half and f"{corpus.parent / 'none'} is not there yet" in half


def test_steps_that_are_large_for_a_text_are_warned_of(capsys, corpus) -> None:
    out = printed(capsys, SMALL, "--dry-run", f"data.path={corpus}")
    assert "set a smaller optim.batch_tokens (32768 is one micro-batch)" in out


def test_epochs_of_a_classifier(capsys, tmp_path) -> None:
    out = printed(capsys, str(make_config(tmp_path)), "--dry-run")
    assert f"{19 * 16 / 256:.2f} epochs of the 256 examples of {tmp_path / 'dots'}" in out


def test_other_arguments_start_no_dry_run() -> None:
    handle_dry_run([SMALL, "run.out_dir=--dry-running"])


def test_the_command_needs_neither_pytorch_nor_data(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    program = (
        "import runpy, sys; sys.modules['torch'] = None; "
        f"sys.argv = ['train.py', '{root / SMALL}', '--dry-run']; "
        f"sys.path.insert(0, '{root}'); runpy.run_path('{root / 'train.py'}', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "124,439,808 parameters" in done.stdout
    assert not list(tmp_path.iterdir())


RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
TOKENS = 32_768


def config_of(model: ModelConfig, **run: str) -> TrainConfig:
    micro_batch_size = TOKENS // model.context_length
    optim = OptimConfig(max_steps=1, batch_tokens=TOKENS, micro_batch_size=micro_batch_size)
    return TrainConfig(
        model=model, data=DataConfig(path="x"), optim=optim, run=RunConfig(out_dir="y", **run)
    )


def measured() -> list[tuple[str, int, float]]:
    rows = json.loads((RESULTS / "train_speed_butterfly.json").read_text())["rows"]
    rows += json.loads((RESULTS / "train_speed.json").read_text())["rows"]
    return [
        (row["size"], row["context_length"], row["peak_gib"])
        for row in rows
        # at 16K, GPT-2 small ran in memory that other implementations had not fully freed
        if row["name"] == "ours" and (row["size"], row["context_length"]) != ("small", 16384)
    ]


def test_estimates_within_a_tenth_of_the_measured_memory() -> None:
    rows = measured()
    assert len(rows) >= 5
    for size, context_length, peak in rows:
        model = ModelConfig(context_length=context_length, **GPT2_SIZES[size])
        config = config_of(model)
        estimated_gib = estimate(config, config.optim.micro_batch_size, 1).total / GIB
        assert estimated_gib == pytest.approx(peak, rel=0.1), (size, context_length)


def test_estimates_within_a_tenth_of_the_measured_memory_on_several_gpus() -> None:
    names = ("scale", "scale_muon", "scale_context", "scale_long", "scale_longest")
    rows = [
        row for name in names for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    ]
    assert {row["part"] for row in rows} == {*PARTS}
    for row in rows:
        case = case_of(row)
        assert case.estimated_gib == pytest.approx(row["peak_gib"], rel=0.1), case.name


def test_options_that_take_more_activation_memory() -> None:
    def activations(**changes: Any) -> float:
        return estimate(config_of(ModelConfig(**changes)), 32, 1).activations

    wider: dict[str, Any] = {"n_inner": 4000, "head_size": 96, "mlp": "swiglu"}
    wider |= {"positions": "rotary", "dropout": 0.1}
    wider |= {"residual_in_fp32": True, "recompute_gelu": False}
    for name, value in wider.items():
        assert activations(**{name: value}) > activations(), name
    wide = estimate(config_of(ModelConfig(), dtype="float32"), 32, 1)
    assert wide.activations == pytest.approx(2 * activations(), rel=0.01)


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    config = config_of(ModelConfig())
    most = largest_micro_batch(config, 24 * GIB, 1)
    assert estimate(config, most, 1).total <= 24 * GIB < estimate(config, most + 1, 1).total
    assert largest_micro_batch(config, 1 * GIB, 1) == 0


def test_activation_checkpointing_takes_less_memory() -> None:
    for model in (ModelConfig(), ModelConfig(positions="rotary", mlp="swiglu")):
        sizes = [
            estimate(config_of(model, activation_checkpointing=mode), 32, 1).activations
            for mode in ("none", "selective", "full")
        ]
        assert sizes[0] > 2 * sizes[1] > 2 * sizes[2] > 0


def test_fsdp_takes_less_memory_and_gradient_accumulation_more() -> None:
    model = ModelConfig(context_length=1024, **GPT2_SIZES["xl"])
    alone, shared = (
        config_of(model),
        replace(config_of(model), parallel=ParallelConfig(mode="fsdp")),
    )
    states = [estimate(shared, 1, n).state for n in (1, 2, 8)]
    assert states[0] == estimate(alone, 1, 1).state
    assert states[0] > 1.4 * states[1] > 1.4 * states[2]
    kept = replace(shared, parallel=ParallelConfig(mode="fsdp", reshard=False))
    assert estimate(kept, 1, 8).state > states[2]
    at_once = estimate(alone, 32, 1)
    several = estimate(alone, 16, 1)
    assert several.accumulates and not at_once.accumulates
    assert several.total == sum(several[:5]) > at_once.state + at_once.activations / 2


def test_context_parallel_divides_the_activations() -> None:
    model = ModelConfig(context_length=TOKENS, positions="rotary")
    by_two, shared = (replace(config_of(model), parallel=ParallelConfig(context=n)) for n in (2, 4))
    part = estimate(shared, 1, 4).activations
    assert part == pytest.approx(estimate(by_two, 1, 2).activations / 2)
    # each layer adds all keys and values, less half of its own, and separate copies of q and k
    windows = replace(shared, model=replace(model, window_size=512))
    more = estimate(windows, 1, 4).activations - part
    assert more == model.n_layer * 2 * model.n_embd * (2 * (TOKENS - TOKENS // 8) + 2 * TOKENS // 4)
    # sequences too short for the ring are also gathered
    short = replace(shared, model=replace(model, context_length=4096))
    by_gather = replace(short, model=replace(short.model, window_size=512))
    assert estimate(short, 1, 4) == estimate(by_gather, 1, 4)


def test_a_ring_needs_permanent_receive_buffers() -> None:
    """At most two exchanges at a time, of keys and of sums; sums of more than two are float32."""
    for tokens, n, expected in ((2**16, 2, 1 + 1), (2**16, 4, 2 * (1 + 2)), (2**20, 2, 0)):
        shared = replace(
            config_of(ModelConfig()),
            model=ModelConfig(context_length=tokens, positions="rotary"),
            optim=OptimConfig(max_steps=1, batch_tokens=tokens, micro_batch_size=1),
            parallel=ParallelConfig(context=n),
        )
        needed = estimate(shared, 1, n)
        assert needed.receive_buffers == expected * tokens // n * 2 * shared.model.n_embd * 2
        forward = needed.activations + needed.head
        assert needed.total == pytest.approx(needed.state + needed.receive_buffers + forward)


def test_a_mask_that_hides_nothing_is_warned_of(capsys) -> None:
    butterfly = "model.mask.pattern=butterfly"
    out = printed(capsys, QUICK, "--dry-run", butterfly)  # 4 blocks of 128: each sees all before it
    assert "warning: model.mask.pattern=butterfly hides nothing in 512 tokens" in out
    out = printed(capsys, QUICK, "--dry-run", butterfly, "model.mask.block_size=16")
    share = load_config([QUICK, butterfly, "model.mask.block_size=16"]).model.mask.density(
        512, causal=True
    )
    assert f"model.mask.pattern=butterfly computes {share:.1%} of dense attention" in out


def test_startup_notes(corpus) -> None:
    exported = "export to transformers: GPTNeoXForCausalLM"
    assert startup_notes(load_config([QUICK, "data.path=nowhere"])) == [exported]
    options = f"data.path={corpus}", "model.context_schedule=[[512,1]]", "run.compile=true"
    many, few = (
        startup_notes(load_config([QUICK, *options, *steps]))
        for steps in (["optim.max_steps=500_000"], ["optim.max_steps=1", "optim.warmup_steps=0"])
    )
    assert [note.partition(":")[0] for note in many[1:]] == ["warning", "compiling"]
    assert [note.partition(":")[0] for note in few[1:]] == ["compiling"]
    assert many[0] == few[0] == exported


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([SMALL], "GPT2LMHeadModel"),
        ([QUICK], "GPTNeoXForCausalLM"),
        ([MODERN], "Qwen3ForCausalLM"),
        ([MODERN, "model.qk_norm=false"], "none. model.qk_norm=False cannot be"),
        ([SMALL, "model.mask.pattern=butterfly"], "none. model.mask.pattern=butterfly cannot be"),
    ],
)
def test_the_class_of_an_export_is_printed(capsys, options: list[str], line: str) -> None:
    assert f"\nexport to transformers: {line}" in printed(capsys, *options, "--dry-run")


CONFIGS = [
    path for path in sorted(Path("configs").rglob("*.yaml")) if "# Needs" in path.read_text()
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_head_of_a_configuration_is_what_dry_run_estimates(path, capsys) -> None:
    head = re.search(
        r"# Needs about ([\d.]+ GiB) per GPU(?:, and (.*) on one H100)?:", path.read_text()
    )
    assert head is not None
    out = printed(capsys, str(path), "--dry-run")
    assert f"about {head[1]} a GPU" in out
    assert head[2] is None or f"about {head[2]} on 1 x H100" in out


def test_epochs_count_only_what_aligned_samples_keep(capsys, corpus) -> None:
    aligned = "model.context_schedule=[[512,1]]", "data.align=document"
    out = printed(capsys, QUICK, "--dry-run", f"data.path={corpus}", *aligned)
    batches = TrainBatches(TokenStream(corpus, "train"), 512, seed=0, align="document")
    kept = 512 * batches.samples_per_epoch + 1
    assert f" epochs of the {kept:,} tokens of {corpus} that data.align=document keeps" in out
    (warning,) = [line for line in out.splitlines() if line.startswith("warning")]
    assert "Try data.align=none, which cuts nothing. A step takes " in warning


def test_epochs_of_aligned_samples_are_summed_over_contexts(capsys, corpus) -> None:
    grows = ("model.positions=rotary", "model.context_schedule=[[128,0.75],[512,0.25]]")
    options = (f"data.path={corpus}", "model.context_length=512", *grows, "data.align=document")
    steps = ("optim.max_steps=80", "optim.warmup_steps=0")
    out = printed(capsys, QUICK, "--dry-run", *options, *steps)
    config, stream = load_config([QUICK, *options]), TokenStream(corpus, "train")
    short, long = (
        T * TrainBatches(stream, T, seed=0, align="document").samples_per_epoch + 1
        for T in (128, 512)
    )
    tokens = config.optim.batch_tokens
    epochs = 60 * tokens / short + 20 * tokens / long
    assert (
        f"{epochs:,.{2 if epochs < 100 else 0}f} epochs of {corpus}: data.align=document keeps "
        f"{short:,} tokens at a context of 128, {long:,} tokens at a context of 512"
    ) in out
    assert short != long
    assert f"A step takes {epochs / 80:.0%} of it" in out


def test_stages_of_a_growing_context(capsys, corpus) -> None:
    schedule = "model.context_schedule=[[1024,0.75],[4096,0.25]]"
    rotary = ("model.positions=rotary", "model.context_length=4096", "model.rope_scaling=ntk")
    options = (SMALL, "--dry-run=8", "data.path=nowhere", *rotary, "optim.micro_batch_size=8")
    out = printed(capsys, *options, schedule)
    assert (
        "context 1,024 for steps 1 to 300,000 (75.0%), per step: 2 micro-batches x 8 GPUs x " in out
    )
    assert "x 32 sequences x 1,024 tokens = 524,288 tokens\n" in out
    assert "context 4,096 (ntk, rope_factor 4) for steps 300,001 to 400,000 (25.0%), per " in out
    assert "x 8 sequences x 4,096 tokens = 524,288 tokens\n" in out
    N = 124_439_808 - 786_432
    mean = 6 * N + 6 * 12 * 768 * (0.75 * 1024 + 0.25 * 4096)
    assert f"{mean:.3g} FLOPs a token" in out


def test_a_batch_schedule_limits_and_accumulates_micro_batches() -> None:
    config = config_of(ModelConfig(context_length=1024))
    config = replace(config, optim=replace(config.optim, max_steps=2, micro_batch_size=1))
    tokens = config.optim.batch_tokens
    schedule = [[tokens // 2, 0.5], [tokens, 0.5]]
    halved = replace(config, optim=replace(config.optim, batch_schedule=schedule))
    most = fitting_micro_batch(config, 10_000 * GIB, 1)
    assert fitting_micro_batch(halved, 10_000 * GIB, 1) == most // 2
    assert not estimate(config, most, 1).accumulates
    doubled = replace(config.optim, batch_schedule=[[2 * tokens, 0.5], [tokens, 0.5]])
    assert estimate(replace(config, optim=doubled), most, 1).accumulates
