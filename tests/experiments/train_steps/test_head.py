"""The head's contenders give one loss; its command writes rows and a table."""

import json

import torch

from experiments.train_steps import head
from kernels.fused.cross_entropy import linear_cross_entropy


def test_pytorchs_loss_is_ours():
    hidden, weight = torch.randn(5, 8), torch.randn(11, 8)
    targets = torch.randint(11, (5,))
    expected = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(head.pytorch(hidden, weight, targets), expected)


def test_only_what_is_installed_is_measured(monkeypatch):
    for installed, names in ((None, []), ("somewhere", ["liger-kernel", "cut-cross-entropy"])):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=installed: found)
        assert [*head.contenders()] == ["ours", "PyTorch, compiled", *names]


def test_rows_and_table(tmp_path, monkeypatch, capsys):
    def measure(n_tokens, width):
        errors = {"dhidden": 2.3e-3, "dweight": 3.5e-5}
        yield [{"tokens": n_tokens, "name": "ours", "ms": width / 100, "peak_gib": 0.76, **errors}]

    monkeypatch.setattr(head, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    out = tmp_path / "head.json"
    head.main(["--tokens", "8192", "32768", "--out", str(out)])
    assert [row["tokens"] for row in json.loads(out.read_text())["rows"]] == [8192, 32768]
    assert "| 32,768 | ours | 7.68 | 0.76 GiB | 2.3e-03 | 3.5e-05 |" in capsys.readouterr().out
