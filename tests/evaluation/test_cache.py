"""Losses saved in the folder of a run."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from data.files import load_sealed, sealed, to_json
from data.text.shards import TokenStream
from evaluation.score import read_losses, write_losses
from evaluation.windows import Scoring


def test_saved_losses_match_one_checkpoint_text_and_scoring(opened, corpus, tmp_path):
    stream, scoring = TokenStream(corpus, "val"), Scoring(history=8, stride=8)
    run = opened("run")
    losses = np.full(len(stream), np.nan, dtype=np.float32)
    losses[1] = 1.5
    assert read_losses(run, stream, scoring) is None
    write_losses(run, stream, scoring, losses)
    known = read_losses(run, stream, scoring)
    assert known.dtype == np.float32 and np.array_equal(known, losses, equal_nan=True)
    assert read_losses(run, stream, replace(scoring, first=8)) is None
    write_losses(run, stream, replace(scoring, first=8), losses[:-1])
    with pytest.raises(ValueError, match=r"is damaged \(losses of \(967,\) instead of 968 tokens"):
        read_losses(run, stream, replace(scoring, first=8))
    for other in (
        opened("run", step=4),
        opened("run", gpu_hours=0.6),  # trained again, to the same step
        opened("run", "run.dtype=bfloat16"),
        opened("run", "model.rope_scaling=linear", "model.rope_factor=2"),
    ):
        assert read_losses(other, stream, scoring) is None
    elsewhere = shutil.copytree(corpus, tmp_path / "elsewhere" / corpus.name)
    assert read_losses(run, TokenStream(elsewhere, "val"), scoring) is not None
    manifest = elsewhere / "manifest.json"
    values = load_sealed(manifest)
    values["splits"]["val"]["shards"][0]["sha256"] = "abc"
    manifest.write_bytes(to_json(sealed(values)))
    assert read_losses(run, TokenStream(elsewhere, "val"), scoring) is None


@pytest.mark.parametrize("length", [0, 10, 300, -5])
def test_damaged_files_are_reported(opened, corpus, length):
    stream, scoring = TokenStream(corpus, "val"), Scoring(history=8, stride=8)
    run = opened("run")
    write_losses(run, stream, scoring, np.zeros(200, dtype=np.float32))
    (path,) = (run.folder / "scores").rglob("*.npz")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"h8_s8_f0\.npz is damaged \(.*\): copy it again, or"):
        read_losses(run, stream, scoring)
