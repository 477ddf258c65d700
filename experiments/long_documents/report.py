"""Scores of long documents by model and length, with intervals: table and picture."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from evaluation.markdown import dict_table
from evaluation.results import Row
from evaluation.style import COLOURS, PLAIN
from experiments.harness import Result
from experiments.reports import interval_text, mean_text
from experiments.style import OURS

RESAMPLES = 2000
MODEL, WORDS, COUNT = "fine-tuned GPT", "bag of words", "number of tokens"


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


def summarize(result: Result) -> list[Row]:
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


def summarize_all(results: Sequence[Result]) -> list[Row]:
    """`summarize` results, and require that they are on the same documents."""
    for key in ("labels", "folds", "tokens"):
        if any(result[key] != results[0][key] for result in results):
            raise ValueError(
                f"results differ in {key}: measure them on the same --text and --folds"
            )
    return [row for result in results for row in summarize(result)]


def documents_table(*results: Result) -> str:
    """Markdown table of metrics by model and length, percent."""
    share = np.mean(results[0]["labels"])
    rows = summarize_all(results)
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


def draw(*results: Result) -> Figure:
    """Draw both metrics over the number of tokens, with their intervals."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    looks = {MODEL: OURS, WORDS: COLOURS[1], COUNT: COLOURS[2]}
    titles = {"micro_f1": "micro-F1", "auc": "area under the ROC curve"}
    guesses = {"micro_f1": np.mean(results[0]["labels"]), "auc": 0.5}
    rows = summarize_all(results)
    lengths = sorted({row["length"] for row in rows})
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for name in dict.fromkeys(row["name"] for row in rows):
            own = [row for row in rows if row["name"] == name]
            y = np.array([row[key] for row in own])
            ends = np.abs(np.array([row[f"{key}_interval"] for row in own]).T - y)
            look = {"color": looks[name], "marker": "o", "capsize": 3, "label": name}
            axes.errorbar([row["length"] for row in own], y, ends, **look)
        axes.axhline(guesses[key], color=PLAIN, ls=":", label="always affirmed")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
        axes.set(xlabel="tokens of a document", title=title)
    figure.axes[0].legend(frameon=False)
    return figure
