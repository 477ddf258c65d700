"""Which runs there are, with which arguments, and how steps follow from the time of others."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest

from configs.reader import to_yaml
from data.text.shards import TokenStream
from evaluation.runs import note_sharing
from evaluation.sums import write_scored
from experiments.table4.jobs import (
    _base,
    check_texts,
    final_arguments,
    make_jobs,
    training_cost,
)
from experiments.table4.models import BUDGETS, MODELS
from experiments.table4.parts import WITH, WITHOUT
from tests.evaluation.known_losses import LONG, added_up
from training.checkpoint.contents import Progress, write_checkpoint
from training.checkpoint.folders import checkpoint_folder
from training.language.config import load_config
from training.metrics import METRICS

WHOLE = {"same_time_as": None, "starts_from": None, "share": 1.0}


def jobs_of(names, tmp_path, budget="minutes", seeds=1, **options):
    return make_jobs(
        names, BUDGETS[budget], tmp_path, data=tmp_path, vocab_size=50_257, seeds=seeds, **options
    )


def finish(folder, *, step, gpu_hours, max_steps=None):
    """A run as if it had been trained."""
    folder.mkdir(parents=True)
    records = [
        {"step": 0, "tokens": 0, "val_loss": 9.0, "gpu_hours": 0.0},
        {"step": step, "tokens": 1, "val_loss": 1.0, "gpu_hours": gpu_hours},
    ]
    (folder / METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))
    write_checkpoint(folder, Progress(step=step, gpu_hours=gpu_hours), {}, {}, {})
    (folder / "config.yaml").write_text(
        "model: {}\ndata: {path: x}\n"
        f"optim: {{max_steps: {max_steps or step}, batch_tokens: 1024, micro_batch_size: 1}}\n"
        "run: {out_dir: x}\n"
    )


@pytest.mark.parametrize("budget", ["minutes", "hours", "billion", "paper"])
def test_all_models_see_the_same_tokens_in_the_same_steps(budget, tmp_path):
    plain = [name for name, model in MODELS.items() if model == replace(model, **WHOLE)]
    plain = [name for name in plain if name not in {**WITH, **WITHOUT}]  # similar to the recipe
    if budget == "paper":  # has learned positions, which cannot grow
        plain = [name for name in plain if not name.startswith("1k_to_")]
    configs = [job.config for job in jobs_of(plain, tmp_path, budget)]
    assert len(configs) == len(plain)
    wanted = BUDGETS[budget]
    (lr_of_4k,) = (job.config.optim.lr for job in jobs_of(["4k"], tmp_path, budget))
    for config in configs:
        assert (
            config.optim.max_steps * config.optim.batch_tokens == wanted.steps * wanted.batch_tokens
        )
        assert config.optim.batch_tokens == wanted.batch_tokens
        name = config.run.out_dir.rpartition("/")[2].removesuffix("_seed1")
        own_lr = any(override.startswith("optim.lr=") for override in MODELS[name].overrides)
        if not own_lr and (budget != "paper" or config.model.norm == "layer_norm"):
            assert config.optim.lr == lr_of_4k
        wsd = config.run.out_dir.endswith("_wsd_seed1")
        assert config.optim.schedule == ("wsd" if wsd else "linear")
    assert len({config.model.context_length for config in configs}) == 5


def test_models_have_the_context_of_their_name():
    lengths = {"1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16_384}
    for name, model in MODELS.items():
        config = load_config(_base(name, BUDGETS["minutes_131k"]))
        assert config.model.context_length == lengths[model.context], name


def test_a_growing_batch_takes_more_steps_for_as_many_tokens(tmp_path):
    jobs = jobs_of(["recipe", "recipe_with_growing_batch"], tmp_path, "minutes")
    configs = {job.name: job.config for job in jobs}
    whole, growing = configs["recipe"], configs["recipe_with_growing_batch"]
    assert whole.tokens == 3_600 * 32_768
    assert growing.tokens == pytest.approx(whole.tokens, rel=1e-3)
    assert growing.optim.max_steps == 4_000


GROWING_131K = "recipe_growing_batch_131k", "recipe_growing_batch_131k_same_contexts"


def test_a_growing_batch_trains_more_at_4k_unless_its_contexts_are_the_same(tmp_path):
    names = "recipe", *GROWING_131K
    configs = {job.name: job.config for job in jobs_of(names, tmp_path, "minutes_131k")}
    whole, growing, same = (tokens_at_contexts(configs[name]) for name in names)
    assert same == pytest.approx(whole, rel=2e-3)
    assert growing[4096] > 1.4 * whole[4096]
    assert sum(growing.values()) == pytest.approx(sum(whole.values()), rel=1e-3)


@pytest.mark.parametrize("name", GROWING_131K)
def test_a_batch_of_131k_is_refused_in_a_budget_of_smaller_ones(name, tmp_path):
    with pytest.raises(ValueError, match="must end with optim.batch_tokens=32768"):
        jobs_of([name], tmp_path, "minutes")


def tokens_at_contexts(config):
    """Training tokens of a configuration by context."""
    tokens = Counter()
    for stage in config.stages:
        tokens[stage.context_length] += stage.tokens
    return tokens


def test_a_growing_context_is_not_compared_with_learned_positions(tmp_path):
    with pytest.raises(ValueError, match="needs model.positions=rotary"):
        jobs_of(["1k", "1k_to_4k"], tmp_path, "paper")


def test_paper_is_the_papers_recipe(tmp_path):
    for job in jobs_of(["1k", "4k"], tmp_path, "paper", gpus_per_run=8):
        config = job.config
        assert (config.optim.max_steps, config.optim.batch_tokens) == (400_000, 524_288)
        assert config.optim.warmup_steps == 4_000
        assert config.model.positions == "learned" and config.model.dropout == 0.1
        config.grad_accum_steps(world_size=8)


def test_batch_is_shared_by_the_gpus_of_a_run(tmp_path):
    for n_gpu in (1, 2):
        for job in jobs_of(["1k", "16k"], tmp_path, gpus_per_run=n_gpu):
            job.config.grad_accum_steps(world_size=n_gpu)
    with pytest.raises(ValueError, match=r"optim.batch_tokens=32768 must be a multiple"):
        jobs_of(["16k"], tmp_path, gpus_per_run=4)


def test_1k_of_4k_sees_the_tokens_of_4k_in_their_order(tmp_path):
    configs = {job.name: job.config for job in jobs_of(["1k_of_4k", "4k"], tmp_path)}
    short, long = configs["1k_of_4k"], configs["4k"]
    reach = short.model.context_length * short.data.consecutive_windows
    assert reach == long.model.context_length
    assert short.optim == replace(long.optim, micro_batch_size=short.optim.micro_batch_size)
    assert short.run.seed == long.run.seed


def test_order_and_what_comes_along(tmp_path):
    jobs = jobs_of(["4k_from_1k", "16k_butterfly_same_time"], tmp_path, seeds=2)
    names = [job.folder.name for job in jobs]
    assert [name[-1] for name in names] == [*6 * "1", *6 * "2"]
    assert names[0] == "16k_seed1"
    by_name = {job.folder.name: job for job in jobs}
    needs = {folder.name for folder in by_name["4k_from_1k_seed2"].needs}
    assert needs == {"1k_seed2", "1k_seed1", "4k_seed1"}
    jobs = {job.folder.name: job for job in jobs_of(["1k_then_4k"], tmp_path, seeds=2)}
    assert jobs["1k_then_4k_seed2"].needs == (tmp_path / "1k_seed2",)  # its own seed alone


def test_extension_has_the_time_that_is_left(tmp_path):
    jobs = jobs_of(["4k_from_1k"], tmp_path, seeds=2)
    job, second = (j for j in jobs if j.name == "4k_from_1k")
    finish(tmp_path / "4k_seed1", step=1000, gpu_hours=1.0)
    finish(tmp_path / "1k_seed1", step=1000, gpu_hours=0.75)
    config = load_config(final_arguments(job, tmp_path / "sums"))
    assert config.optim.max_steps == 250  # at the speed of the 4k run
    assert config.run.init_from == str(tmp_path / "1k_seed1")
    assert config.model.rope_base == pytest.approx(10_000 * 4 ** (64 / 62), rel=1e-4)
    assert config.optim.warmup_steps == 62
    assert config.run.eval_every == 40  # a sixth, in tens
    assert (
        final_arguments(job, tmp_path / "sums")[-3:]
        == final_arguments(second, tmp_path / "sums")[-3:]
    )  # the same for all seeds
    assert f"run.init_from={tmp_path / '1k_seed2'}" in second.arguments
    finish(job.folder, step=10, gpu_hours=0.1, max_steps=240)  # begun when times were other
    for each in (job, second):  # or were those of another machine
        assert load_config(final_arguments(each, tmp_path / "sums")).optim.max_steps == 240
    assert not job.is_finished


def test_times_of_runs_that_shared_a_gpu_are_refused(tmp_path):
    job = next(j for j in jobs_of(["4k_modern_same_time"], tmp_path) if j.name.endswith("_time"))
    for name in ("4k", "4k_modern"):
        finish(tmp_path / f"{name}_seed1", step=1000, gpu_hours=1.0)
        note_sharing(tmp_path / f"{name}_seed1", 1)
    assert load_config(final_arguments(job, tmp_path / "sums")).optim.max_steps == 1000
    note_sharing(tmp_path / "4k_seed1", 2)
    with pytest.raises(ValueError, match="needs the time of 4k_seed1, which shared its GPU"):
        final_arguments(job, tmp_path / "sums")


def test_no_time_is_left(tmp_path):
    for name in ("4k_from_1k", "4k_butterfly_same_time"):
        (job,) = (j for j in jobs_of([name], tmp_path / name) if j.name == name)
        finish(tmp_path / name / "4k_seed1", step=1000, gpu_hours=1.0)
        finish(tmp_path / name / "1k_seed1", step=1000, gpu_hours=0.996)  # four steps of 4k
        finish(tmp_path / name / "4k_butterfly_seed1", step=1000, gpu_hours=250.0)
        message = rf"{name} has no time left .* 4k took 1 GPU-hours.*. Leave {name} out"
        with pytest.raises(ValueError, match=message):
            final_arguments(job, tmp_path / name / "sums")


def test_butterfly_is_trained_as_long_as_dense_attention(tmp_path):
    jobs = {j.name: j for j in jobs_of(["16k_butterfly_same_time"], tmp_path)}
    finish(tmp_path / "16k_seed1", step=1000, gpu_hours=1.0)
    finish(tmp_path / "16k_butterfly_seed1", step=1000, gpu_hours=0.4)
    config = load_config(final_arguments(jobs["16k_butterfly_same_time"], tmp_path / "sums"))
    assert config.optim.max_steps == 2500
    assert config.model.mask.pattern == "butterfly"
    assert jobs["16k"].is_finished and not jobs["16k_butterfly_same_time"].is_finished
    assert final_arguments(jobs["16k"], tmp_path / "sums") == jobs["16k"].arguments


@pytest.mark.parametrize(
    ("slow", "fast"), [("1k_then_16k", "1k_then_16k_butterfly"), ("1k_then_4k", "1k_then_1k")]
)
def test_a_faster_model_trains_as_long_as_a_slower_one(tmp_path, slow, fast):
    name = f"{fast}_same_time"
    jobs = {j.name: j for j in jobs_of([name], tmp_path)}
    assert set(jobs) == {"1k", slow, fast, name}
    finish(tmp_path / "1k_seed1", step=3000, gpu_hours=1.0)
    finish(tmp_path / f"{slow}_seed1", step=1000, gpu_hours=0.8)
    finish(tmp_path / f"{fast}_seed1", step=1000, gpu_hours=0.4)
    config = load_config(final_arguments(jobs[name], tmp_path / "sums"))
    assert config.optim.max_steps == 2000
    assert config.run.init_from == str(tmp_path / "1k_seed1")


def test_a_run_is_finished_with_its_last_checkpoint(tmp_path):
    (job,) = jobs_of(["1k"], tmp_path)
    assert not job.is_finished
    finish(job.folder, step=1000, gpu_hours=1.0)
    assert job.is_finished
    last = checkpoint_folder(job.folder, 1000)
    last.rename(tmp_path / "kept")
    assert not job.is_finished
    # stopped between evaluation and checkpoint
    write_checkpoint(job.folder, Progress(step=500), {}, {}, {})
    assert not job.is_finished
    (tmp_path / "kept").rename(last)
    assert job.is_finished
    (job.folder / METRICS).write_text('{"step": 1000, "loss": 1.0}\n{"step": 500, "val_loss": 1}\n')
    assert not job.is_finished


def test_the_cost_of_a_run_is_in_its_folder_or_its_sums(tmp_path, scored, stream, base):
    folder, sums = tmp_path / "1k_seed2", tmp_path / "sums"
    assert training_cost(folder, sums) is None
    (run,), text = added_up([scored("1k", {LONG: base}, seed=2)], stream)  # in this very folder
    last = {"step": 7, "tokens": 700, "gpu_hours": 0.25, "val_loss": 4.0}
    config = replace(run.config, optim=replace(run.config.optim, max_steps=7, warmup_steps=0))
    whole = replace(run, config=config, about=run.about | {"evaluations": [last]})
    for part in (
        replace(whole, about=run.about),  # its last evaluation is not there
        replace(whole, config=run.config),  # it was to have more steps
        replace(whole, about=whole.about | {"step": 6}),
    ):
        write_scored(part, text, sums)
        assert training_cost(folder, sums) is None
    write_scored(whole, text, sums)
    assert training_cost(tmp_path / "1k_seed1", sums) is None
    took = training_cost(folder, sums)
    assert (took["step"], took["gpu_hours"]) == (7, 0.25)
    shutil.rmtree(folder)
    finish(folder, step=10, gpu_hours=1.0)
    took = training_cost(folder, sums)
    assert (took["step"], took["gpu_hours"]) == (10, 1.0)
    (folder / METRICS).write_text('{"step": 10, "loss": 1.0}\n')
    assert training_cost(folder, tmp_path) is None


def test_sums_of_other_runs_are_refused(tmp_path, scored, stream, base, corpus):
    (job,) = jobs_of(["1k"], tmp_path)
    (run,), text = added_up([scored("1k", {LONG: base})], stream)
    data = replace(job.config.data, path="where/it/was/trained")
    ours = replace(job.config, data=data)
    write_scored(replace(run, config=ours), text, tmp_path / "sums")
    check_texts([job], tmp_path / "sums", corpus, folders=False)
    for name, value in {"max_steps": 20_000, "lr": 7.0}.items():
        other = replace(ours, optim=replace(ours.optim, **{name: value}))
        path = write_scored(replace(run, config=other), text, tmp_path / "sums")
        with pytest.raises(ValueError, match=rf"{path} holds .*: optim.{name} is"):
            check_texts([job], tmp_path / "sums", corpus, folders=False)
    n_tokens = len(TokenStream(corpus, "train"))
    for there in (n_tokens, 1234, 123_456):
        of_text = replace(run, config=ours, about=run.about | {"text_tokens": there})
        path = write_scored(of_text, text, tmp_path / "sums")
        if there == n_tokens:
            check_texts([job], tmp_path / "sums", corpus, folders=False)
            continue
        message = rf"{path} belongs .* of {there:,} tokens, which .* {n_tokens:,} as in --data"
        with pytest.raises(ValueError, match=message):
            check_texts([job], tmp_path / "sums", corpus, folders=False)


def test_1k_models_continue_with_equal_tokens_at_every_context(tmp_path):
    names = [n for n in MODELS if n.startswith("1k_then_") and not n.endswith("_same_time")]
    configs = {j.name: j.config for j in jobs_of(names, tmp_path) if j.name != "1k"}
    assert len(configs) == 7
    whole, part = (j.config.optim for j in jobs_of(["1k_then_1k"], tmp_path, "hours"))
    assert (whole.max_steps, part.max_steps, part.lr) == (2200, 733, whole.lr / 2)
    assert {c.optim.max_steps for c in configs.values()} == {BUDGETS["minutes"].steps // 3}
    assert {c.run.init_from for c in configs.values()} == {str(tmp_path / "1k_seed1")}
    assert {c.run.seed for c in configs.values()} == {1001}  # other windows than the first part
    bases = {name: c.model.rope_base for name, c in configs.items()}
    assert bases["1k_then_1k"] == 10_000
    assert bases["1k_then_16k"] == pytest.approx(10_000 * 16 ** (64 / 62), rel=1e-4)


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ("1k", {"seeds": 0}, "--seeds=0 must be at least 1"),
        ("1k", {"gpus_per_run": 0}, "--gpus-per-run=0 must be at least 1"),
        ("1k 1k_then_1k", "optim.max_steps=300", "--set optim.max_steps cannot .* 1k_then_1k, wh"),
        ("4k_from_1k", "optim.max_steps=7", "--set optim.max_steps cannot .* 4k_from_1k, who"),
        ("1k", "run.seed=5", "--set run.seed=5: the sweep .* each run. Use --seeds"),
        ("1k", "optim.nonsense=1", "optim.nonsense"),
    ],
)
def test_refusals(tmp_path, models, options, message):
    if isinstance(options, str):
        options = {"overrides": ["optim.lr=1e-3", options]}
    with pytest.raises(ValueError, match=message):
        jobs_of(models.split(), tmp_path, **options)


def test_overrides_come_last(tmp_path):
    options = ["optim.warmup_steps=7", "run.eval_every=30"]
    jobs = {j.name: j for j in jobs_of(["4k_from_1k"], tmp_path, overrides=options)}
    finish(tmp_path / "4k_seed1", step=1000, gpu_hours=1.0)
    finish(tmp_path / "1k_seed1", step=1000, gpu_hours=0.75)
    for job in jobs.values():
        config = load_config(final_arguments(job, tmp_path / "sums"))
        assert (config.optim.warmup_steps, config.run.eval_every) == (7, 30)


def test_a_run_with_other_settings_is_refused(tmp_path):
    (job,) = jobs_of(["1k"], tmp_path, "smoke")
    job.folder.mkdir()
    (job.folder / "config.yaml").write_text(to_yaml(job.config))
    (again,) = jobs_of(["1k"], tmp_path, "smoke")
    assert again == job
    changed = r"1k_seed1 holds a run with other settings: .*optim.max_steps is 12 there and 3600"
    with pytest.raises(ValueError, match=changed):
        jobs_of(["1k"], tmp_path, "minutes")
    jobs_of(["1k"], tmp_path, "smoke", gpus_per_run=2)  # a batch may be divided otherwise


def test_a_context_that_grows_in_one_run_has_the_positions_of_two_runs(tmp_path):
    (job,) = jobs_of(["1k_to_4k"], tmp_path, "billion")
    assert [(s.context_length, s.last_step) for s in job.config.stages] == [
        (1024, 5722),
        (4096, 7630),
    ]
    *_, by_hand = jobs_of(["1k_then_4k"], tmp_path, "billion")
    assert by_hand.config.model.context_length == 4096
    assert round(job.config.model.scaled_rope_base) == by_hand.config.model.rope_base
    jobs = jobs_of(["1k_to_4k_longer", "1k_then_4k"], tmp_path, "hours")
    steps = {job.name: job.config.optim.max_steps for job in jobs}
    assert steps["1k_to_4k_longer"] == steps["1k"] + steps["1k_then_4k"]
