"""The machines of a result are those of its runs, or of the measurement."""

from experiments.provenance import provenance_table

HERE = {"device": "H100", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "2026-01-01"}


def test_a_measurement_names_its_own_machine():
    (line,) = provenance_table(speed={"environment": HERE, "rows": []}).splitlines()[2:]
    assert "| H100 | 2.11 | 3.6 | abc | 2026-01-01 |  |  |" in line


def test_trained_runs_tell_theirs_and_add_up():
    other = HERE | {"device": "H200", "commit": "def"}
    runs = [
        {"starts": [other, HERE], "minutes": 12.0},
        {"starts": [other], "minutes": None, "gpu_hours": 0.5},
        {"starts": [], "gpu_hours": 0.25},
        {"starts": [], "seconds": 90.0},
        {"starts": [], "gpu_hours": 0.25, "jobs_per_gpu": 3},  # a third of the GPU
    ]
    environment = HERE | {"device": "x86_64"}
    (line,) = provenance_table(runs={"environment": environment, "runs": runs}).splitlines()[2:]
    assert "| H100, H200 | 2.11 | 3.6 | abc, def | 2026-01-01 | 5 | 64 |" in line
    (line,) = provenance_table(report={"environment": environment}).splitlines()[2:]
    assert "| a CPU |" in line
