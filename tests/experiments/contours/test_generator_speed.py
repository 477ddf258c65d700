"""The benchmark of the Pathfinder generator."""

import json

from data.pathfinder import DIFFICULTIES
from experiments.contours import generator_speed


def test_times_every_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(generator_speed, "IMAGES", {32: 3})
    generator_speed.main(["--out", str(tmp_path / "speed.json")])
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [(row["size"], row["difficulty"]) for row in rows] == [(32, d) for d in DIFFICULTIES]
    for row in rows:
        assert row["ms_one_core"] > 0 and row["images_drawn_per_s"] > 0
        assert row["images_per_s_all_cores"] > 0
