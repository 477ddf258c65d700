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
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.files import parse_json, write_atomically
from data.text.opinions import Opinion, label_opinion
from data.text.readers import checked_text, open_file
from evaluation.results import Row
from evaluation.runs import open_run
from experiments.long_documents.classifier import GPTClassifier, fine_tune, score
from experiments.long_documents.report import COUNT, MODEL, WORDS, documents_table, draw
from experiments.results import Stage
from model.gpt import GPT

SOURCE = "us-appellate-opinions"
VALIDATION = 1 / 8  # share of the training documents, to choose the epoch
LEAST = 10  # documents of each label: folds and validation need both


def read_documents(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines.

    Raises:
        ValueError: a line is not an object with a text; the message names it.
    """
    for path in paths:
        with open_file(path) as (file, _):
            for number, line in enumerate(file, start=1):
                where = f"--text={path}, line {number}"
                try:
                    document = parse_json(line)
                except ValueError as error:
                    raise ValueError(f"{where} must be JSON, but is not ({error})") from error
                if not isinstance(document, dict):
                    kind = type(document).__name__
                    raise ValueError(f"{where} must be an object with a text, but is {kind}")
                checked_text(document.get("text"), f"{where}: field 'text'")
                yield document


def read_opinions(paths: Sequence[Path], folds: int) -> list[Opinion]:
    """Read and label opinions, one of each text: no fold is tested on what it was trained on.

    Raises:
        ValueError: there are too few of a label for these folds.
    """
    documents = (d for d in read_documents(paths) if d.get("source") == SOURCE)
    labelled = filter(None, (label_opinion(document["text"]) for document in documents))
    opinions = [*{" ".join(opinion.text.split()): opinion for opinion in labelled}.values()]
    affirmed, least = sum(opinion.affirmed for opinion in opinions), max(LEAST, folds)
    others = len(opinions) - affirmed
    if min(affirmed, others) < least:
        raise ValueError(
            f"--text has {affirmed} opinions that affirm and {others} that do not, but must have "
            f"{least} of each: court opinions with source={SOURCE}"
        )
    return opinions


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
    opinions = read_opinions(args.text, args.folds)
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
