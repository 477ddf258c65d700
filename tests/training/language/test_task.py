"""Reports of a GPT's training: speed of each step, loss of each validation."""

import math

import pytest
import torch

from training.distributed import Processes
from training.language.config import load_config
from training.language.task import LanguageTask
from training.stop import Stop

CPU = Processes(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture
def task(corpus):
    one_context = "model.context_schedule=[[512,1]]"
    config = load_config(["configs/quickstart.yaml", f"data.path={corpus}", one_context])
    return LanguageTask(config, CPU)


def test_a_perplexity_that_overflows_is_not_reported(task, monkeypatch):
    for loss, expected in ((4.0, math.exp(4)), (700.0, math.exp(700)), (800.0, None)):
        monkeypatch.setattr("training.language.task.evaluate", lambda *_, loss=loss: (loss, 1))
        assert task.validate(task.model, 0, Stop(CPU)).values["val_perplexity"] == expected


def test_unknown_gpu_has_no_mfu(task, monkeypatch):
    assert task.speed(1, {"loss": 4.0}, None).text.endswith("(the first step is not timed)")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU of next year")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**30)
    gpu = Processes(rank=0, world_size=1, device=torch.device("cuda"))
    monkeypatch.setattr(task, "_processes", gpu)
    text, values = task.speed(1, {"loss": 4.0}, 5000.0)
    assert text == "loss 4.0000  5,000 tokens/s  unknown GPU: MFU not reported  3.0 GiB"
    assert (values["mfu_causal"], values["memory_gib"]) == (None, 3.0)
