"""Runs with known losses, for the tests of tables and differences."""

from itertools import chain
from typing import NamedTuple

import numpy as np

from data.text.tokenizer import load_tokenizer
from evaluation.runs import Run, describe
from evaluation.sums import Scored, add_up, describe_corpus
from evaluation.tables import compare, tabulate
from evaluation.windows import Scoring
from training.checkpoint.contents import Progress
from training.language.config import load_config

SHORT = Scoring(
    history=32, stride=4, first=64
)  # each token has at least 7/8 of 32 tokens before it
LONG = Scoring(history=64, stride=4, first=64)
CHUNK_SHORT = Scoring(history=32, stride=32)
CHUNK_LONG = Scoring(history=64, stride=64)


class KnownRun(NamedTuple):
    """Run and its losses: one array (n_tokens,) per scoring."""

    label: str
    run: Run
    losses: dict[Scoring, np.ndarray]


def made_up_run(stream, folder, label, losses, *, seed=1, context_length=64, document_mask=False):
    """Make a run in `folder`; each scoring keeps the losses of only the tokens that it scores."""
    config = load_config(
        [
            "configs/quickstart.yaml",
            f"run.seed={seed}",
            f"model.context_schedule=[[{context_length},1]]",
            f"data.document_mask={document_mask}",
        ]
    )
    folder = folder / f"{label}_seed{seed}"
    folder.mkdir()
    run = Run(
        folder=folder,
        config=config,
        tokenizer=load_tokenizer(str(stream.path)),
        checkpoint=folder / "checkpoints" / "step_00000007",
        progress=Progress(step=7, samples=70, tokens=700, gpu_hours=0.25),
    )
    kept = {}
    for scoring, values in losses.items():
        kept[scoring] = np.full(len(stream), np.nan, dtype=np.float32)
        scored = slice(scored_from(scoring), scored_to(scoring, len(stream)))
        kept[scoring][scored] = values[scored]
    return KnownRun(label, run, kept)


def added_up(runs, stream):
    """Add up the losses of the runs, as scripts.evaluate does after scoring."""
    scorings = chain(*(known.losses for known in runs))
    corpus = describe_corpus(stream, load_tokenizer(str(stream.path)).token_bytes(), scorings)
    scored = [
        Scored(
            label=known.label,
            number=known.run.seed_number,
            about=describe(known.run),
            config=known.run.config,
            sums={s: add_up(losses, s, corpus) for s, losses in known.losses.items()},
        )
        for known in runs
    ]
    return scored, corpus.text


def tables_of(runs, stream):
    return tabulate(*added_up(runs, stream))


def comparisons_of(runs, stream, pairs):
    return compare(added_up(runs, stream)[0], pairs)


def scored_from(scoring):
    return scoring.first + 1


def scored_to(scoring, n_tokens):
    return scoring.first + 1 + (n_tokens - 1 - scoring.first) // scoring.stride * scoring.stride


def find(table, label, **fields):
    (row,) = [
        row
        for row in table
        if row["label"] == label and all(row[name] == value for name, value in fields.items())
    ]
    return row
