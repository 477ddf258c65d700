"""Which runs there are, in what order, and what is refused."""

import pytest

from configs.reader import to_yaml
from experiments.classifier_runs import is_finished
from experiments.lra.__main__ import make_runs
from experiments.lra.tasks import ATTENTIONS, BENCHMARK, TASKS, trainable_tasks
from kernels.limits import BLOCK_SIZES
from tests.experiments.tiny_lra import make_tasks


def jobs_of(tmp_path, *overrides, tasks=BENCHMARK, attentions=tuple(ATTENTIONS), seeds=(1, 2)):
    return make_runs(
        tasks, attentions, seeds, data=tmp_path / "data", out=tmp_path / "out", overrides=overrides
    )


def test_every_configuration_is_one_that_a_model_can_have(tmp_path):
    assert len(BENCHMARK) == 5
    made = jobs_of(tmp_path, tasks=TASKS)
    assert len(made) == 7 * 3 * 2 == len({job.folder for job in made})
    for job in made:
        config = job.config
        task, attention, _ = job.folder.name.split("_")
        assert job.folder.name == f"{task}_{attention}_seed{job.seed}"
        assert config.data.path == str(tmp_path / "data" / TASKS[task].folder)
        assert (config.run.seed, config.run.out_dir) == (job.seed, str(job.folder))
        mask = config.model.mask
        assert (config.model.attention == "eager") == (attention == "standard")
        assert (mask.pattern == "butterfly") == (attention == "butterfly")
        if mask.pattern == "butterfly":
            assert mask.block_size in BLOCK_SIZES
            assert mask.block_size == (64 if config.model.context_length <= 1024 else 128)


def test_overrides_come_last_but_for_what_names_a_run(tmp_path):
    (job,) = jobs_of(
        tmp_path, "model.mask.block_size=32", "optim.lr=1e-2",
        tasks=["image"], attentions=["butterfly"], seeds=[1],
    )  # fmt: skip
    assert (job.config.model.mask.block_size, job.config.optim.lr) == (32, 1e-2)
    for override in ("run.seed=3", "model.attention=sdpa", "data.path=x"):
        with pytest.raises(ValueError, match=rf"--set {override}: the sweep sets .*Use --"):
            jobs_of(tmp_path, override)


def test_a_folder_with_another_run_is_refused(tmp_path):
    ((job,)) = jobs_of(tmp_path, tasks=["image"], attentions=["dense"], seeds=[1])
    job.folder.mkdir(parents=True)
    (job.folder / "config.yaml").write_text(to_yaml(job.config))
    options = {"tasks": ["image"], "attentions": ["dense"], "seeds": [1]}
    (again,) = jobs_of(tmp_path, "run.compile=false", **options)  # changes rounding alone
    assert not is_finished(again.folder)
    lr = job.config.optim.lr
    with pytest.raises(ValueError, match=rf"image_dense_seed1 .*optim.lr is {lr} there and 0.1"):
        jobs_of(tmp_path, "optim.lr=0.1", **options)


def test_only_retrieval_may_be_missing(tmp_path, capsys):
    make_tasks(tmp_path, "image", "pairs")
    assert trainable_tasks(["image", "retrieval", "pairs"], tmp_path) == ["image", "pairs"]
    (said,) = capsys.readouterr().out.splitlines()
    assert "skipping retrieval" in said and "--source" in said
    with pytest.raises(FileNotFoundError, match=r"prepare_lra pathfinder32 --out"):
        trainable_tasks(["pathfinder"], tmp_path)
    with pytest.raises(FileNotFoundError, match=r"prepare_lra aclsum --source WHEEL --out"):
        trainable_tasks(["aclsum"], tmp_path)


def test_pretrained_runs_start_with_runs_on_hidden_tokens(tmp_path):
    options = {"data": tmp_path, "out": tmp_path / "out", "recipe": "pretrained"}
    first, then = make_runs(["text"], ["butterfly"], [3], **options)
    assert (first.folder.name, then.folder.name) == (
        "text_masked_butterfly_seed3",
        "text_pretrained_butterfly_seed3",
    )
    assert (first.needs, then.needs) == ((), (first.folder,))
    assert (first.config.objective, then.config.objective) == ("masked", "labels")
    assert then.config.run.init_from == str(first.folder)
    assert first.config.model == then.config.model
    assert (first.config.optim.lr, then.config.optim.lr) == (5e-4, 1e-4)
    with pytest.raises(ValueError, match=r"objective=causal: the sweep sets .*Use --recipe"):
        make_runs(["text"], ["dense"], [3], **options, overrides=["objective=causal"])
    same = make_runs(["text"], ["dense"], [3], **options, overrides=["optim.lr=1e-3"])
    assert [job.config.optim.lr for job in same] == [1e-3, 1e-3]
    hidden, labels = make_runs(["image"], ["dense"], [3], **options)
    assert hidden.config.objective == "masked" and hidden.config.optim == labels.config.optim
