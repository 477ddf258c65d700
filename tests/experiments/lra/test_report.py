"""Tables, intervals and the picture, of made-up runs."""

import json

import pytest

from experiments.lra import report
from experiments.lra.jobs import ATTENTIONS
from experiments.lra.plots import draw
from experiments.lra.report import (
    AMOS,
    PAPER,
    pathfinder_yardsticks,
    summarize,
    write_report,
)
from experiments.lra.runs import finished_runs, note_sharing
from experiments.lra.tables import accuracy_table, markdown, speed_table, trials_table
from tests.experiments.lra.made_up_lra import make_up
from tests.experiments.tiny_lra import make_tasks


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
    with pytest.raises(ValueError, match="image with dense attention .* of 1000 and 2000 examples"):
        summarize(finished_runs(tmp_path, "paper"))


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
    (results / "pathfinder_yardsticks.json").write_text(
        json.dumps({"accuracies": {"32": {"marker_positions": 0.67}, "64": {"distance": 0.5}}})
    )
    path = write_report(runs, "paper", make_tasks(tmp_path / "data", "listops"), results)
    assert path == results / "lra.json"
    result = json.loads(path.read_text())
    text = path.with_suffix(".md").read_text()
    assert capsys.readouterr().out.startswith(text)

    lines = accuracy_table(result).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        "model", "ListOps", "Text", "Retrieval", "Image", "Pathfinder", "Pairs (in-house)",
        "average of ListOps, Image", "speed-up",
    ]  # fmt: skip
    assert lines[3] == (
        "| FlashAttention (the paper's) | 37.6 | 63.9 | 81.4 | 43.5 | 72.7 | - | 40.5 | 2.4x |"
    )
    cells = [cell.strip() for cell in lines[6].split("|")[1:-1]]
    assert cells[0] == "ours, dense" and cells[1].startswith("38.0 (35.9 to 40.1")
    assert cells[2:4] == ["-", "-"] and cells[4].startswith("43.5 (") and cells[5] == "-"
    assert cells[6].startswith("90.0 (") and cells[7:] == ["40.8", "3.0x"]
    assert lines[5].endswith("| - |")  # standard attention against itself

    assert "Not trained here: Text, Retrieval, Pathfinder." in text
    assert "it was not noted how many runs shared a GPU" in text
    assert "| ListOps | the commonest label |" in text
    assert "| Pathfinder | marker positions | 67.0 |" in text
    assert "Retrieval was timed on the data of pairs: the same shapes" in text
    assert "| Retrieval (on pairs) | 25% of 1,024 | yes | 9.00 ms (1.00x) |" in text
    assert "| geometric mean of 2 |" in speed_table(result)
    picture = path.with_suffix(".png")
    assert picture.stat().st_size > 10_000

    # what is committed is enough to draw it all again
    path.with_suffix(".md").unlink()
    picture.unlink()
    report.main([str(path)])
    assert path.with_suffix(".md").read_text() == text
    assert picture.stat().st_size > 10_000


def test_with_all_tasks_the_paper_keeps_its_averages(tmp_path):
    for task in ("listops", "text", "retrieval", "image", "pathfinder"):
        make_up(tmp_path, task, "dense", 1, 0.5)
        note_sharing(tmp_path / f"{task}_dense_seed1", 1)
    path = write_report(tmp_path, "paper", tmp_path, tmp_path)
    result = json.loads(path.read_text())
    assert result["speed"] is None and result["yardsticks"]["listops"] is None
    rows = [[cell.strip() for cell in x.split("|")] for x in accuracy_table(result).splitlines()]
    assert rows[0][-3] == "average"
    assert [row[-3] for row in rows[2:]] == ["59.3", "59.8", "59.6", "50.0"]
    text = markdown(result)
    assert "Each run had a GPU of its own." in text
    assert "Not trained" not in text and "Time of a training step" not in text
    assert "(shared)" not in text


def test_runs_that_shared_a_gpu_are_marked(tmp_path):
    for task, sharing in (("listops", 1), ("image", 3)):
        make_up(tmp_path, task, "dense", 1, 0.5)
        note_sharing(tmp_path / f"{task}_dense_seed1", sharing)
    text = markdown(json.loads(write_report(tmp_path, "paper", tmp_path, tmp_path).read_text()))
    assert "(shared): up to 3 runs shared a GPU" in text
    listops, image = (line for line in text.splitlines() if "ours, dense | 1 |" in line)
    assert "(shared)" not in listops and image.endswith(" (shared) |")


