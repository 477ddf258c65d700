"""Time, memory and error of a language model's head, from states to loss and gradients.

python -m experiments.train_steps.head [--tokens 32768]

GPT-2's head on states in bfloat16 and weights in float32, as a training step has them; forward and
backward. Ours stands beside PyTorch's linear layer and cross-entropy under torch.compile, and
beside liger-kernel and cut-cross-entropy where they are installed. Errors are those of each
gradient, |x - exact| / |exact|, against products in float32.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import command_parser, errors_as_sentences, read_first


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    add("--width", type=int, default=768, help="of a state")
    add("--out", type=Path, default=Path("docs/results/head.json"))
    return parser.parse_args(argv)


import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from evaluation.results import Row
from experiments.reports import table
from experiments.results import collect_rows
from kernels.fused.cross_entropy import linear_cross_entropy
from kernels.testing import relative_error

VOCAB, ROWS = 50_257, 50_304  # GPT-2's entries, padded as its table is

Loss = Callable[..., Tensor]  # of states (N, C), weights (V, C) and targets (N,)


def pytorch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss by way of all logits."""
    logits = F.linear(hidden, weight.to(hidden.dtype)).float()
    return F.cross_entropy(logits, targets)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """That of liger-kernel."""
    import liger_kernel.transformers.functional as theirs  # pyright: ignore[reportMissingImports]

    return theirs.liger_fused_linear_cross_entropy(hidden, weight.to(hidden.dtype), targets)


def cut(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """That of cut-cross-entropy, which leaves out gradients that round to nothing in bfloat16."""
    import cut_cross_entropy  # pyright: ignore[reportMissingImports]

    return cut_cross_entropy.linear_cross_entropy(hidden, weight.to(hidden.dtype), targets)


def contenders() -> dict[str, Loss]:
    """By name; ours first, then PyTorch's and those packages that are installed."""
    found: dict[str, Loss] = {
        "ours": linear_cross_entropy,
        "PyTorch, compiled": torch.compile(pytorch),
    }
    for name, package, loss in (
        ("liger-kernel", "liger_kernel", liger),
        ("cut-cross-entropy", "cut_cross_entropy", cut),
    ):
        if importlib.util.find_spec(package) is not None:
            found[name] = loss
    return found


def measure(n_tokens: int, width: int) -> Iterator[list[Row]]:
    """A row for each contender."""
    from triton.testing import do_bench

    generator = torch.Generator(device="cuda").manual_seed(0)
    states = torch.randn(n_tokens, width, generator=generator, device="cuda")
    weight = 0.02 * torch.randn(ROWS, width, generator=generator, device="cuda")
    targets = torch.randint(VOCAB, (n_tokens,), generator=generator, device="cuda")
    hidden = states.bfloat16()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def gradients(loss: Loss, states: Tensor) -> list[Tensor]:
        inputs = [states.detach().requires_grad_(), weight.detach().requires_grad_()]
        return [*torch.autograd.grad(loss(*inputs, targets), inputs)]

    exact = gradients(partial(linear_cross_entropy, impl="reference"), hidden.float())
    for name, loss in contenders().items():
        if name == "PyTorch, compiled":
            torch._dynamo.reset()

        def step(loss: Loss = loss) -> None:
            torch.autograd.grad(loss(hidden, weight, targets), leaves)

        found = gradients(loss, hidden)
        errors = {
            key: relative_error(x, y)
            for key, x, y in zip(("dhidden", "dweight"), found, exact, strict=True)
        }
        del found
        step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
        ms = do_bench(step, warmup=200, rep=1000, return_mode="median")
        yield [{"tokens": n_tokens, "name": name, "ms": ms, "peak_gib": peak / 2**30, **errors}]


def head_table(result: Row) -> str:
    """Time, memory and errors, in Markdown."""
    return table(
        {
            "tokens": f"{row['tokens']:,}",
            "head": row["name"],
            "ms": f"{row['ms']:.2f}",
            "memory": f"{row['peak_gib']:.2f} GiB",
            "error of dhidden": f"{row['dhidden']:.1e}",
            "of dweight": f"{row['dweight']:.1e}",
        }
        for row in result["rows"]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    if not torch.cuda.is_available():
        raise SystemExit("the head is measured on a GPU, and PyTorch sees none")
    torch.set_float32_matmul_precision("highest")
    rows = collect_rows(args.out, [partial(measure, n, args.width) for n in args.tokens])
    print(head_table({"rows": rows}))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    with errors_as_sentences():
        main()
