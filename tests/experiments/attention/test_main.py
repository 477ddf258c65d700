import json
from contextlib import nullcontext

import pytest

from experiments.attention import __main__ as benchmark_attention
from experiments.attention import report
from experiments.attention.cases import Case
from tests.experiments.attention.conftest import made_up_rows


@pytest.mark.parametrize("seq_len", benchmark_attention.PAPER_LENGTHS)
def test_block_sparse_attention_of_the_paper_preset_sees_256_keys(seq_len):
    case = Case(1, seq_len, 1, 64, sparsity=benchmark_attention.paper_sparsity(seq_len))
    assert case.density == min(1 / 8, 256 / seq_len)


def test_each_preset_can_be_asked_for():
    assert tuple(benchmark_attention.PRESETS) == benchmark_attention.PRESET_NAMES


def run_preset(preset, folder, capsys, *options):
    out = folder / f"{preset}.json"
    with pytest.raises(SystemExit) as exited:
        benchmark_attention.main(["--preset", preset, "--out", str(out), *options])
    assert out.with_suffix(".png").stat().st_size > 1000
    printed = capsys.readouterr().out
    return json.loads(out.read_text())["rows"], printed, exited.value


def test_peers_preset(made_up, tmp_path, capsys):
    rows, printed, exited = run_preset("peers", tmp_path, capsys)
    assert exited.code == "4 of 96 results are wrong and were not timed"
    assert printed.count("wrong:") == 4
    by = {(r["name"], r["seq_len"], r["head_dim"], r["causal"], r["mask"]): r for r in rows}
    ours = by["ours", 1024, 64, True, "dense"]
    assert ours["forward_over_best_peer"] == pytest.approx(4 / 2)
    # SDPA flash would be the best at 4,096 tokens, but it is wrong
    assert by["ours", 4096, 64, True, "dense"]["forward_over_best_peer"] == pytest.approx(5 / 2)
    assert {r["mask"] for r in rows} == {"dense"}
    assert {r["batch"] * r["seq_len"] for r in rows} == {16_384}
    assert {r["n_head"] * r["head_dim"] for r in rows} == {2048}
    assert {r["dtype"] for r in rows} == {"bfloat16"}


def test_hopper_preset(made_up, tmp_path):
    out = tmp_path / "hopper.json"
    benchmark_attention.main(["--preset", "hopper", "--out", str(out)])
    assert out.with_suffix(".png").stat().st_size > 1000
    rows = json.loads(out.read_text())["rows"]
    ours = next(row for row in rows if row["name"] == "ours")
    # made-up times grow by position: ours, twice, then two peers, then two that repeat. Ours grow
    # by 1% from round to round
    assert ours["backward_over_best_peer"] == pytest.approx(4 / 2 / 1.045, rel=1e-3)
    assert ours["backward_over_best_repeatable"] == pytest.approx(6 / 2 / 1.045, rel=1e-3)
    interval = ours["backward_over_best_peer_interval"]
    assert interval == pytest.approx([4 / 2 / 1.08, 4 / 2 / 1.01])

    table = report.repeatable_table({"rows": rows}).splitlines()
    assert len(table) == 2 + 12 + 4
    assert "| SDPA flash, deterministic |" in table[0] and "| SDPA cuDNN |" not in table[0]
    assert table[2].endswith("| 2.87 (2.78 to 2.97) | 1.91 (1.85 to 1.98) |")
    assert "causal, butterfly" in table[14] and "refused" in table[14]
    backward = report.direction_table({"rows": rows}, direction="backward").splitlines()
    assert len(backward) == 2 + 12 and "deterministic" not in backward[0]


def test_butterfly_preset(made_up, tmp_path):
    out = tmp_path / "butterfly.json"
    benchmark_attention.main(["--preset", "butterfly", "--out", str(out)])
    assert out.with_suffix(".png").stat().st_size > 1000
    rows = json.loads(out.read_text())["rows"]
    assert {r["batch"] * r["seq_len"] for r in rows} == {65_536, 262_144}
    assert {r["n_head"] * r["head_dim"] for r in rows} == {2048}
    by = {(r["name"], r["seq_len"], r["head_dim"], r["causal"], r["mask"]): r for r in rows}
    ours = by["ours", 16_384, 128, False, "butterfly"]
    assert ours["forward_over_proportional"] == pytest.approx(1.0)
    assert ours["backward_over_best_peer"] == pytest.approx(4 / 2)  # FlexAttention's
    assert by["ours", 16_384, 64, True, "all"]["density"] == 1.0
    hidden = 1.0 - by["ours", 16_384, 64, False, "all but one"]["density"]
    assert hidden == pytest.approx((128 / 16_384) ** 2)
    longest = by["ours", 262_144, 64, False, "butterfly"]
    assert "forward_over_proportional" not in longest and "peak_mib" in longest

    table = report.butterfly_table({"rows": rows}).splitlines()
    assert len(table) == 2 + 12 and "flash-attn-4, ms" in table[0]
    assert table[2].startswith("| 64 | causal | 8,192 |") and "| 1.00 / 1.00 |" in table[2]
    prices = report.mask_price_table({"rows": rows}).splitlines()
    assert len(prices) == 2 + 8 and prices[2].endswith("| all | 1.000 / 1.000 |")


