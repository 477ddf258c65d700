"""Classify long documents with a fine-tuned GPT, by context: Table 5 of the FlashAttention paper.

    python -m experiments.long_documents --text TEXT... --without-opinions out/text.jsonl
    python -m experiments.long_documents --text TEXT... --init RUN

Was the judgment affirmed? Documents are opinions of US courts of appeals, without their disposition
and other sentences with the result (data/text/opinions.py): those of TEXT, JSON lines with `text`
and `source`, whose source is us-appellate-opinions. The first command writes all other documents,
to pretrain RUN on. The second fine-tunes RUN on the first 512 to 16,384 tokens of each document,
from its last state, in folds: each document is scored once per seed, by a model that was trained on
others, of which an eighth chooses the epoch. Positions are extended to the longer context.
Baselines are a bag of words of the same tokens, the number of tokens alone, and "always affirmed".
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command, measure_rows


def check(args: Namespace) -> None:
    """Require exactly one of --init and --without-opinions."""
    if (args.init is None) == (args.without_opinions is None):
        raise ValueError("pass either --init RUN or --without-opinions FILE")
    for name, least in (("lengths", 1), ("seeds", 1), ("folds", 2), ("epochs", 1)):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < least:
            raise ValueError(f"--{name}={value} must be at least {least}")


command = Command(__name__)  # small models can be fine-tuned on a CPU
add = command.add
add("--text", type=Path, nargs="+", required=True, metavar="TEXT", help=".jsonl or .jsonl.xz")
add("--init", type=Path, metavar="RUN", help="folder of the pretrained run")
add("--without-opinions", type=Path, metavar="FILE", help="write all other documents, and stop")
add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16_384])
add("--seeds", type=int, default=3)
add("--folds", type=int, default=5)
add("--epochs", type=int, default=3)
command.read(out="docs/results/long_documents.json", resume=True, check=check)

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from data.files import parse_json, write_atomically
from data.text.opinions import label_opinion
from data.text.readers import open_file
from evaluation.markdown import dict_table
from evaluation.results import Row
from evaluation.runs import open_run
from evaluation.style import COLOURS, PLAIN
from experiments.reports import interval_text, mean_text
from experiments.results import Stage
from experiments.style import OURS
from model.block import INIT_STD
from model.extend import extend_positions
from model.gpt import GPT
from training.config import AdamWConfig
from training.numerics import autocast
from training.optim import learning_rate, make_optimizer, set_learning_rate

SOURCE = "us-appellate-opinions"
ROW = 65_536  # tokens of the documents in one row, at most
BATCH = 16  # documents
VALIDATION = 1 / 8  # share of the training documents, to choose the epoch
LR, WARM_UP = 5e-5, 0.1  # share of the steps
RESAMPLES = 2000
MODEL, WORDS, COUNT = "fine-tuned GPT", "bag of words", "number of tokens"


def read_documents(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines."""
    for path in paths:
        with open_file(path) as (file, _):
            yield from map(parse_json, file)


compiled_hidden = torch.compile(GPT.hidden, dynamic=True)  # one graph for all lengths and models


class GPTClassifier(nn.Module):
    """A GPT with a linear layer on the last state of each document."""

    def __init__(self, source: GPT, length: int) -> None:
        """Copy a trained GPT, with positions for documents of `length` tokens."""
        super().__init__()
        config, weights = source.config, source.state_dict()
        factor = max(1.0, length / config.context_length)
        # A row must not have more tokens than there are learned positions
        longest = max(length, ROW if config.positions == "learned" else config.context_length)
        options: dict[str, Any] = {"context_length": longest, "context_schedule": []}
        options["window_grows"] = False
        if config.positions == "rotary" and factor > 1:
            scaling = "linear" if config.rope_scaling == "none" else config.rope_scaling
            options |= {"rope_scaling": scaling, "rope_factor": factor * config.rope_factor}
        self.gpt = GPT(replace(config, **options))
        if config.positions == "learned":
            # Each document in a row has positions from 0, so later ones are never read
            table = torch.zeros_like(self.gpt.pos_emb.weight)
            table[:length] = extend_positions(weights["pos_emb.weight"], length)
            weights |= {"pos_emb.weight": table}
        self.gpt.load_state_dict(weights)
        self.head = nn.Linear(config.n_embd, 2)
        nn.init.normal_(self.head.weight, std=INIT_STD)
        nn.init.zeros_(self.head.bias)

    def forward(self, documents: Sequence[Tensor]) -> Tensor:
        """Compute logits (n, 2) fp32 of documents, (T,) int64 each, that fit into one row.

        On a GPU compiled, and in bfloat16.
        """
        device = documents[0].device
        lengths = torch.tensor([len(x) for x in documents])  # on the CPU: nothing waits for a GPU
        starts = lengths.cumsum(0) - lengths
        doc_start = starts.repeat_interleave(lengths).int()[None].to(device)
        last = (starts + lengths - 1).to(device)
        on_gpu = device.type == "cuda"
        hidden = compiled_hidden if on_gpu else GPT.hidden
        with autocast("bfloat16" if on_gpu else "float32", device):
            states = hidden(self.gpt, torch.cat(list(documents))[None], doc_start=doc_start)
        return self.head(states[0, last].float())


