"""Compilation, activation checkpointing and weight sharding of a model."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config as partitioner
from torch import nn

from data.text.config import DataConfig
from model.config import ModelConfig
from model.gpt import GPT
from tests.kernels.context import processes as helpers
from training.config import ParallelConfig, RunConfig
from training.distributed import Processes
from training.language.config import OptimConfig, TrainConfig
from training.parallel import (
    _SOURCES,
    _source_hash,
    can_capture,
    compile_and_wrap,
    key_caches_by_source,
    shard_model,
)

ALONE = Processes(rank=0, world_size=1, device=torch.device("cpu"))
CONTEXT = 48
SHAPE: dict[str, Any] = {
    "n_layer": 3,
    "n_head": 2,
    "n_embd": 32,
    "vocab_size": 61,
    "context_length": CONTEXT,
}


def test_activation_memory_reaches_torch_compile():
    with partitioner.patch(activation_memory_budget=1.0):
        for share in (0.9, 1.0):
            run = RunConfig(out_dir="x", activation_memory=share)
            compile_and_wrap(nn.Linear(2, 2), run, ALONE, n_shapes=1)
            assert partitioner.activation_memory_budget == share


def test_caches_of_compiled_code_depend_on_the_sources(tmp_path):
    (tmp_path / "kernels" / "fused").mkdir(parents=True)
    file = tmp_path / "kernels" / "fused" / "norm.py"
    tags = []
    for source in ("dx = dy", "dx = 2 * dy", "dx = dy"):
        file.write_text(source)
        tags.append(_source_hash(tmp_path))
    assert tags[0] == tags[2] != tags[1]
    with torch.compiler.config.patch(cache_key_tag="of the user"):
        for _ in range(2):
            key_caches_by_source()
            assert torch.compiler.config.cache_key_tag == "of the user" + _SOURCES


def test_can_capture():
    gpu = Processes(rank=0, world_size=2, device=torch.device("cuda"))
    run = RunConfig(out_dir="x")
    assert can_capture(run, gpu) and not can_capture(run, ALONE)
    assert not can_capture(replace(run, cuda_graph=False), gpu)
    again = replace(run, activation_checkpointing="full")
    assert can_capture(again, gpu) and not can_capture(replace(again, compile=False), gpu)


def losses_and_gradients(checkpointing: str, *, compiled: bool = False, **config: object):
    """Loss of a tiny GPT, its gradients, and the number of activations saved for the backward."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(**SHAPE, **config))  # pyright: ignore[reportArgumentType]
    run = RunConfig(out_dir="x", activation_checkpointing=checkpointing, compile=compiled)  # pyright: ignore
    fast, _ = compile_and_wrap(model, run, ALONE, n_shapes=1)
    text = torch.randint(61, (2, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    kept = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = fast(text[:, :-1], text[:, 1:])
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    activations = {x.untyped_storage().data_ptr(): x.numel() for x in kept}
    size = sum(n for at, n in activations.items() if at not in weights)
    loss.backward()
    return loss, [p.grad for p in model.parameters()], size


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"attention": "triton"},
        {"attention": "triton", "dropout": 0.2, "attention_dropout": 0.2},
        {"positions": "rotary", "n_kv_head": 1, "mlp": "swiglu", "norm": "rms_norm"},
    ],
    ids=["plain", "triton", "dropout", "modern"],
)
def test_checkpointing_keeps_less_and_changes_no_bit(config):
    plain, grads, size = losses_and_gradients("none", **config)
    sizes = [size]
    for checkpointing in ("selective", "full"):
        loss, others, size = losses_and_gradients(checkpointing, **config)
        assert torch.equal(loss, plain)
        for one, other in zip(grads, others, strict=True):
            assert torch.equal(one, other)
        sizes.append(size)
    assert sizes[0] > sizes[1] >= sizes[2]


