"""Runs of several processes that shard the model, against one process."""

import os
import socket
import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.training_runs import in_processes, in_two_processes, losses
from training.metrics import read_metrics

SAME = ("model.dropout=0.0", "optim.schedule=constant")
FSDP, MUON = "parallel.mode=fsdp", "optim.name=muon"
ACCUMULATED = ("optim.micro_batch_size=1",)
# CUDA graph replays start after the first twelve steps
CAPTURED = ["run.device=cuda", "run.compile=true", "optim.max_steps=20", "optim.lr=1e-3"]
BY_RING = ["model.context_length=4096", "optim.batch_tokens=8192", "optim.micro_batch_size=1"]
BUTTERFLY_OF_64 = ["model.mask.pattern=butterfly", "model.mask.block_size=64"]
CONTEXT = "parallel.context=2"
BUTTERFLY = ("model.mask.pattern=butterfly", "model.mask.block_size=16", "model.context_length=128")


def assert_same_losses(one, other):
    expected, actual = losses(one), losses(other)
    assert actual.keys() == expected.keys()
    for step, loss in expected.items():
        torch.testing.assert_close(actual[step], loss, rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(
            ["parallel.reshard=false", "model.norm=rms_norm", "model.mlp=swiglu"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["model.tie_embeddings=false", "model.head_size=24", "model.n_inner=50"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["run.dtype=bfloat16", "parallel.gather_dtype=float32"], marks=pytest.mark.slow
        ),
        pytest.param(
            [MUON, "parallel.reshard=false", "run.activation_checkpointing=full", *ACCUMULATED],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [MUON, "run.dtype=bfloat16", "parallel.gather_dtype=float32", "model.norm=rms_norm"],
            marks=pytest.mark.slow,
        ),
        pytest.param(CAPTURED, marks=pytest.mark.gpu(2)),
        pytest.param([MUON, *CAPTURED], marks=pytest.mark.gpu(2)),
    ],
    ids=["plain", "modern", "untied", "bfloat16", "muon", "muon-bfloat16", "gpu", "gpu-muon"],
)
def test_fsdp_gives_the_losses_of_one_process(run, tmp_path, options):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = [option for option in options if not option.startswith("parallel")]
    run(*SAME, *alone, f"run.out_dir={one}")
    in_two_processes(run, *SAME, FSDP, *options, f"run.out_dir={two}")
    assert_same_losses(one, two)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    # NorMuon leaves half of the parameters to AdamW.
    [pytest.param([], marks=pytest.mark.slow), ["optim.name=normuon"]],
    ids=["adamw", "normuon"],
)
def test_resumes_across_one_process_ddp_and_fsdp(run, tmp_path, options):
    same = (*SAME, "optim.batch_tokens=192", "optim.micro_batch_size=1", *options)
    run(*same, f"run.out_dir={tmp_path / 'one'}")
    two, three = partial(in_processes, 2, run), partial(in_processes, 3, run)
    for last, train, mode in (
        (3, run, []),
        (5, two, []),
        (6, two, [FSDP]),
        (7, three, [FSDP]),  # uneven shards of 32 rows
        (8, run, [FSDP]),
    ):
        train(*same, *mode, "run.save_every=1", f"optim.max_steps={last}")
    assert_same_losses(tmp_path / "one", run.out_dir)


@pytest.mark.distributed
@pytest.mark.slow
def test_fsdp_starts_with_the_weights_of_another_run(run, tmp_path):
    run(*SAME, f"run.out_dir={tmp_path / 'first'}")
    later = (*SAME, "optim.lr=1e-4", f"run.init_from={tmp_path / 'first'}")
    run(*later, f"run.out_dir={tmp_path / 'one'}")
    in_two_processes(run, *later, FSDP, f"run.out_dir={tmp_path / 'two'}")
    torch.testing.assert_close(
        losses(tmp_path / "two")[1], losses(tmp_path / "one")[1], rtol=1e-4, atol=1e-5
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("n", "options"),
    [
        pytest.param(2, [], marks=pytest.mark.slow),
        (2, ["data.document_mask=true", "model.positions=rotary", "model.n_kv_head=1"]),
        (2, [*BUTTERFLY, "data.document_mask=true"]),
        pytest.param(
            2, ["model.window_size=5", "model.full_every=2", FSDP], marks=pytest.mark.slow
        ),
        (4, ["data.document_mask=true", FSDP]),
        pytest.param(4, ["parallel.context=4"], marks=pytest.mark.slow),
        pytest.param(
            2,
            [*CAPTURED, "model.context_length=128", FSDP],
            marks=pytest.mark.gpu(2),
        ),
        pytest.param(2, [*CAPTURED, *BUTTERFLY], marks=pytest.mark.gpu(2)),
        pytest.param(2, [*CAPTURED, *BY_RING, *BUTTERFLY_OF_64], marks=pytest.mark.gpu(2)),
    ],
    ids=[
        "plain",
        "documents",
        "butterfly",
        "window",
        "mesh",
        "four",
        "gpu-fsdp",
        "gpu-butterfly",
        "gpu-ring",
    ],
)
def test_context_parallel_gives_the_losses_of_one_process(run, tmp_path, n, options):
    one, other = tmp_path / "one", tmp_path / "other"
    alone = [option for option in options if not option.startswith("parallel")]
    result = run(*SAME, *alone, f"run.out_dir={one}")
    in_processes(n, run, *SAME, CONTEXT, *options, f"run.out_dir={other}")
    assert_same_losses(one, other)
    (*_, last) = (r for r in read_metrics(other) if "val_loss" in r)
    assert last["val_loss"] == pytest.approx(result["val_loss"], rel=1e-4)
    assert last["val_tokens"] == result["val_tokens"]


@pytest.mark.distributed
@pytest.mark.slow
def test_two_machines_find_each_other(run, tmp_path):
    """Start two launchers with a shared disk, as docs/scale.md describes."""
    run(*SAME, f"run.out_dir={tmp_path / 'one'}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"),
        *("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=7"),
        *("train.py", str(run.config), *SAME, CONTEXT, FSDP),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    machines = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for machine in machines:
        _, said = machine.communicate(timeout=300)
        assert machine.returncode == 0, said
    assert_same_losses(tmp_path / "one", run.out_dir)


def test_context_parallel_needs_several_processes(run):
    with pytest.raises(ValueError, match="context=2 must divide the number of processes, 1"):
        run(CONTEXT)
