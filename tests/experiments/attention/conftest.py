"""A made-up GPU for the tests of the attention bench."""

from functools import partial

import pytest
import torch

from experiments.attention import __main__ as benchmark_attention
from experiments.attention import hbm_bytes
from experiments.attention.check import RESULTS


def made_up_rows(case, names, runs=0, rounds=0):
    """Rows as measure_case makes them: a peer is wrong at 4,096 tokens, another out of memory.

    With `runs`, deterministic peers repeat, and one of them refuses block-sparse masks.
    """
    rows = []
    for number, name in enumerate(names, start=2):
        row = {"name": name, **case.describe(), "errors": dict.fromkeys(RESULTS, 1e-3)}
        row["status"] = "ok"
        if name in ("SDPA math", "standard") and case.seq_len >= 16_384:
            row["status"] = "out of memory"
        elif name == "flash-attn-4, deterministic" and case.sparsity is not None:
            row["status"] = "not supported: no deterministic backward"
        elif name == "SDPA flash" and case.seq_len == 4096:
            row["status"] = "wrong: error 1.2e-01 of dk (allowed 1.3e-02)"
        else:
            for part, flops in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
                ms = number * flops * case.forward_flops / 1e12
                row |= {f"{part}_ms": ms, f"{part}_tflops": 1000 / number}
                if rounds > 0:
                    # ours is up to a tenth slower from round to round, the others are not
                    drift = [1.0 + 0.01 * n * (name == "ours") for n in range(rounds)]
                    row[f"{part}_round_ms"] = [ms * x for x in drift]
            row["peak_mib"] = 100.0
            row["both_eager_ms"] = row["both_ms"] + 1.0
            if runs > 0:
                row["repeats"] = name == "ours" or name.endswith("deterministic")
        rows.append(row)
    return rows


@pytest.fixture
def made_up(monkeypatch):
    """A GPU that answers at once."""
    monkeypatch.setattr(benchmark_attention, "measure_case", made_up_rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")
    monkeypatch.setattr(hbm_bytes, "with_bytes", partial(hbm_bytes.with_bytes, device="cpu"))