@pytest.mark.parametrize(
    ("checkpointing", "n_recomputed"), [("none", 0), ("selective", 0), ("full", 3)]
)
def test_only_full_checkpointing_recomputes_attention(checkpointing, n_recomputed, monkeypatch):
    import kernels.triton.fwd as forward

    calls = []
    launch = forward.attn_fwd
    monkeypatch.setattr(forward, "attn_fwd", lambda *a: calls.append(1) or launch(*a))
    losses_and_gradients(checkpointing, attention="triton")
    assert len(calls) == 3 + n_recomputed


BY_LAYER: dict[str, Any] = {"scale_attn_by_inverse_layer_idx": True}
PARTS = 1 + 3 + 1  # the embedding, three blocks and the loss


@pytest.mark.parametrize(
    ("run", "model", "n_compiled"),
    [
        ({}, {}, PARTS),
        ({}, BY_LAYER, 1),
        ({"activation_checkpointing": "selective"}, BY_LAYER, PARTS),
        ({"activation_memory": 0.5}, {}, 1),
    ],
    ids=["alike", "different", "checkpointing", "memory budget"],
)
def test_number_of_compiled_regions(run, model, n_compiled, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f) or f)
    gpt = GPT(ModelConfig(**SHAPE, **model))  # pyright: ignore[reportArgumentType]
    with partitioner.patch(activation_memory_budget=1.0):
        compile_and_wrap(gpt, RunConfig(out_dir="x", **run), ALONE, n_shapes=1)  # pyright: ignore
    assert len(compiled) == n_compiled


def test_identical_blocks_share_a_graph(monkeypatch):
    graphs = []
    monkeypatch.setattr(
        torch, "compile",
        partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph.forward),
    )  # fmt: skip
    losses_and_gradients("none", compiled=True)
    assert len(graphs) == 4  # the embedding, the first block, all others and the loss


def test_blocks_of_different_scales_also_run_without_gradients(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    tokens = torch.zeros(1, CONTEXT, dtype=torch.int64)
    run = RunConfig(out_dir="x", activation_checkpointing="selective")
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        model, _ = compile_and_wrap(GPT(ModelConfig(**SHAPE, **BY_LAYER)), run, ALONE, n_shapes=1)
        model(tokens, tokens).backward()
        with torch.no_grad():
            model(tokens, tokens)


@pytest.mark.slow
def test_compiled_full_keeps_less_than_selective(monkeypatch):
    partitioned = partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", partitioned)
    # use the autograd.Function of layer norm
    monkeypatch.setattr("kernels.fused.layer_norm.select_impl", lambda *_, **__: "triton")
    # SDPA would also save the state of a random generator
    options = {"compiled": True, "attention": "triton"}
    selective, full = (losses_and_gradients(c, **options)[2] for c in ("selective", "full"))
    assert full < 0.8 * selective


def loss_change_of_scaled_gains(context) -> float:
    """Change of the loss when all norm gains of a model on two processes grow by a thousandth."""
    processes = Processes(rank=context.rank, world_size=2, device=torch.device("cpu"))
    config = TrainConfig(
        model=ModelConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=61, context_length=CONTEXT),
        data=DataConfig(path="x"),
        optim=OptimConfig(max_steps=1, batch_tokens=2 * CONTEXT, micro_batch_size=1),
        run=RunConfig(out_dir="y"),
        parallel=ParallelConfig(mode="fsdp", gather_dtype="bfloat16"),
    )
    torch.manual_seed(0)
    model = GPT(config.model)
    shard_model(model, config, processes)
    text = torch.randint(61, (1, CONTEXT))
    with torch.no_grad():
        before = model(text, text)
        for part in model.modules():
            if isinstance(part, nn.LayerNorm):
                part.weight.mul_(1.001)
        return (model(text, text) - before).item()


@pytest.mark.distributed
def test_fsdp_does_not_round_norm_gains():
    two = helpers.Processes(2)
    one, other = two.call(loss_change_of_scaled_gains)
    two.close()
    assert one == other != 0
