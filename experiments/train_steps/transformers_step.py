"""Speed and memory of a training step of transformers models, by attention.

python -m experiments.train_steps.transformers_step

A model in the shape of TinyLlama (1.1B, grouped heads) in bfloat16 takes steps of 16,384 random
tokens: forward, backward and fused AdamW. One model in one process runs with each attention in
turn: PyTorch's (sdpa), Papilio's, and each flash-attention version that transformers finds
installed. The command fails if a first loss or gradient differs from that of sdpa.
"""

from typing import NamedTuple

from experiments.harness import Command, measure_rows


class Case(NamedTuple):
    """Context, mask and documents of a step."""

    title: str
    context_length: int
    window: int | None = None  # tokens, as in Mistral
    n_documents: int = 1  # packed into each row, of random lengths


CASES = {
    "4k": Case("4,096, causal", 4_096),
    "16k": Case("16,384, causal", 16_384),
    "window": Case("16,384, window of 1,024", 16_384, window=1_024),
    "packed": Case("16,384, 16 packed documents", 16_384, n_documents=16),
}


command = Command(__name__, on_gpu=True)
command.add("--cases", nargs="+", choices=[*CASES], default=[*CASES])
command.add(
    "--layers", type=int, default=22, help="layers of the model (default: 22, as TinyLlama)"
)
command.add("--steps", type=int, default=5, help="steps per timing, of five")
command.read(out="docs/results/transformers_step.json")

import gc
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.timing import spread, wall_seconds
from kernels.for_transformers import register_with_transformers

TOKENS_A_STEP = 16_384
VOCAB = 32_000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": TOKENS_A_STEP,
}
LOSS_TOLERANCE = 2e-3  # nats
# |x - y| / |y|; both round to bfloat16 before and after attention in all layers
GRADIENT_TOLERANCE = 0.1


def attentions() -> list[str]:
    """Installed attentions; sdpa is first, because the others are checked against it."""
    from transformers import utils

    return ["sdpa", "papilio"] + [
        f"flash_attention_{n}"
        for n in (2, 3, 4)
        if getattr(utils, f"is_flash_attn_{n}_available", lambda: False)()
    ]


def make_model(case: Case, n_layer: int, shape: dict[str, Any]) -> Any:
    """Llama, or Mistral if the case has a window, on the GPU if there is one."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = {**shape, "num_hidden_layers": n_layer}
    model: Any
    if case.window is None:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        model = MistralForCausalLM(MistralConfig(**shape, sliding_window=case.window))
    return model.to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)


def inputs_of(case: Case, vocab: int) -> dict[str, Tensor]:
    """Random tokens and targets of a step, with positions if documents are packed."""
    generator = torch.Generator().manual_seed(0)
    shape = TOKENS_A_STEP // case.context_length, case.context_length
    tokens = torch.randint(vocab, shape, generator=generator)
    inputs = {"input_ids": tokens, "labels": tokens}
    if case.n_documents > 1:
        cuts = torch.randperm(case.context_length - 1, generator=generator)[: case.n_documents - 1]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), (cuts + 1).sort().values])
        position = torch.arange(case.context_length)
        document = torch.searchsorted(starts, position, right=True) - 1
        inputs["position_ids"] = (position - starts[document]).expand(shape)
    return {name: x.to(_device()) for name, x in inputs.items()}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def first_results(model: Any, inputs: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Loss in nats, and gradient of the first layer's query projection."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    loss = model(**inputs, use_cache=False).loss
    (gradient,) = torch.autograd.grad(loss, [weight])
    return loss.item(), gradient.float()


def differences(
    results: tuple[float, Tensor], expected: tuple[float, Tensor], name: str
) -> dict[str, float]:
    """Differences of the loss and of the gradient from those of sdpa.

    Raises:
        SystemExit: a difference exceeds its tolerance.
    """
    loss = abs(results[0] - expected[0])
    gradient = ((results[1] - expected[1]).norm() / expected[1].norm()).item()
    if not (loss <= LOSS_TOLERANCE and gradient <= GRADIENT_TOLERANCE):  # also where it is NaN
        raise SystemExit(
            f"{name}: the first loss differs from sdpa's by {loss:.2g} nats (at most "
            f"{LOSS_TOLERANCE}), and a gradient by {gradient:.2g} of its norm (at most "
            f"{GRADIENT_TOLERANCE}): no speed is reported"
        )
    return {"loss": loss, "gradient": gradient}


def measure(step: Callable[[], None], n_steps: int) -> dict[str, float]:
    """Seconds per step (median and range of five timings), and peak memory in GiB."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = [wall_seconds(step, n_steps) for _ in range(5)]
    return {**spread("step_s", seconds), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def benchmark(name: str, n_layer: int, n_steps: int) -> Iterator[list[Row]]:
    """Yield a row for each attention."""
    case = CASES[name]
    model, inputs = make_model(case, n_layer, SHAPE), inputs_of(case, VOCAB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    expected = None

    def step() -> None:
        model(**inputs, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    start = {name: x.detach().clone() for name, x in model.state_dict().items()}
    for attention in attentions():
        model.set_attn_implementation(attention)
        model.load_state_dict(start)
        try:
            results = first_results(model, inputs)
        except (TypeError, ValueError) as error:
            if attention in ("sdpa", "papilio"):
                raise
            # this version of the peer rejects the call that transformers makes
            reason = " ".join(str(error).split()) or type(error).__name__
            yield [{"case": case.title, "attention": attention, "refused": reason}]
            continue
        expected = expected or results
        gaps = differences(results, expected, f"{case.title}, {attention}")
        gc.collect()
        torch.cuda.empty_cache()
        times = measure(step, n_steps)
        yield [{"case": case.title, "attention": attention, "differences": gaps, **times}]


def step_table(result: Row) -> str:
    """Markdown table of speed and memory by attention."""
    rows = result["rows"]
    timed = [row for row in rows if "step_s" in row]
    sdpa = {row["case"]: row["step_s"] for row in timed if row["attention"] == "sdpa"}
    return dict_table(
        {
            "tokens, mask": row["case"],
            "attention": row["attention"],
            "tokens/s": f"{TOKENS_A_STEP / row['step_s']:,.0f}",
            "x sdpa": f"{sdpa[row['case']] / row['step_s']:.2f}",
            "peak memory": f"{row['peak_gib']:.1f} GiB",
        }
        for row in timed
    )


def print_last(rows: list[Row]) -> None:
    """Print the speed of the last row."""
    row = rows[-1]
    result = row.get("refused") or f"{1000 * row['step_s']:8.1f} ms"
    print(f"{row['case']:30} {row['attention']:20} {result}", flush=True)


@command.main
def main(args: Namespace) -> None:
    """Measure each case in its own stage."""
    import transformers

    register_with_transformers()
    stages = [partial(benchmark, name, args.layers, args.steps) for name in args.cases]
    version = transformers.__version__
    measure_rows(args, stages, step_table, print_last, transformers=version)
