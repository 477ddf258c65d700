import json
import math
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend

from kernels.reference import dropout_keep_mask, standard_attention
from scripts import attention_io, attention_peers, benchmark_attention
from scripts.attention_peers import RESULTS, Case, Sparsity, Tensors

CPU = torch.device("cpu")
SMALL = Case(batch=2, seq_len=48, n_head=2, head_dim=16, dtype=torch.float16)
BUTTERFLY = Sparsity("butterfly", 1, 16)


def whole_answer(tensors, factor=None, **options):
    """Attention of one head (T, D) and its gradients, by the specification in kernels/."""
    leaves = [x[None, :, None].clone().requires_grad_() for x in tensors[:3]]
    out, _ = standard_attention(*leaves, **options)
    grads = torch.autograd.grad(out, leaves, tensors[3][None, :, None])
    return dict(zip(RESULTS, (x[0, :, 0] for x in (out.detach(), *grads)), strict=True))


def one_head(seq_len, head_dim=16):
    return Tensors(*torch.randn(4, seq_len, head_dim, dtype=torch.float64))


# ---- problems


def test_flops_count_causal_and_density():
    case = Case(2, 1024, 4, 64)
    full = 4 * 2 * 4 * 1024**2 * 64
    assert case.forward_flops == full
    assert replace(case, causal=True).forward_flops == full / 2
    # 8 blocks of 128, each with itself and one partner
    sparse = replace(case, sparsity=Sparsity("butterfly", 1))
    assert sparse.density == 0.25
    assert sparse.forward_flops == full / 4
    window = replace(case, sparsity=Sparsity("window", 2), causal=True)
    assert 0 < window.forward_flops == full / 2 * window.density < full / 2


def test_padding_is_at_most_twenty_tokens_and_always_the_same():
    case = Case(64, 1000, 1, 16, padded=True)
    lengths = case.kv_lengths("cpu")
    assert lengths.dtype == torch.int32
    assert 980 <= lengths.min() < lengths.max() <= 1000
    assert lengths.equal(case.kv_lengths("cpu"))
    assert replace(case, padded=False).kv_lengths("cpu").unique().tolist() == [1000]


def test_a_case_can_be_written_as_json():
    row = json.loads(json.dumps(replace(SMALL, sparsity=BUTTERFLY).describe()))
    assert (row["dtype"], row["mask"], row["seq_len"]) == ("float16", "butterfly 1", 48)
    assert row["sparsity"] == {"pattern": "butterfly", "reach": 1, "block_size": 16}
    assert SMALL.describe()["mask"] == "dense"


@pytest.mark.parametrize("seq_len", benchmark_attention.PAPER_LENGTHS)
def test_block_sparse_attention_of_the_paper_preset_sees_256_keys(seq_len):
    case = Case(1, seq_len, 1, 64, sparsity=benchmark_attention.paper_sparsity(seq_len))
    assert case.density == min(1 / 8, 256 / seq_len)


def test_sparse_masks_of_the_sparsity_preset_exist(monkeypatch):
    seen = []

    def look(case, names):
        seen.append(case)
        return []

    monkeypatch.setattr(benchmark_attention, "measure_case", look)
    benchmark_attention.sparsity(full=False)
    densities = [case.density for case in seen]
    assert densities[0] == 1.0
    assert min(densities) == 1 / 32
    assert len(set(densities)) > 8


# ---- the exact answer


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores_a_chunk", [1, 50 * 7, 10**6])
def test_exact_attention_in_chunks(causal, scores_a_chunk):
    case = Case(1, 50, 1, 16, causal=causal)
    head = one_head(50)
    visible = partial(attention_peers.visible_keys, case, batch=0, device=CPU)
    got = attention_peers.head_attention(head, visible, scores_a_chunk=scores_a_chunk)
    want = whole_answer(head, causal=causal)
    for name in RESULTS:
        torch.testing.assert_close(got[name], want[name])


