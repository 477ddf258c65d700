"""Each attention's step is checked against PyTorch's before it is timed."""

import json

import pytest
import torch

from experiments.train_steps import transformers_step
from experiments.train_steps.transformers_step import (
    CASES,
    Case,
    differences,
    first_results,
    inputs_of,
    make_model,
)
from kernels.for_transformers import register_with_transformers

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("case", [Case("", 8), Case("", 16, window=5), Case("", 32, n_documents=4)])
def test_ours_passes_the_check(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_step, "TOKENS_A_STEP", 32)
    register_with_transformers()
    model, inputs = make_model(case, 2, SHAPE), inputs_of(case, 31)
    assert inputs["input_ids"].numel() == 32
    found = []
    for attention in ("sdpa", "papilio"):
        model.set_attn_implementation(attention)
        found.append(first_results(model, inputs))
    assert differences(found[1], found[0], "ours")["gradient"] < 0.05
    with pytest.raises(SystemExit, match="wrong: the first loss differs"):
        differences((found[0][0] + 0.1, found[0][1]), found[0], "wrong")
    with pytest.raises(SystemExit, match="no speed is reported"):
        differences((found[0][0], 1.2 * found[0][1]), found[0], "wrong")


def test_documents_fill_a_row() -> None:
    inputs = inputs_of(CASES["packed"], 31)
    positions = inputs["position_ids"]
    assert positions.shape == (1, 16_384)
    assert (positions == 0).sum() == 16
    assert set(positions.diff()[positions.diff() != 1].tolist()) < set(range(-16_384, 1))


def test_sdpa_and_ours_are_always_there() -> None:
    assert transformers_step.attentions()[:2] == ["sdpa", "papilio"]


def test_rows_and_table(tmp_path, monkeypatch, capsys) -> None:
    def benchmark(name, n_layer, n_steps):
        for attention, seconds in (("sdpa", 0.5), ("papilio", 0.25)):
            case = CASES[name].title
            yield [{"case": case, "attention": attention, "step_s": seconds, "peak_gib": 30.04}]
        yield [{"case": case, "attention": "flash_attention_4", "refused": "it cannot"}]

    monkeypatch.setattr(transformers_step, "benchmark", benchmark)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")
    out = tmp_path / "step.json"
    transformers_step.main(["--cases", "4k", "--out", str(out)])
    assert len(json.loads(out.read_text())["rows"]) == 3
    printed = capsys.readouterr().out
    assert "| 4,096, causal | papilio | 65,536 | 2.00 | 30.0 GiB |" in printed
    assert "flash_attention_4    it cannot" in printed and "| flash_attention_4" not in printed