def test_a_report_tells_the_learning_rate_that_was_taken(tmp_path):
    make_up(tmp_path, "text", "dense", 1, 0.5, overrides=["optim.lr=0.25"])
    text = markdown(json.loads(write_report(tmp_path, "paper", tmp_path, tmp_path).read_text()))
    assert "| steps | learning rate |" in text and "| 5,000 | 0.25 |" in text


def test_trials_of_a_task_stand_in_the_order_of_their_accuracies(tmp_path):
    results = []
    for accuracy, lr in ((0.5, 0.25), (0.25, 0.125), (0.375, 0.5)):
        out = tmp_path / str(lr)
        make_up(out, "text", "dense", 1, accuracy, overrides=[f"optim.lr={lr}"])
        make_up(out, "image", "dense", 1, 0.75)
        results.append(json.loads(write_report(out, "paper", tmp_path, out).read_text()))
    cells = [line.split(" | ") for line in trials_table(results, "text").splitlines()[2:]]
    assert [(lr, found.split()[0]) for *_, lr, found in cells] == [
        ("0.125", "25.0"), ("0.5", "37.5"), ("0.25", "50.0")
    ]  # fmt: skip


def test_averages_of_others_are_those_of_their_rows():
    for _, accuracies, average, _ in (*PAPER, *AMOS):
        assert sum(accuracies) / 5 == pytest.approx(average, abs=0.07)  # it prints 59.3 for 59.24


def test_yardsticks_may_be_shares_or_percent_or_missing(tmp_path):
    path = tmp_path / "pathfinder_yardsticks.json"
    assert pathfinder_yardsticks(path) is None
    for accuracies, expected in (
        ({"32": {"a": 0.5, "b": 0.67}}, {"a": 50, "b": 67}),
        ({"32": {"a": 50.0, "b": 67.0}}, {"a": 50, "b": 67}),
        ({"64": {"a": 50.0}}, None),
        ({"32": {}}, None),
    ):
        path.write_text(json.dumps({"accuracies": accuracies}))
        assert pathfinder_yardsticks(path) == (
            None if expected is None else pytest.approx(expected)
        )
    path.write_text("{}")
    with pytest.raises(ValueError, match="has no accuracies"):
        pathfinder_yardsticks(path)


def test_the_picture_has_a_panel_a_task(tmp_path):
    for seed in (1, 2):
        make_up(tmp_path, "image", "dense", seed, 0.4)
    for task in ("image", "text", "pathfinder", "pairs", "listops"):
        make_up(tmp_path, task, "butterfly", 1, 0.4)
    path = write_report(tmp_path, "paper", tmp_path, tmp_path)
    figure = draw(json.loads(path.read_text()))
    panels = {axes.get_title("left"): axes for axes in figure.axes if axes.axison}
    assert list(panels) == ["ListOps", "Text", "Image", "Pathfinder", "Pairs (in-house)"]
    # two seeds thin and their mean, another attention, and the paper's accuracy, which pairs lack
    assert [len(axes.lines) for axes in panels.values()] == [2, 2, 5, 2, 1]
    assert len(figure.axes) == 6
    x, y = panels["Image"].lines[2].get_data()
    assert x == pytest.approx([0.08, 0.16])  # millions
    assert y == pytest.approx([40, 50])


def test_intervals_stay_within_percent(tmp_path):
    for seed, accuracy in ((1, 0.2), (2, 0.4)):
        make_up(tmp_path, "listops", "dense", seed, accuracy)
    (row,) = summarize(finished_runs(tmp_path, "paper"))
    assert row["seed_interval"] == [0, 100]
    assert row["interval"] == [0, 100]


def test_averages_are_of_several_tasks_and_may_lack_standard_attention(tmp_path):
    def average() -> list[list[str]]:
        rows = summarize(finished_runs(tmp_path, "paper"))
        result = {"rows": rows, "references": [], "speed": None}
        lines = accuracy_table(result).splitlines()
        return [line.removesuffix(" |").split(" | ")[-1] for line in lines]

    make_up(tmp_path, "listops", "standard", 1, 0.2)
    make_up(tmp_path, "listops", "dense", 1, 0.4)
    assert average()[0] == "Pathfinder"
    make_up(tmp_path, "image", "dense", 1, 0.5)
    header, _, standard, dense = average()
    assert header == "average of ListOps, Image"
    assert (standard, dense) == ("-", "45.0")
