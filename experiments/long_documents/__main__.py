"""Classify long documents with a fine-tuned GPT, by context: Table 5 of the FlashAttention paper.

    python -m experiments.long_documents --text TEXT... --without-opinions out/text.jsonl
    python -m experiments.long_documents --text TEXT... --init RUN

    python -m experiments.long_documents --text TEXT... --init RUN --frozen

Was the judgment affirmed? Documents are opinions of US courts of appeals, without their disposition
and other sentences with the result (data/text/opinions.py): those of TEXT, JSON lines with `text`
and `source`, whose source is us-appellate-opinions. The first command writes all other documents,
to pretrain RUN on. The second fine-tunes RUN on the first 512 to 16,384 tokens of each document,
from the mean of its states, in folds: each document is scored once per seed, by a model that was
trained on others, of which an eighth chooses the epoch. Positions are extended to the longer
context. The third scores documents by logistic regressions on the states of RUN as it is. RUN can
be imported: python -m scripts.import_hf HuggingFaceTB/SmolLM2-135M --out RUN.
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command, measure_rows
from experiments.long_documents import options


def check(args: Namespace) -> None:
    """Require exactly one of --init and --without-opinions."""
    if (args.init is None) == (args.without_opinions is None):
        raise ValueError("pass either --init RUN or --without-opinions FILE")
    options.check(args)


command = Command(__name__)  # small models can be fine-tuned on a CPU
options.add_options(command)
add = command.add
add("--init", type=Path, metavar="RUN", help="folder of the pretrained or imported run")
add("--name", default="GPT", help="of the model, in tables")
add("--without-opinions", type=Path, metavar="FILE", help="write all other documents, and stop")
add("--frozen", action="store_true", help="instead of fine-tuning with --seeds and --epochs")
add("--pooling", choices=["mean", "last"], default="mean", help="state of a document")
add("--seeds", type=int, nargs="+", default=[1, 2, 3])
add("--epochs", type=int, default=3)
command.read(out="docs/results/long_documents.json", resume=True, check=check)

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from data.files import write_atomically
from evaluation.results import Row
from evaluation.runs import open_run
from experiments.long_documents.classifier import (
    GPTClassifier,
    Pooling,
    fine_tune,
    pooled_states,
    score,
)  # fmt: skip
from experiments.long_documents.documents import SOURCE, Documents, load, read_documents
from experiments.long_documents.regression import score_by_regression
from experiments.long_documents.report import documents_table, draw
from model.gpt import GPT

VALIDATION = 1 / 8  # share of the training documents, to choose the epoch


def measure(
    source: GPT, documents: Documents, length: int, seed: int, *,
    epochs: int, name: str, pooling: Pooling,
) -> Iterator[list[Row]]:  # fmt: skip
    """Yield a row with the score of each document, by a model that was not trained on it.

    Scores are those of the epoch with the lowest loss on validation documents.
    """
    from sklearn.model_selection import train_test_split

    device, cut = beginnings(documents, length)
    labels = documents.labels
    targets = torch.tensor(labels, dtype=torch.int64, device=device)
    scores = np.zeros(len(labels))
    for others, test in documents.folds:
        split: Any = partial(train_test_split, test_size=VALIDATION, random_state=seed)
        train, val = split(others, stratify=[labels[i] for i in others])
        torch.manual_seed(seed)
        with device:  # initializing on the CPU takes seconds
            model = GPTClassifier(source, length, pooling)
        least = math.inf
        for _ in fine_tune(model, cut, targets, train, epochs=epochs, seed=seed):
            log_odds = torch.tensor(score(model, cut, val), device=device)
            wrong = F.binary_cross_entropy_with_logits(log_odds, targets[val].float()).item()
            if wrong < least:
                least, scores[test] = wrong, score(model, cut, test)
        if math.isinf(least):
            raise ValueError(f"{length:,} tokens, seed {seed}: no epoch has a finite loss")
    accuracy = ((scores > 0) == np.array(labels)).mean()
    print(f"{length:,} tokens, seed {seed}: {accuracy:.1%}", flush=True)
    row = {"name": f"fine-tuned {name}", "length": length, "seed": seed}
    yield [row | {"scores": scores.tolist()}]


def measure_frozen(
    source: GPT, documents: Documents, length: int, *, name: str, pooling: Pooling
) -> Iterator[list[Row]]:
    """Yield a row with the score of each document, by regressions on states of the model."""
    from sklearn.preprocessing import StandardScaler

    device, cut = beginnings(documents, length)
    with device:
        model = GPTClassifier(source, length, pooling)
    states = pooled_states(model, cut).cpu().numpy()
    strengths = [1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0]
    scores = score_by_regression(documents, states, StandardScaler(), strengths)
    yield [{"name": f"frozen {name}", "length": length, "seed": 0, "scores": scores.tolist()}]


def beginnings(documents: Documents, length: int) -> tuple[torch.device, list[torch.Tensor]]:
    """Device to compute on, and the first `length` tokens of each document on it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device, [document[:length].to(device) for document in documents.tokens]


@command.main
def main(args: Namespace) -> None:
    """Write the documents to pretrain on, fine-tune a model, or regress on its states."""
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
    documents = load(args.text, run.tokenizer, args.folds)
    options = {"name": args.name, "pooling": args.pooling}
    if args.frozen:
        stages = [
            partial(measure_frozen, run.model, documents, length, **options)
            for length in args.lengths
        ]
    else:
        stages = [
            partial(measure, run.model, documents, length, seed, epochs=args.epochs, **options)
            for seed in args.seeds
            for length in args.lengths
        ]
    origin = {"init": args.init.name, "epochs": 0 if args.frozen else args.epochs, **options}
    measure_rows(args, stages, documents_table, draw=draw, **documents.about(), **origin)
