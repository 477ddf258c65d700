"""Tables, intervals and the picture, of made-up runs."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from configs.reader import to_yaml
from evaluation.runs import note_sharing
from experiments.lra import report
from experiments.lra.__main__ import make_runs
from experiments.lra.report import (
    finished_runs,
    summarize,
    with_others,
    write_report,
)
from experiments.lra.tables import accuracy_table, draw, draw_speed
from experiments.lra.tasks import ATTENTIONS
from tests.experiments.tiny_lra import make_tasks


def make_up(out: Path, task: str, attention: str, seed: int, accuracy: float, **options) -> Path:
    """The folder of a finished run."""
    steps = ("optim.warmup_steps=0", "optim.max_steps=5000", "data.phases=[]")
    overrides = (*steps, *options.get("overrides", ()))
    (job,) = make_runs([task], [attention], [seed], data=out, out=out, overrides=overrides)
    steps = job.config.optim.max_steps
    job.folder.mkdir(parents=True)
    (job.folder / "config.yaml").write_text(to_yaml(job.config))
    records = [
        {"step": step, "examples": 32 * step, "val_loss": 1.0, "val_accuracy": share,
         "gpu_hours": step / 1e4}
        for step, share in ((steps // 2, 0.4), (steps, 0.5))
    ]  # fmt: skip
    records[-1] |= {
        "best_step": steps, "best_val_accuracy": 0.5, "test_loss": 1.5, "test_accuracy": accuracy,
        "test_examples": options.get("n", 2000),
    }  # fmt: skip
    lines = [json.dumps(record) + "\n" for record in records]
    (job.folder / "metrics.jsonl").write_text("".join(lines))
    return job.folder


def made_up_speed(task: str, ms: tuple[float, float, float], data: str, share: float):
    return [
        {"task": task, "data": data, "context_length": 1024, "tokens_share": share,
         "attention": attention, "captured": True, "step_ms": x, "peak_gib": 1.0,
         "speedup": ms[0] / x}
        for attention, x in zip(ATTENTIONS, ms, strict=True)
    ]  # fmt: skip


SPEED = {
    "environment": {"device": "a made-up GPU"},
    "geometric_means": {
        "captured": {
            "tasks": ["image", "retrieval"],
            "speedup": {"standard": 1.0, "dense": 3.0, "butterfly": 4.25},
        }
    },
    "rows": [
        *made_up_speed("image", (3, 1, 0.5), "image", 1.0),
        *made_up_speed("retrieval", (9, 3, 2), "pairs", 0.25),
    ],
}


def test_intervals_count_test_examples_and_seeds(tmp_path):
    for seed, accuracy in ((1, 0.36), (2, 0.37), (3, 0.38)):
        make_up(tmp_path, "listops", "dense", seed, accuracy)
    make_up(tmp_path, "listops", "butterfly", 1, 0.37)
    three, one = summarize(finished_runs(tmp_path, "paper"))
    assert (three["seeds"], three["each"]) == ([1, 2, 3], [36.0, 37.0, 38.0])
    assert three["test_accuracy"] == pytest.approx(37)
    assert three["test_interval"] == pytest.approx([34.91, 39.14], abs=0.01)
    half = 4.302653 / 3**0.5  # Student's t of two degrees of freedom, a deviation of 1
    assert three["seed_interval"] == pytest.approx([37 - half, 37 + half])
    assert three["interval"][0] == pytest.approx(37 - (2.09**2 + half**2) ** 0.5, abs=0.01)
    assert one["seed_interval"] is None
    assert one["interval"] == one["test_interval"] == pytest.approx(three["test_interval"])
    assert (one["block_size"], three["block_size"]) == (128, None)
    assert three["minutes"] == pytest.approx(60 * 0.5)
    assert three["examples"] == 160_000


def test_seeds_must_be_of_one_test_split(tmp_path):
    make_up(tmp_path, "image", "dense", 1, 0.4)
    make_up(tmp_path, "image", "dense", 2, 0.4, n=1000)
    with pytest.raises(
        ValueError, match="seed 2 has test_examples=1000, but seed 1 has 2000. Train"
    ):
        with_others(finished_runs(tmp_path, "paper"), [], "paper")


def test_only_finished_runs_of_the_recipe_count(tmp_path):
    done = make_up(tmp_path, "image", "dense", 1, 0.4)
    stopped = make_up(tmp_path, "image", "dense", 2, 0.4)
    (stopped / "metrics.jsonl").write_text('{"step": 1, "val_accuracy": 0.1}\n')
    other = tmp_path / "image_rotary_dense_seed1"
    done.rename(other)
    assert finished_runs(tmp_path, "paper") == []
    assert [run["seed"] for run in finished_runs(tmp_path, "rotary")] == [1]
    with pytest.raises(ValueError, match="no finished run of the recipe paper"):
        write_report(tmp_path, "paper", tmp_path, tmp_path)


def test_report(tmp_path, capsys):
    runs, results = tmp_path / "runs", tmp_path / "results"
    for attention, accuracy in zip(ATTENTIONS, (0.40, 0.42, 0.44), strict=True):
        for seed in (1, 2):
            folder = make_up(runs, "image", attention, seed, accuracy + 0.01 * seed, n=10_000)
            note_sharing(folder, seed)
        make_up(runs, "listops", attention, 1, accuracy - 0.04)
    make_up(runs, "pairs", "dense", 1, 0.9)
    results.mkdir()
    (results / "lra_speed.json").write_text(json.dumps(SPEED))
    (results / "pathfinder_baselines.json").write_text(
        json.dumps({"accuracies": {"32": {"marker_positions": 0.67}, "64": {"distance": 0.5}}})
    )
    write_report(runs, "paper", make_tasks(tmp_path / "data", "listops"), results)
    path = results / "lra.json"
    result = json.loads(path.read_text())
    text = path.with_suffix(".md").read_text()
    assert capsys.readouterr().out.startswith(text)

    lines = accuracy_table(result).splitlines()
    assert lines[3] == (
        "| FlashAttention (paper) | 37.6 | 63.9 | 81.4 | 43.5 | 72.7 | - | 40.5 | 2.4x |"
    )
    cells = [cell.strip() for cell in lines[6].split("|")[1:-1]]
    assert cells[0] == "Papilio, dense" and cells[1].startswith("38.0 (35.9 to 40.1")
    assert cells[2:4] == ["-", "-"] and cells[4].startswith("43.5 (") and cells[5] == "-"
    assert cells[6].startswith("90.0 (") and cells[7:] == ["40.8", "3.0x"]
    assert "| Pathfinder | marker positions | 67.0 |" in text
    assert "| Retrieval (on pairs) | 25% of 1,024 | yes | 9.00 ms (1.00x) |" in text
    listops, image, pairs = draw(result).axes
    of_image = [row for row in result["rows"] if row["task"] == "image"]
    points = [np.ravel(x.get_xdata())[0] for x in image.lines if x.get_marker() == "o"]
    assert points == [row["test_accuracy"] for row in of_image]
    assert [axes.get_title() for axes in (listops, pairs)] == ["ListOps", "Pairs\n(in-house)"]
    picture = path.with_suffix(".png")
    assert picture.stat().st_size > 10_000

    # what is committed is enough to draw it all again
    path.with_suffix(".md").unlink()
    picture.unlink()
    report.redraw(path)
    assert path.with_suffix(".md").read_text() == text
    assert picture.stat().st_size > 10_000


def test_speeds_are_drawn_next_to_the_papers():
    plain = [row | {"captured": False, "speedup": 1.5} for row in SPEED["rows"]]
    means = {"plain": SPEED["geometric_means"]["captured"], **SPEED["geometric_means"]}
    speed = {"rows": [*SPEED["rows"], *plain], "geometric_means": means}
    captured, _ = draw_speed(speed, [{"speedup": None}, {"speedup": 2.4}, {"speedup": 2.8}]).axes
    widths = [bar.get_width() for bar in captured.patches if isinstance(bar, Rectangle)]
    assert widths == [3, 3, 3.0, 6, 4.5, 4.25]  # dense, then the butterfly, their means last
    assert [np.ravel(line.get_xdata())[0] for line in captured.lines] == [2.4, 2.8, 1]
    assert [x.get_text() for x in captured.get_yticklabels()] == [
        "Image", "Retrieval (on pairs)", "geometric mean"
    ]  # fmt: skip


def test_with_all_tasks_the_paper_keeps_its_averages(tmp_path):
    for task in ("listops", "text", "retrieval", "image", "pathfinder"):
        make_up(tmp_path, task, "dense", 1, 0.5)
    write_report(tmp_path, "paper", tmp_path, tmp_path)
    rows = accuracy_table(json.loads((tmp_path / "lra.json").read_text())).splitlines()[2:]
    assert [row.split(" | ")[-2] for row in rows] == ["59.3", "59.8", "59.6", "50.0"]


def test_shared_citations_are_not_part_of_the_average(tmp_path):
    for task in ("listops", "text", "retrieval", "image", "pathfinder", "aclsum"):
        make_up(tmp_path, task, "dense", 1, 0.1 if task == "aclsum" else 0.5)
    write_report(tmp_path, "paper", make_tasks(tmp_path / "data", "aclsum"), tmp_path)
    result = json.loads((tmp_path / "lra.json").read_text())
    head, _, *rows = accuracy_table(result).splitlines()
    assert "| Shared citations (aclsum, not AAN) | average |" in head
    assert [row.split(" | ")[-2] for row in rows] == ["59.3", "59.8", "59.6", "50.0"]
    scores = result["baselines"]["aclsum"]
    assert set(scores) == {"majority", "years", "cosine", "citations", "comparisons"}
    text = (tmp_path / "lra.md").read_text()
    assert "| Shared citations (aclsum, not AAN) | difference of the latest years" in text


def test_intervals_stay_within_percent(tmp_path):
    for seed, accuracy in ((1, 0.2), (2, 0.4)):
        make_up(tmp_path, "listops", "dense", seed, accuracy)
    (row,) = summarize(finished_runs(tmp_path, "paper"))
    assert row["seed_interval"] == [0, 100]
    assert row["interval"] == [0, 100]


def test_seeds_must_be_of_one_model(tmp_path):
    make_up(tmp_path, "text", "dense", 1, 0.4)
    make_up(tmp_path, "text", "dense", 2, 0.4, overrides=["optim.lr=0.1"])
    with pytest.raises(ValueError, match=r"text_dense_seed2 .*optim.lr is 0.1 there and 0.0001"):
        finished_runs(tmp_path, "paper")


@pytest.fixture
def written(tmp_path):
    """Report of another machine, with some runs of `tmp_path` and others."""
    there = tmp_path / "there"
    for task, seed in (("listops", 2), ("image", 1), ("image", 2)):
        make_up(there, task, "dense", seed, 0.3)
    path = tmp_path / "lra.json"
    path.write_text(json.dumps({"recipe": "paper", "runs": finished_runs(there, "paper")}))
    return path


def test_runs_of_other_reports_are_added(tmp_path, written):
    for task, seed in (("image", 3), ("image", 2), ("pathfinder", 1)):
        make_up(tmp_path, task, "dense", seed, 0.5)
    here = finished_runs(tmp_path, "paper")
    assert with_others(here, [], "paper") == here
    every = with_others(here, [written], "paper")
    assert [(run["task"], run["seed"], run["test_accuracy"]) for run in every] == [
        ("listops", 2, 30), ("image", 1, 30), ("image", 2, 50), ("image", 3, 50),
        ("pathfinder", 1, 50),
    ]  # fmt: skip
    assert with_others([], [written], "paper") == json.loads(written.read_text())["runs"]


def test_refuses_reports_on_other_runs(tmp_path, written):
    make_up(tmp_path, "image", "dense", 3, 0.5, overrides=["optim.lr=0.1"])
    with pytest.raises(
        ValueError, match=r"image with dense .* seed 3 has lr=0.1, but seed 1 has 0.00"
    ):
        with_others(finished_runs(tmp_path, "paper"), [written], "paper")
    with pytest.raises(ValueError, match=r"lra.json has recipe=paper, which must be rotary"):
        with_others([], [written], "rotary")
