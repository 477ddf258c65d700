"""Steps on several GPUs: the cases, their comparisons, and predictions from one GPU."""

from dataclasses import replace

import pytest

from experiments.scale.cases import DOCUMENT, FILLED, PARTS, Case, cases, cases_on
from experiments.scale.model import BY_NCCL, COPIED, Growth, fit, pairs
from experiments.scale.report import (
    context_table,
    ddp_table,
    draw,
    fsdp_table,
    large_table,
    long_table,
    longest_table,
    muon_table,
    predicted_table,
)
from model.config import ModelConfig
from model.flops import count_params
from model.mask_config import MaskConfig
from training.dry_run import GIB, estimate

CARD = 80 * GIB


@pytest.fixture(autouse=True)
def _count_small_masks(monkeypatch):
    monkeypatch.setattr("experiments.scale.model.COUNTED", 2**17)


def row_of(case: Case, step_s: float) -> dict:
    return {
        **case.row,
        "step_s": step_s,
        "tokens_per_s": case.config.optim.batch_tokens / step_s,
        "mfu": {"causal": 0.4, "full": 0.5},
        "peak_gib": case.estimated_gib / 1.1,
    }


def test_each_case_divides_its_batch_and_has_a_name_of_its_own():
    found = [*cases(tuple(PARTS), CARD)]
    assert len({case.name for case in found}) == len(found)
    for case in found:
        assert case.config.grad_accum_steps(case.n_gpus) in (1, 4, 8)


def test_cases_are_of_one_gpu_or_of_all():
    found = {n: {c.n_gpus for c in cases_on(n, ("ddp", "muon"), [""], CARD)} for n in (1, 2, 4)}
    assert found == {1: {1}, 2: {1, 2}, 4: {1, 4}}
    (case,) = cases_on(4, ["muon"], ["65536", "muon, GPT-2 medium, fsdp, muon, 4, 1024, 131"], CARD)
    assert case.config.grad_accum_steps(4) == 1
    with pytest.raises(
        ValueError, match=r"--parts fsdp --only '' has no case on 4 GPUs: .* on 2\."
    ):
        cases_on(4, ["fsdp"], [""], CARD)


def test_the_longest_fits_by_the_estimate():
    for case in cases(["longest"], CARD):
        needed = estimate(case.config, 1, case.n_gpus).total
        assert 0.95 * FILLED * CARD < needed <= FILLED * CARD
        assert case.document == DOCUMENT


def test_one_and_two_gpus_see_the_same_tokens_where_they_share_sequences():
    for case in cases(["context", "long"], CARD):
        assert case.config.optim.batch_tokens == case.config.model.context_length
        assert case.config.parallel.context == case.n_gpus


def test_tables_compare_what_belongs_together():
    rows = {"rows": [row_of(c, 1.0 + 0.1 * c.n_gpus) for c in cases(tuple(PARTS), CARD)]}
    assert "| 1,024 | 1 | 29,789 | 54,613 | 91.7% |" in ddp_table(rows)
    assert "| 4,096 | 8 |" in ddp_table(rows) and "| 16,384 | 8 |" in ddp_table(rows)
    assert "| fsdp, float32 | 54,613 | 1.000 | 20.9 GiB | 23.0 GiB, +10% |" in fsdp_table(rows)
    slower = [row | {"tokens_per_s": 5e4} if "muon" in row["way"] else row for row in rows["rows"]]
    assert "| 2 | 65,536 | Muon | 50,000 | 0.916 | 20." in muon_table({"rows": slower})
    assert "| 7B | 4,096 | full | 13,653 | 40.0% / 50.0% |" in large_table(rows)
    assert "| 65,536 | butterfly | 59,578 | 54,613 | 0.92x |" in context_table(rows)
    assert long_table(rows).count("| 1,048,576 |") == 2
    assert longest_table(rows).count("GiB, +10%") == 2


def growing(case: Case) -> float:
    """Seconds of a step that grows as the model says, without waiting."""
    model, length = case.config.model, case.config.model.context_length
    return (1.6e-6 * length + 2e-10 * pairs(model, length)) / case.n_gpus