def test_exact_attention_with_padding_sees_the_first_keys():
    case = Case(3, 50, 1, 16, padded=True)
    length = int(case.kv_lengths("cpu")[1])
    assert length < 50
    q, k, v, dout = head = one_head(50)
    visible = partial(attention_peers.visible_keys, case, batch=1, device=CPU)
    got = attention_peers.head_attention(head, visible)
    want = whole_answer((q, k[:length], v[:length], dout))
    for name in ("out", "dq"):
        torch.testing.assert_close(got[name], want[name])
    for name in ("dk", "dv"):
        torch.testing.assert_close(got[name][:length], want[name])
        assert not got[name][length:].any()


@pytest.mark.parametrize("causal", [False, True])
def test_visible_keys_are_those_of_the_block_mask(causal):
    case = replace(SMALL, sparsity=BUTTERFLY, causal=causal)
    rows = [attention_peers.visible_keys(case, slice(i, i + 12), 0, CPU) for i in (0, 12, 24, 36)]
    dense = BUTTERFLY.mask(48).to_dense(48, 48)[0]
    assert torch.cat(rows).equal(dense.tril() if causal else dense)
    pairs = 48 * 49 / 2 if causal else 48 * 48
    assert torch.cat(rows).sum().item() / pairs == pytest.approx(case.density)


def test_exact_attention_with_dropout():
    case = replace(SMALL, dropout_p=0.25)
    tensors = attention_peers.make_tensors(case, CPU)
    expected = attention_peers.answer(case, tensors)
    assert expected.heads == [(0, 0)]
    head = Tensors(*(x[0, :, 0].detach().double() for x in tensors))
    want = whole_answer(head, dropout_p=0.25, dropout_seed=attention_peers.DROPOUT_SEED)
    for name in RESULTS:
        torch.testing.assert_close(expected.exact[name][0], want[name])
    # the mask of the first head is the same in a batch of any size
    keep = partial(dropout_keep_mask, 1, seq_q=8, seq_k=8, dropout_p=0.25)
    assert keep(batch=1, n_head=1)[0, 0].equal(keep(batch=3, n_head=2)[0, 0])


# ---- contenders


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["standard", "SDPA math", "SDPA flash"])
def test_peers_are_right(name, padded):
    case = replace(SMALL, padded=padded)
    (row,) = measured([name], case)
    assert row["status"] == "ok", row
    assert all(0 < row["errors"][x] < row["error_budgets"][x] < 0.01 for x in RESULTS)


