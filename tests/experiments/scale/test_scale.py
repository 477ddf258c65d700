"""Steps on several GPUs: which are measured, what they are compared with, what they foretell."""

import pytest

from experiments.scale.cases import DOCUMENT, FILLED, PARTS, Case, cases
from experiments.scale.model import Growth, fit, pairs
from experiments.scale.report import (
    context_table,
    ddp_table,
    draw,
    foretold_table,
    fsdp_table,
    large_table,
    long_table,
    longest_table,
)
from experiments.scale.same_losses import WAYS, compare
from model.config import MaskConfig, ModelConfig
from training.language.memory import GIB, estimate

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
        "peak_gib": case.told_gib / 1.1,
    }


def test_each_case_divides_its_batch_and_has_a_name_of_its_own():
    found = [*cases(tuple(PARTS), CARD)]
    assert len({case.name for case in found}) == len(found)
    for case in found:
        assert case.config.grad_accum_steps(case.n_gpus) in (1, 8)


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
    assert "| fsdp, float32 | 54,613 | 100.0% | 20.9 GiB | 23.0 GiB, +10% |" in fsdp_table(rows)
    assert "| 7B | 4,096 | full | 13,653 | 40.0% / 50.0% |" in large_table(rows)
    assert "| 65,536 | butterfly | 59,578 | 54,613 | 0.92 |" in context_table(rows)
    assert long_table(rows).count("| 1,048,576 |") == 2
    assert longest_table(rows).count("GiB, +10%") == 2


def growing(case: Case) -> float:
    """Seconds of a step that grows as the model says, without waiting."""
    model, length = case.config.model, case.config.model.context_length
    return (1.6e-6 * length + 2e-10 * pairs(model, length)) / case.n_gpus


def test_the_model_of_one_gpu_foretells_two():
    rows = [row_of(case, growing(case)) for case in cases(["long"], CARD)]
    lines = foretold_table({"rows": rows}).splitlines()[2:]
    gaps = [float(line.split("|")[-2].strip().rstrip("%")) for line in lines]
    assert len(gaps) == 3  # dense
    assert all(-0.1 < gap < 30 for gap in gaps)  # waiting alone is added
    figure = draw({"rows": rows})
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "log"]


def test_a_fit_goes_through_its_points_and_more_gpus_take_less():
    model = ModelConfig(positions="rotary")
    growth = fit(model, [(65_536, 1.0), (262_144, 9.0)])
    assert growth.seconds(65_536, 1) == pytest.approx(1.0)
    assert growth.seconds(262_144, 1) == pytest.approx(9.0)
    times = [growth.seconds(2**22, n) for n in (1, 2, 8, 64, 512)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("slow", [3.9, 17.0])
def test_steps_that_do_not_tell_attention_from_the_rest_are_refused(slow):
    model = ModelConfig(positions="rotary")
    with pytest.raises(ValueError, match="further apart"):
        fit(model, [(65_536, 1.0), (262_144, slow)])


def test_a_slow_link_is_waited_for(monkeypatch):
    growth = Growth(ModelConfig(positions="rotary"), per_token=1e-6, per_pair=1e-12)
    fast = growth.seconds(262_144, 2)
    monkeypatch.setattr("experiments.scale.model.NVLINK", 1e9)
    assert growth.seconds(262_144, 2) > 2 * fast


def test_butterflies_too_large_to_count_grow_as_before(monkeypatch):
    model = ModelConfig(mask=MaskConfig(pattern="butterfly"))
    counted = pairs(model, 2**17)
    monkeypatch.setattr("experiments.scale.model.COUNTED", 2**15)
    assert pairs(model, 2**17) == pytest.approx(counted, rel=0.02)


def test_losses_are_held_to_one_gpu_under_the_same_mask():
    losses = {way: [3.0, 2.0] for way in WAYS}
    losses["ddp"] = [3.0, 2.25]
    losses["one GPU, butterfly"] = losses["context, butterfly"] = [4.0, 1.0]
    gaps = {row["way"]: (row["mean"], row["most"]) for row in compare(losses)}
    assert gaps.pop("ddp") == (0.125, 0.25)
    assert set(gaps) == {*WAYS} - {"one GPU", "one GPU, butterfly", "ddp"}
    assert set(gaps.values()) == {(0.0, 0.0)}
