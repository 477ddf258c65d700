"""The answers of README.md's table follow from the results."""

import pytest

from evaluation.results import read_result
from experiments import headline
from experiments.pages import RESULTS


@pytest.mark.parametrize(
    ("nats", "interval", "said"),
    [
        (-0.0242, [-0.0292, -0.0189], "better by 0.024 nats (0.019 to 0.029)"),
        (0.02, [0.01, 0.03], "worse by 0.020 nats (0.010 to 0.030)"),
        (-0.01, [-0.03, 0.01], "no difference shown (0.030 better to 0.010 worse)"),
    ],
)
def test_a_difference_is_called_what_its_interval_shows(nats, interval, said):
    assert headline._verdict({"nats": nats, "interval": interval}) == said


def test_accuracies_come_with_the_best_guess_from_endpoints():
    run = {"stage": "pathx_dense", "test_accuracy": 90.25}
    accuracies = {"64": {"a": 0.95}, "128": {"a": 0.5, "b": 0.875}}
    results = {
        "pathx": {"runs": [run, run | {"stage": "path64"}, run | {"test_accuracy": 87.0}]},
        "pathfinder_baselines": {"accuracies": accuracies},
    }
    ours, guess = headline._accuracies(results, "pathx_dense", 128)
    assert ours == "90.2% and 87.0% (2 seeds, own images)"
    assert guess == "decision trees on endpoints: 87.5%"


def test_the_best_peer_is_the_fastest_that_ran():
    problem = {"seq_len": 16_384, "head_dim": 64, "causal": True, "mask": "dense", "status": "ok"}

    def row(name, ms, **changes):
        speeds = {"forward_tflops": 1000 / ms, "backward_tflops": 2000 / ms, "both_ms": ms}
        return {"name": name, **problem, **speeds, **changes}

    rows = [
        row("ours", 4.0),
        row("ours, portable", 4.5),
        row("slow", 10.0),
        row("good", 5.0),
        row("noncausal", 1.0, causal=False),
        {"name": "math", **problem, "status": "out of memory"},
    ]
    answer = headline._dense({"attention_hopper": {"rows": rows}})
    assert answer == ("250 / 500 TFLOP/s", "good: 200 / 400 TFLOP/s")


def test_passes_with_a_faster_peer_are_counted():
    def rows(length, ours, **peers):
        shape = {"seq_len": length, "head_dim": 64, "causal": True, "mask": "dense", "status": "ok"}
        named = {"ours": ours, "ours, portable": (1.0, 1.0), **peers}
        return [
            {"name": name, **shape, "forward_ms": forward, "backward_ms": backward}
            for name, (forward, backward) in named.items()
        ]

    failed = {"name": "math", "mask": "dense", "status": "out of memory"}
    found = [
        *rows(1024, (2.0, 11.0), good=(3.0, 10.0), slow=(9.0, 90.0)),
        *rows(4096, (4.2, 6.0), good=(5.0, 5.0), other=(4.0, 7.0)),
        failed,
    ]
    card = {"device": "NVIDIA H100 80GB HBM3"}
    assert headline.attention_limit({"rows": found, "environment": card}) == (
        "- A peer is faster in 1 of 2 forward and 2 of 2 backward passes on an H100, "
        "by up to 5% and 20%.\n"
    )


def test_each_question_has_two_answers_and_a_place():
    results = {name: read_result(RESULTS / f"{name}.json") for name in headline.RESULTS}
    lines = headline.results_table(**results).splitlines()[2:]
    assert len(lines) == len(headline.LINES)
    for cells in (line.strip("|").split("|") for line in lines):
        assert len(cells) == 4 and all(cell.strip() for cell in cells)