def test_blocks_preset(made_up, tmp_path, capsys):
    out = tmp_path / "blocks.json"
    benchmark_attention.main(["--preset", "blocks", "--out", str(out)])
    assert not out.with_suffix(".png").exists()
    rows = json.loads(out.read_text())["rows"]
    assert {r["sparsity"]["block_size"] for r in rows} == {16, 32, 64, 128}
    assert {r["batch"] * r["seq_len"] for r in rows} == {65_536}
    by = {(r["name"], r["head_dim"], r["causal"], r["block_size"]): r for r in rows}
    ours, portable = by["ours", 64, True, 16], by["ours, portable", 64, True, 16]
    assert ours["forward_portable_over_ours"] == portable["forward_ms"] / ours["forward_ms"]
    assert "backward_portable_over_ours" not in portable
    table = report.blocks_table({"rows": rows}).splitlines()
    assert (
        len(table) == 2 + 16
        and "| block size |" in table[0]
        and "| portable / Papilio |" in table[0]
    )


@pytest.mark.parametrize("preset", ["peers", "butterfly", "paper", "sparsity"])
@pytest.mark.parametrize("right", [0, 1])
def test_rows_without_speed_end_as_a_sentence(preset, right, made_up, tmp_path, monkeypatch):
    def broken_rows(case, names, runs=0, rounds=0):
        """All but `right` contenders of a case are wrong."""
        rows = made_up_rows(case, names, runs)
        for row in rows[right:]:
            row |= {"status": "wrong: error nan of dk"}
            for key in [key for key in row if key.endswith(("_ms", "_tflops", "_mib"))]:
                del row[key]
        return rows

    monkeypatch.setattr(benchmark_attention, "measure_case", broken_rows)
    out = tmp_path / "broken.json"
    alone = preset == "sparsity"  # our kernels, and no peer that may be wrong
    with nullcontext() if alone and right else pytest.raises(SystemExit, match="are wrong"):
        benchmark_attention.main(["--preset", preset, "--out", str(out)])
    assert out.exists() and out.with_suffix(".png").exists() == bool(right)


def test_sparsity_preset(made_up, tmp_path):
    out = tmp_path / "sparsity.json"
    benchmark_attention.main(["--preset", "sparsity", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {round(r["forward_over_proportional"], 6) for r in rows if r["mask"] != "dense"} == {1.0}
    assert out.with_suffix(".png").exists()


@pytest.mark.parametrize(("options", "n_cases"), [((), 19), (("--full",), 40)])
def test_paper_preset(options, n_cases, made_up, tmp_path, capsys):
    rows, printed, exited = run_preset("paper", tmp_path, capsys, *options)
    assert exited.code == f"4 of {4 * n_cases} results are wrong and were not timed"
    assert "9.4" in printed and "148.7" in printed
    speedups = {r["seq_len"]: r["paper_speedup"] for r in rows if "paper_speedup" in r}
    assert [round(speedups[n], 1) for n in (4096, 16_384, 65_536)] == [9.4, 37.3, 148.7]
    sparse = [r for r in rows if r["mask"] != "dense" and r["variant"] == "dropout, padded"]
    assert {round(r["speedup"] * r["density"], 6) for r in sparse} == {2.0}
    assert all(r["dropout_p"] == 0.1 and r["padded"] and not r["causal"] for r in sparse)
    assert not any("paper_speedup" in r for r in sparse)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("paper", "--tutorial", "x.py"),
            "--tutorial is an option of --preset peers, not of paper",
        ),
        (("peers", "--full"), "--full is an option of --preset paper, not of peers"),
        (("paper", "--one-run", "ours/forward"), "--one-run is an option of --preset io"),
    ],
)
def test_options_of_another_preset_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        benchmark_attention.main(["--preset", *arguments])
    assert said in capsys.readouterr().err


def test_approximate_preset(made_up, tmp_path, capsys):
    out = tmp_path / "approximate.json"
    benchmark_attention.main(["--preset", "approximate", "--compiled", "--out", str(out)])
    assert out.with_suffix(".png").stat().st_size > 1000
    result = json.loads(out.read_text())
    assert {"linformer", "transformers", "fla-core"} <= result["versions"].keys()
    rows = result["rows"]
    assert len(rows) == 10 * (8 + 2 + 2 + 2) + 7 * 6
    by = {(row["name"], row["seq_len"], row["mask"], row["causal"]): row for row in rows}
    assert by["ours", 65_536, "butterfly", True]["density"] < 0.02
    local = by["Local", 65_536, "dense", False]
    sparse = by["ours", 65_536, "butterfly 1", False]
    assert local["over_block_sparse"] == pytest.approx(local["both_ms"] / sparse["both_ms"])
    assert "fla linear attention" in report.approximate_verdict_table(result)
