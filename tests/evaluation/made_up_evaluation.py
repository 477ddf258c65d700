"""An evaluation of two models whose losses are made up, for the tests of reports and pictures."""

import json

import numpy as np

from configs import TrainConfig
from configs.schema import RunConfig
from data.text.batches import DataConfig
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import load_tokenizer
from evaluation.plan import Plan
from evaluation.runs import Run
from evaluation.windows import Scoring
from model import ModelConfig
from tests.evaluation.known_losses import KnownRun, tables_of
from training.checkpoint import Progress
from training.optim import OptimConfig

SHORT, LONG = "short", "long"
CONTEXTS = {SHORT: 16, LONG: 64}


def made_up_losses(scoring: Scoring, n_tokens: int, shift: float) -> np.ndarray:
    """Losses that fall with what a token sees, all the way, by noise that all models share."""
    position = np.arange(n_tokens)
    h, s, first = scoring.history, scoring.stride, scoring.first
    seen = h - s + 1 + (position - 1 - first) % s
    losses = 4 + np.random.default_rng(0).normal(size=n_tokens) - 0.2 * np.log2(seen) + shift
    if scoring.control in ("shuffle", "replace"):
        losses += np.random.default_rng(1).normal(0.05, 0.01, size=n_tokens)
    scored = (position > first) & (position <= first + scoring.n_windows(n_tokens) * s)
    return np.where(scored, losses, np.nan).astype(np.float32)


def evaluate(
    corpus, tmp_path_factory, plan: Plan, seeds: int, shift: float = 0.0, masked: tuple = ()
):
    """What tabulate makes of two models, of which `shift` worsens the second.

    Those named in `masked` were trained with documents masked.
    """
    stream = TokenStream(corpus, "val")
    scored = []
    for label, context_length in CONTEXTS.items():
        for seed in range(seeds):
            run = Run(
                folder=tmp_path_factory.mktemp(label),
                config=TrainConfig(
                    model=ModelConfig(context_length=context_length, n_layer=1, n_head=1, n_embd=8),
                    data=DataConfig(path=str(corpus), document_mask=label in masked),
                    optim=OptimConfig(max_steps=1, batch_tokens=64, micro_batch_size=1),
                    run=RunConfig(out_dir="", seed=seed),
                ),
                tokenizer=load_tokenizer(str(corpus / TOKENIZER)),
                checkpoint=corpus,
                progress=Progress(step=1, tokens=64_000 + 2000 * seed, gpu_hours=1.5),
            )
            speeds = [{"step": n, "tokens_per_s": 1000.0 * n} for n in (1, 2, 9)]
            lines = [json.dumps(record) + "\n" for record in speeds]
            (run.folder / "metrics.jsonl").write_text("".join(lines))
            off = 0.001 * seed + (shift if label == LONG else 0.0)
            losses = {
                scoring: made_up_losses(scoring, len(stream), off)
                for scoring in plan.scorings_of(run.config, list(CONTEXTS.values()))
            }
            scored.append(KnownRun(label, run, losses))
    return tables_of(scored, stream)


def find(rows, label, history, **others):
    (row,) = [
        row
        for row in rows
        if (row["label"], row["history"]) == (label, history)
        and all(row[key] == value for key, value in others.items())
    ]
    return row