def test_flex_gets_the_causal_mask(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = replace(SMALL, dtype=torch.float32, causal=True)
    tensors = attention_peers.make_tensors(case, CPU)
    with attention_peers.functorch_config.patch(donated_buffer=True):
        attention = attention_peers.flex(case, CPU)
        assert attention_peers.functorch_config.donated_buffer is False
    out = attention(*(x.detach() for x in tensors[:3]))
    expected = attention_peers.answer(case, tensors)
    for number, (b, h) in enumerate(expected.heads):
        torch.testing.assert_close(out[b, :, h], expected.exact["out"][number].float())


def test_flex_gets_the_listed_blocks_and_their_mask(monkeypatch):
    # Compiled, it visits listed blocks only, and asks mask_mod in partial ones.
    given = []

    def attend(q, k, v, block_mask):
        given.append(block_mask)
        return q

    monkeypatch.setattr(torch, "compile", lambda function, **options: attend)
    case = replace(SMALL, causal=True, sparsity=BUTTERFLY)
    attention_peers.flex(case, CPU)(*[torch.zeros(1, 1, 1, 1)] * 3)
    (mask,) = given
    size, at = BUTTERFLY.block_size, torch.arange(SMALL.seq_len)
    blocks = mask.to_dense()[0, 0].bool()
    seen = blocks[at[:, None] // size, at // size] & mask.mask_mod(0, 0, at[:, None], at)
    expected = attention_peers.visible_keys(case, slice(0, SMALL.seq_len), 0, CPU)
    assert torch.equal(seen, expected)


def test_ours_passes_the_options_on(monkeypatch):
    calls = []
    monkeypatch.setattr(
        attention_peers, "flash_attention", lambda q, k, v, **options: calls.append(options)
    )
    attention_peers.ours(SMALL, CPU)(*[torch.zeros(())] * 3)
    case = replace(SMALL, causal=True, padded=True, dropout_p=0.1, sparsity=BUTTERFLY)
    attention_peers.ours(case, CPU)(*[torch.zeros(())] * 3)
    assert calls[0] == {"causal": False, "impl": "triton"}
    options = calls[1]
    assert options.pop("mask").layout.shape == (1, 3, 3)
    assert options.pop("kv_lengths").equal(case.kv_lengths("cpu"))
    assert options.pop("dropout_seed").tolist() == [attention_peers.DROPOUT_SEED]
    assert options == {"causal": True, "dropout_p": 0.1, "impl": "triton"}


def test_dropout_is_checked_where_its_mask_is_known():
    case = replace(SMALL, dropout_p=0.1)
    assert attention_peers.checked_case("ours", case) == case
    assert attention_peers.checked_case("standard", case) == SMALL
    assert attention_peers.checked_case("ours", replace(case, seq_len=2**16)).dropout_p == 0.0
    assert attention_peers.checked_case("standard", SMALL) == SMALL


# ---- the check refuses


@pytest.fixture(autouse=True)
def _no_gpu_to_time(monkeypatch):
    monkeypatch.setattr(
        benchmark_attention,
        "time_ms",
        lambda run: run() is not None and {"ms": 2.0, "ms_20": 1.5, "ms_80": 3.0},
    )
    monkeypatch.setattr(benchmark_attention, "peak_mib", lambda run: run() is not None and 7.0)


def measured(names, case=SMALL):
    return benchmark_attention.measure_case(case, names, device="cpu")


def contender(monkeypatch, name, attention):
    monkeypatch.setitem(attention_peers.CONTENDERS, name, lambda case, device: attention)


@pytest.mark.parametrize("value", [1.05, math.nan, math.inf])
def test_a_wrong_result_has_no_speed(value, monkeypatch, capsys):
    right = attention_peers.sdpa(SDPBackend.MATH, SMALL, CPU)
    contender(monkeypatch, "ours", lambda q, k, v: right(q, k, v) * value)
    (row,) = measured(["ours"])
    assert row["status"].startswith("wrong: error")
    assert not [key for key in row if key.endswith(("_ms", "_tflops", "_mib"))]
    assert " ms" not in capsys.readouterr().out


def test_one_wrong_gradient_of_the_last_head_is_seen(monkeypatch):
    right = attention_peers.sdpa(SDPBackend.MATH, SMALL, CPU)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, k):
            return k.clone()

        @staticmethod
        def backward(ctx, *grads):
            dk = grads[0].clone()
            dk[-1, 20, -1] = math.nan
            return dk

    contender(monkeypatch, "ours", lambda q, k, v: right(q, Broken.apply(k), v))
    (row,) = measured(["ours"])
    assert row["status"].startswith("wrong: error nan of dk (allowed ")
    assert ", " not in row["status"]


def test_the_verdict_takes_no_nan_and_no_infinite_budget():
    right, budgets = dict.fromkeys(RESULTS, 0.1), dict.fromkeys(RESULTS, 0.1)
    assert attention_peers.verdict(right, budgets) == "ok"
    for name in RESULTS:
        for found, budget in ((0.11, 0.1), (math.nan, 0.1), (0.1, math.nan), (0.1, math.inf)):
            said = attention_peers.verdict(right | {name: found}, budgets | {name: budget})
            assert said.startswith("wrong: error")
            assert f"of {name}" in said


def test_what_cannot_run_says_why_and_the_others_go_on(monkeypatch, capsys):
    def exhausted(q, k, v):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    contender(monkeypatch, "standard", exhausted)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    names = ["standard", "SDPA cuDNN", "flash-attn-4", "SDPA math"]
    status = {row["name"]: row["status"] for row in measured(names)}
    assert status["standard"] == "out of memory"
    assert status["SDPA cuDNN"] == "not supported: PyTorch has no such kernel"
    assert status["flash-attn-4"].startswith("not supported: cannot be imported (")
    assert status["SDPA math"] == "ok"
    assert "out of memory" in capsys.readouterr().out


def test_other_errors_are_not_caught(monkeypatch):
    def broken(q, k, v, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    contender(monkeypatch, "ours", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measured(["ours"])
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measured(["SDPA math"])


def test_long_runs_are_timed_three_times(monkeypatch):
    import triton.testing

    times = iter([900.0, 1000.0, 500.0])  # ms, of one run after another

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, end):
            return next(times)

    runs = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ms = attention_peers.time_ms(lambda: runs.append(1))
    assert ms == pytest.approx({"ms": 900.0, "ms_20": 660.0, "ms_80": 960.0})
    assert len(runs) == 4  # the first compiles

    times = iter([1.0])
    monkeypatch.setattr(triton.testing, "do_bench", lambda run, quantiles: quantiles)
    ms = attention_peers.time_ms(lambda: runs.append(1))
    assert ms == {"ms": 0.5, "ms_20": 0.2, "ms_80": 0.8}


def test_speeds_follow_the_flop_convention():
    (row,) = measured(["SDPA math"], replace(SMALL, causal=True))
    flops = 4 * 2 * 2 * 48**2 * 16 / 2
    assert row["forward_tflops"] == pytest.approx(flops / 2e-3 / 1e12)
    assert row["backward_tflops"] == pytest.approx(2.5 * flops / 2e-3 / 1e12)
    assert (row["backward_ms_20"], row["backward_ms_80"], row["peak_mib"]) == (1.5, 3.0, 7.0)


# ---- what is made of the rows


def made_up_rows(case, names, *, graphs=False):
    """Rows as measure_case makes them: a peer is wrong at 4,096 tokens, another out of memory."""
    rows = []
    for number, name in enumerate(names, start=2):
        row = {"name": name, **case.describe(), "errors": dict.fromkeys(RESULTS, 1e-3)}
        row["status"] = "ok"
        if name in ("SDPA math", "standard") and case.seq_len >= 16_384:
            row["status"] = "out of memory"
        elif name == "SDPA flash" and case.seq_len == 4096:
            row["status"] = "wrong: error 1.2e-01 of dk (allowed 1.3e-02)"
        else:
            for part, flops in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
                ms = number * flops * case.forward_flops / 1e12
                row |= {f"{part}_ms": ms, f"{part}_tflops": 1000 / number}
            row["peak_mib"] = 100.0
            if graphs:
                row["both_graph_ms"] = row["both_ms"] / 2
        rows.append(row)
    return rows


@pytest.fixture
def made_up(monkeypatch):
    """A GPU that answers at once."""
    monkeypatch.setattr(benchmark_attention, "measure_case", made_up_rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")
    monkeypatch.setattr(attention_io, "with_bytes", partial(attention_io.with_bytes, device="cpu"))


def run_preset(preset, folder, capsys, *options):
    out = folder / f"{preset}.json"
    with pytest.raises(SystemExit) as exited:
        benchmark_attention.main(["--preset", preset, "--out", str(out), *options])
    assert out.with_suffix(".png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 110
    return json.loads(out.read_text())["rows"], printed, exited.value


def test_peers_preset(made_up, tmp_path, capsys):
    rows, printed, exited = run_preset("peers", tmp_path, capsys)
    assert exited.code == "4 of 112 results are wrong, and have no speed"
    assert printed.count("wrong:") == 4
    by = {(r["name"], r["seq_len"], r["head_dim"], r["causal"], r["mask"]): r for r in rows}
    ours = by["ours", 1024, 64, True, "dense"]
    assert ours["forward_over_best_peer"] == pytest.approx(3 / 2)
    # SDPA flash would be the best at 4,096 tokens, but it is wrong
    assert by["ours", 4096, 64, True, "dense"]["forward_over_best_peer"] == pytest.approx(4 / 2)
    assert "forward_over_best_peer" not in by["ours", 65_536, 64, True, "dense"]
    sparse = by["FlexAttention", 65_536, 128, False, "butterfly"]
    assert sparse["backward_over_proportional"] == pytest.approx(3 / 2)
    assert by["ours", 4096, 128, True, "butterfly"]["forward_over_proportional"] == 1.0
    assert {r["batch"] * r["seq_len"] for r in rows} == {16_384, 32_768, 65_536}
    assert {r["n_head"] * r["head_dim"] for r in rows} == {2048}
    assert {r["dtype"] for r in rows} == {"bfloat16"}


@pytest.mark.parametrize(("options", "n_cases"), [((), 19), (("--full",), 40)])
def test_paper_preset(options, n_cases, made_up, tmp_path, capsys):
    rows, printed, exited = run_preset("paper", tmp_path, capsys, *options)
    assert exited.code == f"4 of {4 * n_cases} results are wrong, and have no speed"
    assert "9.4" in printed and "148.7" in printed
    speedups = {r["seq_len"]: r["paper_speedup"] for r in rows if "paper_speedup" in r}
    assert [round(speedups[n], 1) for n in (4096, 16_384, 65_536)] == [9.4, 37.3, 148.7]
    sparse = [r for r in rows if r["mask"] != "dense" and r["variant"] == "dropout, padded"]
    assert {round(r["speedup"] * r["density"], 6) for r in sparse} == {2.0}
    assert all(r["dropout_p"] == 0.1 and r["padded"] and not r["causal"] for r in sparse)
    assert not any("paper_speedup" in r for r in sparse)
    graphs = {r["seq_len"] for r in rows if "both_graph_ms" in r}
    assert graphs == {128, 256, 512, 1024, 2048, 4096, 8192}


def test_sparsity_preset(made_up, tmp_path, capsys):
    out = tmp_path / "sparsity.json"
    benchmark_attention.main(["--preset", "sparsity", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {round(r["forward_over_proportional"], 6) for r in rows if r["mask"] != "dense"} == {1.0}
    assert out.with_suffix(".png").exists()


def test_a_gpu_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="measures a GPU, and PyTorch sees none"):
        benchmark_attention.main(["--preset", "peers"])


# ---- bytes

NCU_CSV = """\
==PROF== Connected to process 42
==PROF== Profiling "kernel_a" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","42","kernel_a(int, float)","Metrics","dram__bytes_read.sum","Mbyte","1,400.5"
"0","42","kernel_a(int, float)","Metrics","dram__bytes_write.sum","byte","128"
"1","42","kernel_b","Metrics","dram__bytes_read.sum","Gbyte","2"
"1","42","kernel_b","Metrics","dram__bytes_write.sum","Kbyte","1.5"
"""


def test_standard_attention_is_counted_operation_by_operation():
    case = attention_io.CASES["standard"]
    x = 64 * 1024 * 16 * 64 * 2
    matrix = 64 * 16 * 1024**2 * 2
    counted = attention_io.standard_bytes(case)
    # q k^T writes the matrix, softmax reads and writes it, and p v reads it; the scale of q and
    # the copies that bmm needs of q, k and v move 8 of the 12 x.
    assert counted["forward"] == 4 * matrix + 12 * x
    # dp is written, softmax reads p and dp and writes ds, and dv, dq and dk read p, ds and ds.
    assert counted["backward"] == 7 * matrix + 12 * x


def test_our_bytes_are_counted_by_tiles():
    case = Case(2, 1000, 3, 64, torch.float16)
    x, rows = 2 * 1000 * 3 * 64 * 2, 2 * 3 * 1000 * 4
    count = partial(attention_io.flash_bytes, block_m_fwd=128, block_m_dq=64, block_n_dkdv=256)
    moved = count(case)
    assert moved["forward"] == {"loaded": 2 * x + rows + 16 * x, "minimum": 4 * x + rows}
    assert moved["backward"] == {
        "loaded": 8 * x + 3 * rows + 2 * x * 16 + (2 * x + 2 * rows) * 4,
        "minimum": 12 * x + 5 * rows,
    }
    sparse = replace(attention_io.CASES["ours"], sparsity=Sparsity("butterfly", 1))
    quarter, dense = count(sparse)["forward"], count(attention_io.CASES["ours"])["forward"]
    assert quarter["minimum"] == dense["minimum"]
    x = 64 * 1024 * 16 * 64 * 2
    assert dense["loaded"] - quarter["loaded"] == 2 * x * 8 * 0.75


@pytest.mark.parametrize("name", ["ours", "ours, butterfly"])
def test_tiles_are_those_of_the_kernels(name):
    tiles = attention_io.our_tiles(attention_io.CASES[name], "cpu")
    assert set(tiles) == {"block_m_fwd", "block_m_dq", "block_n_dkdv"}
    assert set(tiles.values()) <= {16, 32, 64, 128, 256}


def test_ncu_output_is_summed_over_kernels():
    read = round(1400.5e6 + 2e9)
    summed = {"read_bytes": read, "written_bytes": 1628, "kernels": 2}
    assert attention_io.parse_ncu(NCU_CSV) == summed
    assert attention_io.parse_ncu("==PROF== nothing\n") == {}
    with pytest.raises(ValueError, match="'n/a' 'byte'"):
        attention_io.parse_ncu(NCU_CSV.replace('"128"', '"n/a"'))
    with pytest.raises(ValueError, match="'2' 'furlong'"):
        attention_io.parse_ncu(NCU_CSV.replace("Gbyte", "furlong"))
    half = "\n".join(line for line in NCU_CSV.splitlines() if "write.sum" not in line)
    with pytest.raises(ValueError, match="not all of"):
        attention_io.parse_ncu(half)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Put a program `ncu` on the PATH that prints and exits as told, and records its arguments."""

    def install(text, code):
        (tmp_path / "text").write_text(text)
        program = tmp_path / "ncu"
        program.write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/text\nexit {code}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_profile_runs_ncu(fake_ncu, tmp_path, monkeypatch):
    fake_ncu(NCU_CSV, 0)
    assert attention_io.profile("ours/forward")["kernels"] == 2
    arguments = (tmp_path / "arguments").read_text()
    assert "--clock-control none --profile-from-start off --metrics dram__bytes_read" in arguments
    assert arguments.strip().endswith(
        "-m scripts.benchmark_attention --preset io --one-run ours/forward"
    )
    fake_ncu("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM: no permission\nbye\n", 1)
    assert attention_io.profile("ours/forward") == {
        "profiler": "ncu failed (1): ==ERROR== ERR_NVGPUCTRPERM: no permission"
    }
    fake_ncu("", 3)
    assert attention_io.profile("ours/forward") == {"profiler": "ncu failed (3): "}
    fake_ncu("==WARNING== No kernels were profiled.\n", 0)
    assert attention_io.profile("ours/forward") == {"profiler": "ncu saw no kernel"}
    monkeypatch.setenv("PATH", "")
    assert "no ncu" in attention_io.profile("ours/forward")["profiler"]


@pytest.mark.parametrize("works", [True, False])
def test_io_preset(works, fake_ncu, made_up, tmp_path, capsys):
    fake_ncu(NCU_CSV if works else "==ERROR== no counters\n", 0 if works else 1)
    out = tmp_path / "io.json"
    benchmark_attention.main(["--preset", "io", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["standard", "ours", "ours, butterfly"]
    for row in rows:
        for part in ("forward", "backward"):
            moved = row["bytes"][part]
            assert moved["loaded"] >= moved["minimum"] > 0
            assert ("read_bytes" in moved) == works
    assert ("==ERROR== no counters" in capsys.readouterr().out) != works
    assert out.with_suffix(".png").stat().st_size > 1000


def test_the_profiler_sees_the_second_run(monkeypatch):
    seen = []

    @contextmanager
    def profile():
        seen.append("start")
        yield
        seen.append("stop")

    right = attention_peers.standard(SMALL, CPU)
    contender(monkeypatch, "standard", lambda q, k, v: seen.append("forward") or right(q, k, v))
    monkeypatch.setitem(attention_io.CASES, "standard", SMALL)
    monkeypatch.setattr(
        attention_io, "make_tensors", partial(attention_io.make_tensors, device=CPU)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "profile", profile)
    benchmark_attention.main(["--preset", "io", "--one-run", "standard/forward"])
    assert seen == ["forward", "start", "forward", "stop"]
    seen.clear()
    attention_io.one_run("standard/backward")
    assert seen == ["forward", "start", "stop"]


def test_parts_of_a_run_are_the_forward_and_the_backward():
    tensors = attention_peers.make_tensors(SMALL, CPU)
    forward = attention_io.part_of_a_run("standard", SMALL, tensors, "forward")
    backward = attention_io.part_of_a_run("standard", SMALL, tensors, "backward")
    assert forward().shape == (2, 48, 2, 16)
    assert len(backward()) == len(backward()) == 3
