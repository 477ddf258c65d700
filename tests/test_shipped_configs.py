"""Shipped configurations train on a CPU when shrunk, both compiled and eager."""

import functools

import pytest
import torch

import train
from tests.experiments.tiny_lra import TINY, make_tasks
from tests.training_runs import losses

STEPS = ("optim.max_steps=2", "optim.warmup_steps=1", "run.log_every=1", "run.eval_every=2")
TINY_GPT = (
    *("model.vocab_size=289", "model.context_length=64", "model.n_layer=2", "model.n_embd=32"),
    *("model.n_head=2", "optim.batch_tokens=128", "optim.micro_batch_size=1", "run.device=cpu"),
    *("run.dtype=float32", *STEPS),
)
TINY_CLASSIFIER = (*TINY, *STEPS)
BUTTERFLY = ("model.mask.pattern=butterfly", "model.mask.block_size=16", "data.document_mask=true")

GROWS = ("model.context_schedule=[[16,0.5],[64,0.5]]",)
KINDS = {
    "paper/gpt2_small_1k": TINY_GPT,
    "paper/gpt2_medium_4k": (*TINY_GPT, *BUTTERFLY),
    "long_4k": (*TINY_GPT, *GROWS, "model.n_kv_head=1", "model.window_size=9"),
    "modern_small_1k": (*TINY_GPT, "model.n_kv_head=1"),
    "modern_small_4k": (*TINY_GPT, *GROWS, "model.n_kv_head=1", "model.window_size=9"),
    "quickstart": (*TINY_GPT, *GROWS),
    "lra/listops": TINY_CLASSIFIER,
    "lra/image": TINY_CLASSIFIER,
    "lra/retrieval": TINY_CLASSIFIER,
    "lra/pathfinder_rotary": TINY_CLASSIFIER,
}
SIMILAR = ("lra/image", "long_4k", "modern_small_1k")
"""Configurations that resemble lra/listops and modern_small_4k: marked as slow, as redundant."""
CASES = [
    *[(name, "aot_eager", 1e-4) for name in KINDS if name not in SIMILAR],
    *[pytest.param(name, "aot_eager", 1e-4, marks=pytest.mark.slow) for name in SIMILAR],
    # Inductor also compiles C++: half a minute each, and other random numbers for dropout
    *[
        pytest.param(name, "inductor", 0.5, marks=pytest.mark.slow)
        for name in ("paper/gpt2_small_1k", "lra/listops")
    ],
]


@pytest.fixture(scope="module")
def data(corpus, tmp_path_factory):
    """Data paths by the first word of a configuration's name."""
    tasks = tmp_path_factory.mktemp("lra")
    make_tasks(tasks, "listops", "image", "retrieval", "pathfinder32")
    texts = dict.fromkeys(("gpt2", "long", "modern", "quickstart"), corpus)
    return texts | {folder.name.removesuffix("32"): folder for folder in tasks.iterdir()}


@pytest.mark.parametrize(("name", "backend", "rel"), CASES)
def test_compiled_and_eager_runs_have_the_same_losses(
    name, backend, rel, data, tmp_path, monkeypatch
):
    """Attention dropout is as in the file: torch draws the same seeds in both runs."""
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend=backend))
    path = data[name.rpartition("/")[2].split("_")[0]]
    for compiled in ("true", "false"):
        argv = [f"configs/{name}.yaml", *KINDS[name], "model.dropout=0", f"data.path={path}"]
        train.main([*argv, f"run.compile={compiled}", f"run.out_dir={tmp_path / compiled}"])
    eager = losses(tmp_path / "false")
    assert set(eager) == {1, 2}
    assert losses(tmp_path / "true") == pytest.approx(eager, rel=rel)
