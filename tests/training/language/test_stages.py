"""Stages of a run whose context grows: their steps, their batches, and what is refused."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.reader import ConfigError, to_yaml
from data.sampler import ShuffledRange
from training.distributed import Processes
from training.dry_run import startup_notes
from training.language.config import load_config
from training.language.stages import flops_per_token
from training.language.task import LanguageTask

CPU = Processes(rank=0, world_size=1, device=torch.device("cpu"))
TINY = (
    *("model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.positions=rotary"),
    *("optim.batch_tokens=256", "optim.micro_batch_size=2", "optim.warmup_steps=0"),
    *("run.dtype=float32", "run.compile=false"),
)


def config_of(corpus, schedule, *options, context=64):
    return load_config(
        [
            *("configs/quickstart.yaml", f"data.path={corpus}", *TINY),
            *(f"model.context_length={context}", f"model.context_schedule={schedule}", *options),
        ]
    )


def test_stages_share_the_steps_and_have_equal_tokens(corpus):
    config = config_of(corpus, "[[16,0.5],[32,0.25],[64,0.25]]", "optim.max_steps=10")
    stages = config.stages
    # round half to even: 0.75 * 10 = 7.5 ends at step 8
    assert [(s.first_step, s.last_step) for s in stages] == [(0, 5), (5, 8), (8, 10)]
    assert [(s.context_length, s.micro_batch_size) for s in stages] == [(16, 8), (32, 4), (64, 2)]
    assert [line.partition(", per step")[0] for line in config.batch_lines(1)] == [
        "context 16 for steps 1 to 5 (50.0%)",
        "context 32 for steps 6 to 8 (30.0%)",
        "context 64 for steps 9 to 10 (20.0%)",
    ]


def test_flops_are_the_mean_over_all_steps(corpus):
    one, two, both = (
        flops_per_token(config.model, config.stages, causal=True)
        for config in (
            config_of(corpus, schedule, "optim.max_steps=8", context=last)
            for schedule, last in (("[]", 16), ("[]", 64), ("[[16,0.75],[64,0.25]]", 64))
        )
    )
    assert both == pytest.approx(0.75 * one + 0.25 * two)
    assert one < two


def test_without_a_schedule_there_is_one_stage_with_the_same_batches(corpus):
    config = config_of(corpus, "[]", "optim.max_steps=4")
    (stage,) = config.stages
    assert (stage.first_step, stage.last_step, stage.micro_batch_size) == (0, 4, 2)
    assert config.batch_lines(1) == [
        "per step: 2 micro-batches x 1 GPU x 2 sequences x 64 tokens = 256 tokens"
    ]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_sees_each_text_once_over_all_stages(corpus, other_corpus, world_size, mixed):
    mix = [f"data.mix=[{{path: {other_corpus}, weight: 0.1}}]"] if mixed else []
    options = ["optim.max_steps=8", *mix]  # less than an epoch; the second stage starts within it
    config = config_of(corpus, "[[8,0.5],[32,0.5]]", *options, context=32)
    seen, late = Counter(), Counter()
    for rank in range(world_size):
        task = LanguageTask(config, replace(CPU, rank=rank, world_size=world_size))
        for step in range(8):
            tokens, targets = task.batch(step)
            assert tokens.shape[1:] == ((8, 8) if step < 4 else (2, 32))
            assert (tokens[..., 1:] == targets[..., :-1]).all()
            seen.update(rows(tokens, 8))
            late.update(rows(tokens, 32) if step >= 4 else ())
    # the windows of an epoch without a schedule, and of the same steps of it
    plain = LanguageTask(config_of(corpus, "[]", *options, context=32), CPU)
    batches = [plain.batch(step)[0] for step in range(8)]
    assert seen == Counter(row for batch in batches for row in rows(batch, 8))
    assert late == Counter(row for batch in batches[4:] for row in rows(batch, 32))


def test_a_stage_of_several_epochs_ends_each_before_the_next(corpus):
    config = config_of(corpus, "[[8,0.5],[32,0.5]]", "optim.max_steps=320", context=32)
    task = LanguageTask(config, CPU)
    (corpora, _) = task._corpora
    epoch = corpora[0].samples_per_epoch
    assert epoch < task.samples(160) // 2  # more than two epochs in the first stage
    numbers = ShuffledRange(0, task.samples(160), config.run.seed, epoch)(np.arange(2 * epoch))
    assert sorted(numbers[:epoch].tolist()) == list(range(epoch))
    tokens = torch.cat([task.batch(step)[0].view(-1, 8) for step in range(2 * epoch // 32)])
    expected = corpora[0].samples(numbers[: len(tokens)]).tokens
    assert torch.equal(tokens, expected)


def rows(tokens, length):
    return map(tuple, tokens.view(-1, length).tolist())


def test_samples_are_counted_over_stages(corpus):
    task = LanguageTask(config_of(corpus, "[[16,0.5],[64,0.5]]", "optim.max_steps=8"), CPU)
    assert [task.samples(step) for step in (0, 1, 4, 5, 8)] == [0, 16, 64, 68, 80]
    assert [task.stage(step) for step in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 1]
    assert (task.tokens(8), task.n_shapes) == (8 * 256, 2)


def test_context_length_is_the_last_context(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {positions: rotary, context_schedule: [[16, 0.5], [64, 0.5]]}\n"
        "data: {path: none}\n"
        "optim: {max_steps: 4, batch_tokens: 64, micro_batch_size: 1}\n"
        "run: {out_dir: none}\n"
    )
    assert load_config([str(path)]).model.context_length == 64


def test_one_context_throughout_as_a_schedule_needs_no_other_setting():
    whole = ["model.context_schedule=[[1024,1]]", "optim.micro_batch_size=32"]
    model = load_config(["configs/long_4k.yaml", *whole]).model
    assert (model.context_length, model.rope_scaling, model.rope_factor) == (1024, "ntk", 1.0)
    assert model.scaled_rope_base == model.rope_base
    assert model.at_context(1024).rope_scaling == "none"


def test_the_line_of_a_stage_has_the_scaling_of_its_positions():
    config = load_config(["configs/long_4k.yaml", "model.context_schedule=[[1024,0.5],[4096,0.5]]"])
    first, last = config.batch_lines(1)
    assert first.startswith("context 1,024 for steps 1 to ")
    assert last.startswith("context 4,096 (ntk, rope_factor 4) for steps ")
    assert config.scaling_notes() == []


def test_the_scaling_of_another_schedule_is_warned_of(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config(["configs/long_4k.yaml"])))  # as a run writes it
    shorter = [str(path), "model.context_schedule=[[2048,0.5],[4096,0.5]]"]
    (note,) = load_config(shorter).scaling_notes()
    assert note.startswith("warning: model.rope_factor=4, but contexts grow by 2, from 2,048 to ")
    assert note in startup_notes(load_config(shorter))
    assert load_config([*shorter, "model.rope_factor=2"]).scaling_notes() == []
    assert load_config([*shorter, "run.init_from=out/at_1k"]).scaling_notes() == []


def test_an_unscaled_schedule_needs_the_factor_of_the_contexts(tmp_path):
    path = tmp_path / "config.yaml"
    whole = ["model.context_schedule=[[1024,1]]", "optim.micro_batch_size=32"]
    path.write_text(to_yaml(load_config(["configs/long_4k.yaml", *whole])))
    grows = ["model.context_length=4096", "model.context_schedule=[[1024,0.5],[4096,0.5]]"]
    with pytest.raises(ConfigError, match=r"context_schedule begins at 1024: try 4\."):
        load_config([str(path), *grows])
    with pytest.raises(ConfigError, match="If the context grows during the run, set model.context"):
        load_config([str(path), "model.context_schedule=[]"])


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("[[16,0.5,1]]", [], "must be pairs of a context and its share"),
        ("[[16.5,0.5],[64,0.5]]", [], "must start each pair with a number of tokens"),
        ("[[0,0.5],[64,0.5]]", [], "must start each pair with a number of tokens"),
        ("[[64,0.5],[16,0.5]]", [], "must have contexts that grow"),
        ("[[16,0.5],[32,0.5]]", [], r"must end with model.context_length=64. Try .*=32"),
        ("[[48,0.5],[64,0.5]]", [], "must have contexts that divide the last one, 64"),
        ("[[16,0.5],[64,0.4]]", [], "has shares 0.5, 0.4: .* sum must be 1"),
        ("[[16,1.5],[64,-0.5]]", [], "has shares 1.5, -0.5: each must be above 0"),
        ("[[16,0.5],[64,0.5]]", ["model.positions=learned"], "needs model.positions=rotary"),
        ("[[16,0.99],[64,0.01]]", ["optim.max_steps=9"], "leaves no step for a context of 64"),
        (
            "[[16,0.5],[64,0.5]]",
            ["data.consecutive_windows=2"],
            "data.consecutive_windows=2 cannot be combined with model.context_schedule",
        ),
        (
            "[[2,0.5],[64,0.5]]",
            ["parallel.context=2"],
            "a context in model.context_schedule=2 must be a multiple of 4: parallel.context=2",
        ),
    ],
)
def test_refused(corpus, schedule, options, message):
    with pytest.raises(ValueError, match=message):
        config_of(corpus, schedule, *options)


def test_a_batch_schedule_divides_the_stages_of_the_context(corpus):
    batches = "optim.batch_schedule=[[128,0.25],[256,0.75]]"
    config = config_of(corpus, "[[32,0.5],[64,0.5]]", batches, "optim.max_steps=8")
    assert [
        (s.context_length, s.batch_tokens, s.first_step, s.last_step) for s in config.stages
    ] == [
        (32, 128, 0, 2),
        (32, 256, 2, 4),
        (64, 256, 4, 8),
    ]
    assert config.tokens == 2 * 128 + 6 * 256
    assert [config.grad_accum_steps(1, stage.batch_tokens) for stage in config.stages] == [1, 2, 2]
    task = LanguageTask(config, CPU)
    assert [task.tokens(step) for step in (0, 1, 2, 3, 8)] == [0, 128, 256, 512, config.tokens]
    assert [task.samples(step) for step in (2, 4, 5)] == [8, 24, 28]
    assert [tuple(task.batch(step)[0].shape) for step in (0, 2, 4)] == [
        (1, 4, 32),
        (2, 4, 32),
        (2, 2, 64),
    ]


def test_a_batch_schedule_reads_each_text_once_however_it_divides_the_steps(corpus):
    """Steps of growing batches have the samples of steps of one size, in the same order."""
    options = "optim.max_steps=4", "data.path=" + str(corpus)
    growing = config_of(corpus, "[]", "optim.batch_schedule=[[128,0.5],[256,0.5]]", *options)
    constant = config_of(corpus, "[]", "optim.batch_tokens=128", "optim.max_steps=6")
    rows = []
    for config in (growing, constant):
        task = LanguageTask(config, CPU)
        steps = range(config.optim.max_steps)
        rows.append(torch.cat([task.batch(step)[0].flatten(0, 1) for step in steps]))
    assert torch.equal(*rows) and len(rows[0]) == 6 * 2


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            "[[128]]",
            r"batch_schedule=\[\[128\]\] must be pairs of a number of tokens and its share",
        ),
        ("[[128.5,0.5],[256,0.5]]", "must be pairs of a number of tokens"),
        ("[[128,0.5],[512,0.5]]", "must end with optim.batch_tokens=256"),
        ("[[128,0.5],[256,0.6]]", "must have shares above 0 whose sum is 1"),
        (
            "[[128,0.01],[256,0.99]]",
            r"leaves no step for a batch of 128: 0.01 of optim.max_steps=8",
        ),
        (
            "[[100,0.5],[256,0.5]]",
            "a batch of 100 tokens in optim.batch_schedule must be a multiple of 128",
        ),
    ],
)
def test_invalid_batch_schedules_are_refused(corpus, schedule, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        config_of(corpus, "[]", f"optim.batch_schedule={schedule}", "optim.max_steps=8")