def rows_of(documents: Sequence[Tensor], order: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of documents, in this order, that fit into a row together."""
    row: list[int] = []
    for index in order:
        if row and sum(len(documents[i]) for i in (*row, index)) > ROW:
            yield row
            row = []
        row.append(index)
    if row:
        yield row


def fine_tune(
    model: GPTClassifier, documents: Sequence[Tensor], labels: Tensor, indices: Sequence[int],
    *, epochs: int, seed: int,
) -> Iterator[None]:  # fmt: skip
    """Train on the documents with these indices, in batches in random order; yield every epoch."""
    generator = torch.Generator().manual_seed(seed)
    n_steps = epochs * -(-len(indices) // BATCH)
    config = AdamWConfig(max_steps=n_steps, lr=LR, warmup_steps=int(WARM_UP * n_steps))
    optimizer = make_optimizer(model, config)
    steps = count()
    for _ in range(epochs):
        model.train()
        shuffled = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
        for first in range(0, len(shuffled), BATCH):
            batch = shuffled[first : first + BATCH]
            set_learning_rate(optimizer, learning_rate(next(steps), config))
            for row in rows_of(documents, batch):
                logits = model([documents[i] for i in row])
                loss = F.cross_entropy(logits, labels[row], reduction="sum") / len(batch)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield


@torch.no_grad()
def score(model: GPTClassifier, documents: Sequence[Tensor], indices: Sequence[int]) -> list[float]:
    """Log-odds of an affirmed judgment of the documents with these indices."""
    model.eval()
    scores: list[float] = []
    for row in rows_of(documents, indices):
        logits = model([documents[i] for i in row])
        scores += (logits[:, 1] - logits[:, 0]).tolist()
    return scores


def folds_of(labels: Sequence[bool], n: int) -> list[tuple[list[int], list[int]]]:
    """Indices of training and test documents of each fold, with equal shares of both labels."""
    from sklearn.model_selection import StratifiedKFold

    folds = StratifiedKFold(n, shuffle=True, random_state=0).split(np.zeros(len(labels)), labels)
    return [(train.tolist(), test.tolist()) for train, test in folds]


def measure_model(
    source: GPT,
    documents: list[Tensor],
    labels: list[bool],
    length: int,
    seed: int,
    args: Namespace,
) -> Iterator[list[Row]]:
    """Yield a row with the score of each document, by a model that was not trained on it.

    Scores are those of the epoch with the lowest loss on validation documents.
    """
    from sklearn.model_selection import train_test_split

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cut = [document[:length].to(device) for document in documents]
    targets = torch.tensor(labels, dtype=torch.int64, device=device)
    scores = np.zeros(len(labels))
    for others, test in folds_of(labels, args.folds):
        split: Any = partial(train_test_split, test_size=VALIDATION, random_state=seed)
        train, val = split(others, stratify=[labels[i] for i in others])
        torch.manual_seed(seed)
        with device:  # initializing on the CPU takes seconds
            model = GPTClassifier(source, length)
        least = math.inf
        for _ in fine_tune(model, cut, targets, train, epochs=args.epochs, seed=seed):
            log_odds = torch.tensor(score(model, cut, val), device=device)
            wrong = F.binary_cross_entropy_with_logits(log_odds, targets[val].float()).item()
            if wrong < least:
                least, scores[test] = wrong, score(model, cut, test)
        if math.isinf(least):
            raise ValueError(f"{length:,} tokens, seed {seed}: no epoch has a finite loss")
    accuracy = ((scores > 0) == np.array(labels)).mean()
    print(f"{length:,} tokens, seed {seed}: {accuracy:.1%}", flush=True)
    yield [{"name": MODEL, "length": length, "seed": seed, "scores": scores.tolist()}]


def words_and_pairs(ids: list[int]) -> list[str]:
    """Terms of the bag of words: tokens, and pairs of tokens in a row."""
    return [*map(str, ids), *(f"{a} {b}" for a, b in pairwise(ids))]


def measure_baselines(
    documents: list[Tensor], labels: list[bool], length: int, folds: int
) -> Iterator[list[Row]]:
    """Yield rows of the baselines: logistic regressions on words, and on the number of tokens."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    ids = [document[:length].tolist() for document in documents]
    terms: Any = words_and_pairs
    words = TfidfVectorizer(analyzer=terms, min_df=4, sublinear_tf=True)
    n_tokens = FunctionTransformer(lambda rows: np.log([[len(x)] for x in rows]))
    for name, features in ((WORDS, words), (COUNT, n_tokens)):
        scores = np.zeros(len(labels))
        for train, test in folds_of(labels, folds):
            regression = GridSearchCV(
                LogisticRegression(max_iter=1000), {"C": [0.01, 0.1, 1.0, 10.0, 100.0]},
                scoring="roc_auc", cv=3,
            )  # fmt: skip
            model = make_pipeline(features, regression)
            model.fit([ids[i] for i in train], [labels[i] for i in train])
            scores[test] = model.decision_function([ids[i] for i in test])
        yield [{"name": name, "length": length, "seed": 0, "scores": scores.tolist()}]


def metrics(
    labels: np.ndarray, folds: np.ndarray, scores: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Micro-F1, which is the accuracy here, and area under the ROC curve, (R, S) each.

    The area is the share of correctly ordered pairs, of documents that one model scored.

    Args:
        labels: (n,) bool.
        folds: (n,) integers, the fold that tested each document.
        scores: (S, n), of S seeds.
        weights: (R, n) integers, how often each document counts in each of R samples.
    """
    correct = (scores > 0) == labels
    yes, no = weights[:, labels], weights[:, ~labels]
    paired = folds[labels][:, None] == folds[~labels]
    n_pairs = ((yes @ paired) * no).sum(1)
    areas = []
    for row in scores:
        above = row[labels][:, None] > row[~labels]
        equal = row[labels][:, None] == row[~labels]
        won = ((yes @ ((above + equal / 2) * paired)) * no).sum(1)
        areas.append(won / np.maximum(1, n_pairs))
    return {"micro_f1": weights @ correct.T / weights.sum(1)[:, None], "auc": np.stack(areas, 1)}


def summarize(result: Row) -> list[Row]:
    """Metrics by model and length, and the gain in area over the shortest, with 95% intervals.

    Intervals resample documents and seeds.
    """
    labels, folds = np.array(result["labels"]), np.array(result["folds"])
    n = len(labels)
    scores: dict[tuple[str, int], list[list[float]]] = {}
    for row in result["rows"]:
        scores.setdefault((row["name"], row["length"]), []).append(row["scores"])
    generator = np.random.default_rng(0)
    weights = generator.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    summary, shortest = [], {}
    for (name, length), of_seeds in sorted(scores.items()):
        seeds = generator.integers(len(of_seeds), size=(RESAMPLES, len(of_seeds)))
        everything = metrics(labels, folds, np.array(of_seeds), np.ones((1, n), np.int64))
        means = {key: float(value.mean()) for key, value in everything.items()}
        drawn = {
            key: np.take_along_axis(value, seeds, 1).mean(1)
            for key, value in metrics(labels, folds, np.array(of_seeds), weights).items()
        }
        first = shortest.setdefault(name, (means["auc"], drawn["auc"]))
        means["gain"], drawn["gain"] = means["auc"] - first[0], drawn["auc"] - first[1]
        row: Row = {"name": name, "length": length, "seeds": len(of_seeds), **means}
        for key, values in drawn.items():
            row[f"{key}_interval"] = np.quantile(values, (0.025, 0.975)).tolist()
        summary.append(row)
    return summary


def documents_table(result: Row) -> str:
    """Markdown table of metrics by model and length, percent."""
    share = np.mean(result["labels"])
    rows = summarize(result)
    shortest = min(row["length"] for row in rows)
    lines = [
        {
            "model": row["name"],
            "tokens": f"{row['length']:,}",
            "seeds": str(row["seeds"]),
            "micro-F1": mean_text(row["micro_f1"], row["micro_f1_interval"], 100),
            "area under the curve": mean_text(row["auc"], row["auc_interval"], 100),
            "its gain over the shortest": interval_text(row["gain_interval"], 100)
            if row["length"] > shortest
            else "-",
        }
        for row in rows
    ]
    always = {"model": "always affirmed", "tokens": "-", "seeds": "-"}
    return dict_table([{**always, "micro-F1": f"{100 * share:.1f}"}, *lines], "-")


def draw(result: Row) -> Figure:
    """Draw both metrics over the number of tokens, with their intervals."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    looks = {MODEL: OURS, WORDS: COLOURS[1], COUNT: COLOURS[2]}
    titles = {"micro_f1": "micro-F1", "auc": "area under the ROC curve"}
    guesses = {"micro_f1": np.mean(result["labels"]), "auc": 0.5}
    rows = summarize(result)
    lengths = sorted({row["length"] for row in rows})
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for name, colour in looks.items():
            own = [row for row in rows if row["name"] == name]
            y = np.array([row[key] for row in own])
            ends = np.abs(np.array([row[f"{key}_interval"] for row in own]).T - y)
            look = {"color": colour, "marker": "o", "capsize": 3, "label": name}
            axes.errorbar([row["length"] for row in own], y, ends, **look)
        axes.axhline(guesses[key], color=PLAIN, ls=":", label="always affirmed")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
        axes.set(xlabel="tokens of a document", title=title)
    figure.axes[0].legend(frameon=False)
    return figure


@command.main
def main(args: Namespace) -> None:
    """Write the documents to pretrain on, or measure baselines and the fine-tuned model."""
    if args.without_opinions is not None:
        kept = [d for d in read_documents(args.text) if d.get("source") != SOURCE]
        lines = (json.dumps({"source": d.get("source"), "text": d["text"]}) for d in kept)
        write_atomically(args.without_opinions, "".join(f"{line}\n" for line in lines).encode())
        return print(f"wrote {args.without_opinions}: {len(kept):,} documents")
    run = open_run(args.init)
    if run.model.config.mask.pattern != "dense":
        raise ValueError(
            f"--init={args.init} has model.mask.pattern={run.model.config.mask.pattern}, but must "
            "be dense: blocks of a mask would begin elsewhere in each document of a row"
        )
    all_opinions = [
        opinion
        for document in read_documents(args.text)
        if document.get("source") == SOURCE and (opinion := label_opinion(document["text"]))
    ]
    # One of each text, so that no fold is tested on what it was trained on
    opinions = [*{" ".join(opinion.text.split()): opinion for opinion in all_opinions}.values()]
    labels = [opinion.affirmed for opinion in opinions]
    documents = [torch.tensor(run.tokenizer.encode(o.text), dtype=torch.int64) for o in opinions]
    folds = np.zeros(len(labels), np.int64)
    for number, (_, test) in enumerate(folds_of(labels, args.folds)):
        folds[test] = number
    stages: list[Stage] = [
        partial(measure_model, run.model, documents, labels, n, seed, args)
        for seed in range(1, args.seeds + 1)
        for n in args.lengths
    ]
    stages += [partial(measure_baselines, documents, labels, n, args.folds) for n in args.lengths]
    tokens = [len(document) for document in documents]
    origin = {"init": args.init.name, "pretrained_on": run.config.data.path}
    about = {"labels": labels, "folds": folds.tolist(), "tokens": tokens, **origin}
    measure_rows(args, stages, documents_table, draw=draw, **about)
