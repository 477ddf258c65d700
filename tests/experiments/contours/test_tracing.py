"""Matching of images that look alike at their markers, and what made-up runs do on the pairs."""

import json
from pathlib import Path

import numpy as np
import pytest

from configs.reader import read_config, to_yaml
from experiments.contours.baselines import write_predictions
from experiments.contours.geometry import Endpoints, read_endpoints
from experiments.contours.matching import Tolerance, describe, match
from experiments.contours.tracing import main, on_pairs, read_log_odds
from scripts import prepare_lra
from training.classification.config import ClassifyConfig

N = 1500


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    prepare_lra.main(
        ["pathfinder32", "--out", str(out), "--examples", f"20,20,{N}", "--workers", "1"]
    )
    return out


@pytest.fixture(scope="module")
def endpoints(data: Path) -> Endpoints:
    return read_endpoints(data / "pathfinder32", "test")


def make_run(folder: Path, log_odds: np.ndarray, labels: np.ndarray, data: Path) -> Path:
    folder.mkdir()
    config = read_config(
        ClassifyConfig, ["configs/lra/pathfinder.yaml", f"data.path={data / 'pathfinder32'}"]
    )
    (folder / "config.yaml").write_text(to_yaml(config))
    logits = np.stack([np.zeros(len(labels)), log_odds], axis=1).astype(np.float32)
    np.save(folder / "test_logits.npy", logits)
    share = float(np.mean(logits.argmax(1) == labels))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "test_accuracy": share}) + "\n")
    return folder


def test_pairs_are_one_of_each_label_once_and_near(endpoints: Endpoints):
    generator = np.random.default_rng(0)
    log_odds = generator.normal(size=N)
    tolerance = Tolerance(geometry=1.2, log_odds=0.5)
    pairs = match(endpoints, log_odds[None], tolerance)
    assert 20 < len(pairs) < N // 2
    assert (endpoints.labels[pairs] == [1, 0]).all()
    assert len(np.unique(pairs)) == pairs.size
    assert (np.abs(np.diff(log_odds[pairs])) < 0.5).all()
    vectors = describe(endpoints)[pairs[:, 1]]
    ways = [one for view in (endpoints, endpoints.swapped()) for one in (view, view.transposed())]
    distance = [np.linalg.norm(describe(x)[pairs[:, 0]] - vectors, axis=1) for x in ways]
    assert len({tuple(x) for x in distance}) == 4
    nearest = np.min(distance, axis=0)
    assert (nearest < 1.2).all()
    assert (np.diff(nearest) > -1e-3).all()  # the nearest first
    assert len(match(endpoints, log_odds[None], Tolerance(geometry=0.4, log_odds=0.5))) < len(pairs)


def test_the_nearest_pair_is_found(endpoints: Endpoints):
    # of an image, a copy with the other label that is seen from the other marker and transposed
    one = np.flatnonzero(endpoints.labels == 1)[:1]
    turned = endpoints.swapped().transposed()
    both = Endpoints(
        labels=np.array([*endpoints.labels, 0], np.uint8),
        positions=np.concatenate([endpoints.positions, turned.positions[one]]),
        directions=np.concatenate([endpoints.directions, turned.directions[one]]),
        period=endpoints.period,
    )
    pairs = match(both, np.zeros((1, N + 1)), Tolerance())
    assert pairs[0].tolist() == [one[0], N]


def test_on_pairs_by_hand():
    log_odds = np.array([2.0, 1.0, -1.0, 3.0, 0.5, 0.5])
    found = on_pairs(log_odds, np.array([[0, 1], [3, 2], [4, 5], [2, 0]]))
    assert found["ordered"] == (1 + 1 + 0.5 + 0) / 4
    assert found["accuracy"] == (0.5 + 1 + 0.5 + 0) / 4
    low, high = found["ordered_interval"]
    assert low < found["ordered"] < high


def test_tracing_is_distinguished_from_looking_at_the_ends(data, endpoints, tmp_path, capsys):
    generator = np.random.default_rng(1)
    labels = endpoints.labels
    distance = np.linalg.norm(np.diff(endpoints.positions, axis=1)[:, 0], axis=1)
    geometry = 0.1 * (distance.mean() - distance)
    noise = generator.normal(size=(4, N))
    log_odds = {"trees": geometry, "network": geometry, "held_out": geometry + 0.1 * noise[0]}
    write_predictions(tmp_path / "kept", data / "pathfinder32", **log_odds)
    traces = make_run(tmp_path / "traces", 2.0 * labels - 1 + 0.5 * noise[1], labels, data)
    looks = make_run(tmp_path / "looks", geometry + 0.1 * noise[2], labels, data)
    out = tmp_path / "tracing.json"
    options = ["--data", str(data), "--out", str(out), "--predictions", str(tmp_path / "kept")]
    main([str(traces), str(looks), *options])
    rows = json.loads(out.read_text())["rows"]
    for row, (low, high) in zip(rows, [(0.95, 1), (0.4, 0.6)], strict=True):
        assert row["pairs"] > 100
        assert low <= row["on_pairs"]["run"]["ordered"] <= high
        assert 0.4 < row["on_pairs"]["held_out"]["ordered"] < 0.6
        assert 0.45 < row["on_pairs"]["trees"]["accuracy"] < 0.55
        assert sum(b["run"]["images"] for b in row["by_confidence"]) == N
        assert row["where_geometry_is"]["right"]["trees"]["accuracy"] == 1
        assert row["where_geometry_is"]["wrong"]["trees"]["accuracy"] == 0
    assert rows[0]["where_geometry_is"]["wrong"]["run"]["accuracy"] > 0.9
    assert rows[1]["where_geometry_is"]["wrong"]["run"]["accuracy"] < 0.4
    assert "geometry, held_out" in capsys.readouterr().out
    # one run again, with other logits: its row is new, that of the other is kept
    (tmp_path / "looks").rename(tmp_path / "moved")
    make_run(tmp_path / "looks", log_odds["held_out"] + labels, labels, data)
    main([str(looks), *options, "--add", str(out)])
    again = json.loads(out.read_text())["rows"]
    assert [row["run"] for row in again] == [str(looks), str(traces)]
    assert again[0]["on_pairs"]["run"] != rows[1]["on_pairs"]["run"]
    assert again[1] == rows[0]
    with pytest.raises(ValueError, match=r"has matching=.*same --tolerance"):
        main([str(looks), *options, "--add", str(out), "--caliper", "0.2"])
    knows = 50.0 * labels
    write_predictions(tmp_path / "kept", data / "pathfinder32", trees=knows, network=knows)
    with pytest.raises(ValueError, match=r"no two test images match within"):
        main([str(traces), *options])
    with pytest.raises(ValueError, match=r"geometry=0 must be above 0"):
        Tolerance(geometry=0)


def test_logits_of_other_images_are_refused(data: Path, endpoints: Endpoints, tmp_path: Path):
    labels = endpoints.labels
    run = make_run(tmp_path / "run", 2.0 * labels - 1, labels, data)
    np.testing.assert_allclose(read_log_odds(run, labels), 2.0 * labels - 1)
    with pytest.raises(
        ValueError, match=r"scores 0.00% on this test split, but the run recorded 100"
    ):
        read_log_odds(run, 1 - labels)
    with pytest.raises(ValueError, match=r"needs \(7, 2\)"):
        read_log_odds(run, labels[:7])
    (run / "test_logits.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"Choose a finished run"):
        read_log_odds(run, labels)
