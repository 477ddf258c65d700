"""Profile of a run: a table whose parts add up to one step, and a trace."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from training.profiling import (
    IDLE,
    REST,
    SKIPPED,
    WARM_UP,
    StepProfiler,
    Stopwatch,
    part_of,
    profile_events,
    sum_by_part,
    time_by_part,
)


def profiled(folder, n_steps, step, device="cpu") -> str:
    profiler = StepProfiler(folder, n_steps, torch.device(device))
    for number in range(SKIPPED + WARM_UP + n_steps):
        step()
        assert profiler.step() == (number == SKIPPED + WARM_UP + n_steps - 1)
    report = profiler.report()
    step()
    assert not profiler.step() and not profiler.unfinished()
    return report


def rows(folder) -> dict[str, tuple[float, float]]:
    lines = (folder / "table.txt").read_text().splitlines()[1:]
    matches = [re.fullmatch(r" *([\d.]+) +([\d.]+)  (.+)", line) for line in lines]
    return {m[3]: (float(m[1]), float(m[2])) for m in matches if m}


def test_only_profiled_steps_are_counted(tmp_path) -> None:
    x = torch.randn(300, 300)
    calls = iter(range(1000))

    def step() -> None:
        if next(calls) < SKIPPED + WARM_UP:
            x.exp()
        else:
            x @ x
            x @ x

    report = profiled(tmp_path / "profile", 4, step)
    table = rows(tmp_path / "profile")
    assert table["aten::mm"][1] == 2 and "aten::exp" not in table
    whole = table.pop("the whole step")[0]
    assert sum(ms for ms, _ in table.values()) == pytest.approx(whole, abs=0.1)
    assert "table.txt" in report and "mean of 4" in report
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 8


def test_a_run_writes_its_profile(run, capsys) -> None:
    run("run.profile=2", "optim.max_steps=20", "run.eval_every=20", "run.save_every=20")
    assert "per step, mean of 2 profiled steps" in capsys.readouterr().out
    assert {"table.txt", "trace.json"} == {p.name for p in (run.out_dir / "profile").iterdir()}


def test_a_run_too_short_to_profile_is_reported(run, capsys) -> None:
    run("run.profile=2")
    assert "no profile (run.profile): too few steps left" in capsys.readouterr().out


def test_the_profiler_stops_when_the_run_is_interrupted(tmp_path) -> None:
    profiler = StepProfiler(tmp_path / "profile", 3, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt), profiler:
        for _ in range(SKIPPED + 2):
            profiler.step()
        raise KeyboardInterrupt
    profiled(tmp_path / "again", 1, lambda: torch.ones(2) + 1)  # PyTorch refuses a second profiler


def test_a_negative_number_of_steps_is_refused(run) -> None:
    with pytest.raises(ValueError, match="run.profile=-1 must be a number of steps"):
        run("run.profile=-1")


@pytest.mark.gpu
def test_gpu_kernels_are_grouped_by_part(tmp_path) -> None:
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    profiled(tmp_path / "profile", 3, lambda: x @ x, "cuda")
    table = rows(tmp_path / "profile")
    assert table["matrix products"][1] == 1
    whole = table.pop("the whole step")[0]
    assert sum(ms for ms, _ in table.values()) == pytest.approx(whole, rel=0.05, abs=0.05)


NORM, OPTIMIZER = "residuals and normalisation", "optimizer and clipping"


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("product_kernel", "matrix products"),
        ("attn_bwd_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("cross_entropy_kernel", "loss"),
        ("triton_red_fused__log_softmax__to_copy_masked_fill_19", "loss"),
        ("bias_gelu_bwd_kernel", "MLP: bias and GELU"),
        ("triton_poi_fused_gelu_gelu_backward_view_6", "MLP: bias and GELU"),
        # torch.compile also names those of our operators whose results it reads
        ("triton_poi_fused_gelu_mlp_bwd_native_layer_norm_backward_3", NORM),
        ("triton_per_fused_linear_cross_entropy_grad_native_layer_norm_7", NORM),
        ("void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>", OPTIMIZER),
        ("triton_red_fused__fused_rms_norm_add_4", NORM),
        ("momentum_kernel", OPTIMIZER),
        ("apply_kernel", OPTIMIZER),
        ("triton_poi_fused__to_copy_6", REST),
    ],
)
def test_part_of_kernel_names(kernel, part):
    assert part_of(kernel) == part


def test_times_and_launches_are_per_step():
    kernels = [("attn_fwd_kernel", 6.0, 24), ("attn_bwd_kernel", 9.0, 24), ("memset", 1.0, 2)]
    assert sum_by_part(kernels, steps=2) == {"attention": (7.5, 24), REST: (0.5, 1)}


def test_events_exclude_warmup_and_whole_steps():
    x = torch.randn(8, 8)
    sizes = iter([4, 4, 8, 8, 8])

    def step():
        n = next(sizes)
        return x[:n, :n] @ x[:n, :n] if n == 8 else x[:n].exp()

    events = profile_events(step, ProfilerActivity.CPU, steps=3, warmup=2)
    counts = {name: count for name, _, count in events}
    assert counts["aten::mm"] == 3
    assert "aten::exp" not in counts
    assert not any(key.startswith("ProfilerStep") for key in counts)


@pytest.mark.gpu
def test_a_matmul_is_timed_as_a_matmul():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    parts = time_by_part(lambda: x @ x, step_ms=1000.0)
    assert parts["matrix products"].launches == 1
    assert 0.05 < parts["matrix products"].ms < 5
    assert parts[IDLE].ms == pytest.approx(1000 - parts["matrix products"].ms, abs=0.1)


CPU = torch.device("cpu")
COMPILING = 1000.0


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=50.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr("training.profiling.time", clock)
    return clock


def steps(watch, clock, *seconds, tokens=60):
    for each in seconds:
        clock.now += each
        watch.count(tokens)


def seconds(watch):
    return watch.gpu_hours * 3600


def test_the_first_step_counts_like_later_steps(clock):
    watch = Stopwatch(CPU)
    steps(watch, clock, COMPILING, 2.0, 4.0)
    with watch.paused():
        assert watch.tokens_per_s() == 120 / 6
        assert seconds(watch) == pytest.approx(3 * 3.0)
    steps(watch, clock, 5.0)
    with watch.paused():
        assert watch.tokens_per_s() == 60 / 5
        assert seconds(watch) == pytest.approx(9.0 + 5.0)


def test_recompiling_steps_count_like_later_steps(clock):
    watch = Stopwatch(CPU)
    steps(watch, clock, COMPILING, 2.0, 4.0)
    watch.expect_compilation()
    steps(watch, clock, COMPILING, 7.0)
    with watch.paused():
        assert watch.tokens_per_s() == 180 / 13
        assert seconds(watch) == pytest.approx(3 * 3.0 + 2 * 7.0)


def test_stages_of_one_step_are_counted(clock):
    watch = Stopwatch(CPU)
    steps(watch, clock, COMPILING)
    for _ in range(2):
        watch.expect_compilation()
        steps(watch, clock, COMPILING)
    steps(watch, clock, 5.0)
    with watch.paused():
        assert seconds(watch) == pytest.approx(4 * 5.0)


def test_the_first_step_is_counted_after_the_second(clock):
    watch = Stopwatch(CPU)
    steps(watch, clock, COMPILING)
    for _ in range(2):
        clock.now += 7.0
        with watch.paused():
            assert watch.tokens_per_s() is None
            assert watch.gpu_hours == 0.0
    steps(watch, clock, 2.0)
    with watch.paused():
        assert watch.tokens_per_s() == 60 / 2
        assert seconds(watch) == pytest.approx(2 * 2.0)


def test_pauses_are_excluded_and_lose_no_step(clock):
    watch = Stopwatch(CPU)
    steps(watch, clock, COMPILING, 1.0)
    for _ in range(3):  # two evaluations between two readings of the speed
        steps(watch, clock, 2.0)
        with watch.paused():
            clock.now += 100.0
        with watch.paused():
            clock.now += 100.0
    steps(watch, clock, 3.0)
    with watch.paused():
        assert seconds(watch) == pytest.approx(1.5 + 1.0 + 3 * 2.0 + 3.0)
        assert watch.tokens_per_s() == pytest.approx(5 * 60 / 10)


def test_time_after_the_last_step_is_not_counted(clock):
    watch = Stopwatch(CPU, gpu_hours=0.1)
    clock.now += 9.0
    with watch.paused():
        assert watch.gpu_hours == 0.1


@pytest.mark.parametrize("n_processes", [1, 2, 8])
def test_processes_multiply_the_hours_and_not_the_speed(clock, n_processes):
    watch = Stopwatch(CPU, n_processes=n_processes, gpu_hours=5.0)
    steps(watch, clock, COMPILING, 3600.0)
    with watch.paused():
        assert watch.gpu_hours == pytest.approx(5.0 + 2 * n_processes)
        assert watch.tokens_per_s() == 60 / 3600


def test_gpu_hours_never_decrease(clock):
    watch, before = Stopwatch(CPU), 0.0
    for pause in range(20):
        steps(watch, clock, *[0.5] * (pause % 3))
        with watch.paused():
            assert watch.gpu_hours >= before
            before = watch.gpu_hours
    assert seconds(watch) == pytest.approx(0.5 * sum(pause % 3 for pause in range(20)))
