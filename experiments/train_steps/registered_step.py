"""Speed of a training step of models that know nothing of Papilio, by backend of PyTorch's SDPA.

python -m experiments.train_steps.registered_step

Two models in bfloat16 take steps of 16,384 tokens: one in the shape of TinyLlama (1.1B, grouped
heads, causal) from transformers with attn_implementation="sdpa", and 12 of PyTorch's own
nn.TransformerEncoderLayer (152M, not causal). Each runs on PyTorch's choice of backend, on cuDNN,
on PyTorch's flash attention, and after `papilio.register_with_torch()`. From the same weights, the
losses of 20 steps on the same batch are compared; the command fails if Papilio's differ from those
of PyTorch's choice by more than cuDNN's and PyTorch's flash attention do, or a tolerance.
"""

from experiments.harness import Command, measure_rows

MODELS = ("llama", "encoder")

command = Command(__name__, on_gpu=True)
command.add("--models", nargs="+", choices=MODELS, default=MODELS)
command.add("--layers", type=int, default=22, help="layers of the Llama (default: 22)")
command.add("--rounds", type=int, default=5, help="timings of each backend")
command.read(out="docs/results/registered_step.json")

import gc
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.attention.peers import registered
from experiments.timing import in_turns, spread, wall_seconds
from experiments.train_steps.transformers_step import SHAPE, Case, inputs_of, make_model

LOSS_STEPS = 20
LOSS_TOLERANCE = 2e-2  # nats
STEPS = 4  # in a timing
N_CLASSES = 1_000


class Model(NamedTuple):
    """Model, and its loss on a fixed batch."""

    title: str
    module: nn.Module
    loss: Callable[[], Tensor]
    tokens: int


def llama(n_layer: int, shape: dict[str, Any] = SHAPE, length: int = 4_096) -> Model:
    """Transformers' Llama on the tokens of a step."""
    case = Case("", length)
    module, inputs = make_model(case, n_layer, shape), inputs_of(case, shape["vocab_size"])
    module.set_attn_implementation("sdpa")
    n_tokens = inputs["input_ids"].numel()
    title = f"TinyLlama (transformers), {length:,} tokens, causal"
    return Model(title, module, lambda: module(**inputs, use_cache=False).loss, n_tokens)


def encoder(n_layer: int = 12, width: int = 1024, length: int = 2_048, rows: int = 8) -> Model:
    """PyTorch's encoder layers, which classify each token."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
        norm_first=True,
    )  # fmt: skip
    stack = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
    module = nn.Sequential(stack, nn.Linear(width, N_CLASSES)).to(device, torch.bfloat16)
    x = torch.randn(rows, length, width).to(device)
    target = torch.randint(N_CLASSES, (rows * length,)).to(device)

    def loss() -> Tensor:
        logits = module(x.to(module[1].weight.dtype))  # pyright: ignore
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target)

    return Model(f"nn.TransformerEncoderLayer, {length:,} tokens", module, loss, rows * length)


BACKENDS: dict[str, Callable[[], AbstractContextManager]] = {
    "PyTorch's choice": nullcontext,
    "cuDNN": partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION),
    "PyTorch's flash": partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
    "Papilio, registered": registered,
}
CHOICE, *_, PAPILIO = BACKENDS


class _Operators(TorchDispatchMode):
    """Names of attention operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if "attention" in name:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def operator_of(model: Model) -> str:
    """Operator in which the attention of a model ends."""
    with torch.no_grad(), _Operators() as operators:
        model.loss()
    return ", ".join(sorted(operators.names))


def benchmark(make: Callable[[], Model], rounds: int) -> Iterator[list[Row]]:
    """Yield the rows of one model, one for each backend."""
    model = make()
    start = {name: x.detach().clone() for name, x in model.module.state_dict().items()}
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-5, fused=True)

    def step() -> Tensor:
        loss = model.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def step_on(backend: Callable[[], AbstractContextManager]) -> None:
        with backend():
            step()

    rows, losses = {}, {}
    for name, backend in BACKENDS.items():
        model.module.load_state_dict(start)
        optimizer.state.clear()
        gc.collect()
        torch.cuda.empty_cache()
        with backend():
            operator = operator_of(model)
            torch.cuda.reset_peak_memory_stats()
            losses[name] = [step().item() for _ in range(LOSS_STEPS)]
        gap = max(abs(x - y) for x, y in zip(losses[name], losses[CHOICE], strict=True))
        rows[name] = {
            "model": model.title, "backend": name, "operator": operator,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "tokens": model.tokens,
            "losses": losses[name], "loss_gap": gap,
        }  # fmt: skip
        print(f"{model.title:50} {name:20} {operator} gap {gap:.2g}", flush=True)
    check_losses({name: row["loss_gap"] for name, row in rows.items()}, model.title)
    steps = {name: partial(step_on, backend) for name, backend in BACKENDS.items()}
    times = in_turns(steps, rounds, lambda step: wall_seconds(step, STEPS))
    yield [row | spread("step_s", times[name]) for name, row in rows.items()]


def check_losses(gaps: dict[str, float], title: str) -> None:
    """Check the largest difference of a loss from that of PyTorch's choice, by backend.

    Raises:
        SystemExit: Papilio's exceeds those of the other backends and the tolerance, or is NaN.
    """
    limit = max(LOSS_TOLERANCE, *(gap for name, gap in gaps.items() if name != PAPILIO))
    if not gaps[PAPILIO] <= limit:
        raise SystemExit(
            f"{title}: losses differ from those of PyTorch's choice by {gaps[PAPILIO]:.2g} nats "
            f"(at most {limit:.2g}): no speed is reported"
        )


def registered_table(result: Row) -> str:
    """Markdown table of speed and losses by backend."""
    choice = {r["model"]: r["step_s"] for r in result["rows"] if r["backend"] == CHOICE}
    return dict_table(
        {
            "model": row["model"],
            "backend": row["backend"],
            "operator": f"`{row['operator']}`",
            "tokens/s": f"{row['tokens'] / row['step_s']:,.0f}",
            "x choice": f"{choice[row['model']] / row['step_s']:.3f}",
            "peak memory": f"{row['peak_gib']:.1f} GiB",
            "loss differs by": f"{row['loss_gap']:.1g} nats",
        }
        for row in result["rows"]
    )


@command.main
def main(args: Namespace) -> None:
    """Measure each model in its own stage."""
    import transformers

    makers = {"llama": partial(llama, args.layers), "encoder": encoder}
    stages = [partial(benchmark, makers[name], args.rounds) for name in args.models]
    version = transformers.__version__
    measure_rows(args, stages, registered_table, transformers=version)