def test_the_model_of_one_gpu_predicts_two():
    rows = [row_of(case, growing(case)) for case in cases(["long"], CARD)]
    lines = predicted_table({"rows": rows}).splitlines()[2:]
    gaps = [float(line.split("|")[-2].strip().rstrip("%")) for line in lines]
    assert len(gaps) == 6
    assert all(-0.1 < gap < 30 for gap in gaps)  # waiting alone is added
    figure = draw({"rows": rows})
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "log"]


DENSE = ModelConfig(positions="rotary")
BUTTERFLY = ModelConfig(positions="rotary", mask=MaskConfig(pattern="butterfly"))
MODELS = {"dense": DENSE, "butterfly": BUTTERFLY}


def test_a_fit_finds_what_a_token_and_a_pair_under_each_mask_cost():
    costs = {"dense": 2e-10, "butterfly": 5e-10}
    measured = [
        (name, length, 1.6e-6 * length + costs[name] * pairs(model, length))
        for name, model in MODELS.items()
        for length in (16_384, 65_536)
    ]
    for name, growth in fit(MODELS, measured).items():
        assert growth.model == MODELS[name]
        assert growth.per_token == pytest.approx(1.6e-6)
        assert growth.per_pair == pytest.approx(costs[name])


def test_more_gpus_take_less():
    growth = Growth(DENSE, per_token=1.7e-6, per_pair=2.5e-10)
    times = [growth.seconds(2**22, n) for n in (1, 2, 8, 64, 512)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    "measured",
    [
        [("dense", 65_536, 1.0), ("dense", 262_144, 3.9)],
        [("dense", 65_536, 1.0), ("dense", 262_144, 17.0)],
        [("dense", 65_536, 1.0)],
        [],
    ],
    ids=["no pair costs", "no token costs", "one length", "nothing"],
)
def test_steps_that_do_not_tell_attention_from_the_rest_are_refused(measured):
    with pytest.raises(ValueError, match="further apart"):
        fit({"dense": DENSE}, measured)


@pytest.mark.parametrize(
    "n_gpus, link",
    [(2, "COPIED"), (8, "COPIED"), (16, "NETWORK")],
)
def test_a_slow_link_is_waited_for(monkeypatch, n_gpus, link):
    growth = Growth(DENSE, per_token=1e-6, per_pair=1e-12)
    fast = growth.seconds(262_144, n_gpus)
    monkeypatch.setattr(f"experiments.scale.model.{link}", 1e9)
    assert growth.seconds(262_144, n_gpus) > 2 * fast


def test_tensors_larger_than_a_receive_buffer_use_nccl(monkeypatch):
    growth = Growth(DENSE, per_token=1e-6, per_pair=1e-12)
    small, large = (growth.seconds(n, 2) for n in (2**19, 2**20))
    monkeypatch.setattr("experiments.scale.model.COPIED", 1e9)
    assert growth.seconds(2**19, 2) > 2 * small
    assert growth.seconds(2**20, 2) == large


def test_sums_of_more_than_two_parts_take_twice_the_bytes():
    """Two GPUs send keys twice and gradients once; four send both three times, in this order."""
    waits_only = Growth(replace(DENSE, n_layer=1), per_token=0.0, per_pair=0.0)
    hop = 2 * 768 * 2 * 2**16 / COPIED
    late = 4 * count_params(waits_only.model) / BY_NCCL
    assert waits_only.seconds(2**17, 2) == pytest.approx(3 * hop + late)
    assert waits_only.seconds(2**18, 4) == pytest.approx((3 + 3 + 3 * 2) * hop + 1.5 * late)


def test_butterflies_too_large_to_count_grow_as_before(monkeypatch):
    model = ModelConfig(mask=MaskConfig(pattern="butterfly"))
    counted = pairs(model, 2**17)
    monkeypatch.setattr("experiments.scale.model.COUNTED", 2**15)
    assert pairs(model, 2**17) == pytest.approx(counted, rel=0.02)
