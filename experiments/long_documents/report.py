"""Scores of long documents by model and length, with intervals: table and picture."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from evaluation.markdown import dict_table
from evaluation.results import Row
from evaluation.statistics import Estimate, paired_half_width, widen
from evaluation.style import PLAIN, styles_of
from experiments.harness import Result
from experiments.reports import interval_text, mean_text

RESAMPLES = 2000
SIMILAR = 1.25
"""Largest quotient of the numbers of tokens of two documents of similar length."""
WORDS, COUNT = "bag of words", "number of tokens"
MODEL = ("init", "epochs", "pooling", "tokens")
"""Keys that are equal in all results of a model."""


def metrics(result: Result, scores: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Micro-F1, which is the accuracy here, and areas under the ROC curve, (R, S) each.

    An area is the share of correctly ordered pairs, of documents that one model scored. `similar`
    counts only pairs of similar length, which the number of tokens hardly orders.

    Args:
        result: labels, folds and numbers of tokens of n documents.
        scores: (S, n), of S seeds.
        weights: (R, n) integers, how often each document counts in each of R samples.
    """
    labels, folds = np.array(result["labels"], bool), np.array(result["folds"])
    tokens = np.log(result["tokens"])
    yes, no = weights[:, labels].astype(float), weights[:, ~labels]  # float products are fast
    compared = folds[labels][:, None] == folds[~labels]
    differ = np.abs(tokens[labels][:, None] - tokens[~labels])
    ordered = [np.sign(row[labels][:, None] - row[~labels]) / 2 + 0.5 for row in scores]
    areas = {}
    for key, pairs in (("auc", compared), ("similar", compared & (differ < np.log(SIMILAR)))):
        n_pairs = np.maximum(1, ((yes @ pairs) * no).sum(1))
        won = [((yes @ (right * pairs)) * no).sum(1) for right in ordered]
        areas[key] = np.stack(won, 1) / n_pairs[:, None]
    correct = (scores > 0) == labels
    return {"micro_f1": weights @ correct.T / weights.sum(1)[:, None], **areas}


def summarize(result: Result) -> list[Row]:
    """Metrics by model and length, and gains in area over the shortest, with 95% intervals.

    Intervals are over documents, and also over seeds if there are several. A gain is that of the
    seeds that both lengths have.
    """
    n = len(result["labels"])
    scores: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in result["rows"]:
        scores.setdefault((row["name"], row["length"]), {})[row["seed"]] = row["scores"]
    generator = np.random.default_rng(0)
    # The first sample is the documents themselves
    drawn = generator.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    weights = np.concatenate((np.ones((1, n), np.int64), drawn))
    summary: list[Row] = []
    shortest: dict[str, tuple[list[int], dict[str, np.ndarray]]] = {}
    for (name, length), of_seeds in sorted(scores.items()):
        seeds, values = [*of_seeds], metrics(result, np.array([*of_seeds.values()]), weights)
        first_seeds, first = shortest.setdefault(name, (seeds, values))
        common, here, there = np.intersect1d(seeds, first_seeds, return_indices=True)
        gains = {
            f"{key}_gain": values[key][:, here] - first[key][:, there]
            for key in ("auc", "similar")
            if common.size
        }
        row: Row = {"name": name, "length": length, "seeds": len(seeds)}
        for key, value in (values | gains).items():
            mean = mean_over_seeds(value)
            row |= {key: mean.mean, f"{key}_interval": [mean.low, mean.high]}
        summary.append(row)
    return summary


def mean_over_seeds(values: np.ndarray) -> Estimate:
    """Mean of (R, S) values of S seeds; the first row is measured, the others are resampled."""
    low, high = np.quantile(values[1:].mean(1), (0.025, 0.975))
    over_documents = Estimate(mean=float(values[0].mean()), low=float(low), high=float(high))
    return widen(over_documents, paired_half_width(values[0]))


def summarize_all(results: Sequence[Result]) -> list[Row]:
    """`summarize` results on the same documents, of several models, or of several seeds of one.

    The numbers of tokens of two models, and so the pairs of similar length, may differ: each has
    its own tokenizer.

    Raises:
        ValueError: results are on other documents, two models have the same name, or a seed was
            measured twice.
    """
    for key in ("labels", "folds"):
        if any(result[key] != results[0][key] for result in results):
            raise ValueError(
                f"results differ in {key}: measure them on the same --text and --folds"
            )
    models: list[Result] = []  # each with the rows of all its results
    for result in results:
        known = [m for m in models if all(m.get(key) == result.get(key) for key in MODEL)]
        if known:
            known[0]["rows"].extend(result["rows"])
        else:
            models.append(result | {"rows": [*result["rows"]]})
    names = [name for model in models for name in {row["name"] for row in model["rows"]}]
    seeds = [(row["name"], row["length"], row["seed"]) for m in models for row in m["rows"]]
    for values, option in ((names, "--name"), (seeds, "--seeds")):
        for value, n in Counter(values).items():
            if n > 1:
                raise ValueError(f"{n} results are of {value!r}: measure one with other {option}")
    return [row for model in models for row in summarize(model)]


def documents_table(*results: Result) -> str:
    """Markdown table of metrics by model and length, percent."""
    share = np.mean(results[0]["labels"])
    rows = summarize_all(results)
    shortest = min(row["length"] for row in rows)

    def gain(row: Row, area: str) -> str:
        gained = row.get(f"{area}_gain_interval") if row["length"] > shortest else None
        return interval_text(gained, 100) if gained else "-"

    lines = [
        {
            "model": row["name"],
            "tokens": f"{row['length']:,}",
            "seeds": str(row["seeds"]),
            "micro-F1": mean_text(row["micro_f1"], row["micro_f1_interval"], 100),
            "area under the curve": mean_text(row["auc"], row["auc_interval"], 100),
            "its gain over the shortest": gain(row, "auc"),
            "area, similar length": mean_text(row["similar"], row["similar_interval"], 100),
            "gain, similar length": gain(row, "similar"),
        }
        for row in rows
    ]
    always = {"model": "always affirmed", "tokens": "-", "seeds": "-"}
    return dict_table([{**always, "micro-F1": f"{100 * share:.1f}"}, *lines], "-")


def draw(*results: Result) -> Figure:
    """Draw the metrics over the number of tokens, with their intervals."""
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    titles = {
        "micro_f1": "micro-F1",
        "auc": "area under the ROC curve",
        "similar": "area, documents of similar length",
    }
    guesses = {"micro_f1": np.mean(results[0]["labels"]), "auc": 0.5, "similar": 0.5}
    rows = summarize_all(results)
    lengths = sorted({row["length"] for row in rows})
    looks = styles_of(row["name"] for row in rows)
    for axes, (key, title) in zip(figure.subplots(1, len(titles)), titles.items(), strict=True):
        for i, (name, look) in enumerate(looks.items()):
            own = [row for row in rows if row["name"] == name]
            shift = 1.05 ** (i - (len(looks) - 1) / 2)  # so that no interval hides another
            y = np.array([row[key] for row in own])
            ends = np.abs(np.array([row[f"{key}_interval"] for row in own]).T - y)
            x = [row["length"] * shift for row in own]
            axes.errorbar(x, y, ends, capsize=3, label=name, **look)
        axes.axhline(guesses[key], color=PLAIN, ls=":", label="always affirmed")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
        axes.set(xlabel="tokens of a document", title=title)
    names = figure.axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=4, frameon=False)
    return figure
