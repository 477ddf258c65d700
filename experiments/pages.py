"""Write the tables of README.md and docs, and the pictures of docs/results, from docs/results.

python -m experiments.pages

A table is between the lines `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES.
PICTURES lists the pictures.
"""

from training.command_line import handle_help

if __name__ == "__main__":
    handle_help(__doc__)  # before PyTorch is imported, which takes seconds

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from matplotlib.figure import Figure

from evaluation import repeats
from evaluation.report import losses_table
from evaluation.results import Row, read_result
from evaluation.style import save
from experiments import fits, headline, provenance, recipe, same_losses
from experiments.attention import features, hbm_bytes, host, pictures
from experiments.attention import report as attention
from experiments.contours import generator_speed, tracing
from experiments.harness import Result
from experiments.long_documents import report as long_documents
from experiments.lra import tables as lra
from experiments.passkey import report as passkey
from experiments.pathx import report as pathx
from experiments.reliability.table import reliability_table
from experiments.scale import report as scale
from experiments.table4 import by_tokens, forest
from experiments.table4 import report as table4
from experiments.time_to_loss import report as time_to_loss
from experiments.train_steps import (
    bert_step,
    first_step,
    recipe_step,
    registered_step,
    saving,
    transformers_step,
)
from experiments.train_steps import tables as train_steps

T = TypeVar("T")

_DOCS = ("guide", "evaluation", "lra", "speed", "hopper", "scale", "reliability", "reproduce")
PAGES = (Path("README.md"), *(Path(f"docs/{name}.md") for name in _DOCS))
RESULTS = Path("docs/results")
COMPARED = {"1,024": "compare_training_gpt2_small_1k", "4,096": "compare_training_gpt2_small_4k"}
_BY_TOKENS = ("minutes", "minutes_131k", "hours", "billion")
"""Budgets of Table 4, by training tokens."""
_REPEATS = ("repeats_minutes_131k_1k", "repeats", "repeats_1k", "repeats_billion")
_LONG_DOCUMENTS = (
    *("long_documents", "long_documents_gpt_frozen", "long_documents_imported"),
    *("long_documents_frozen", "long_documents_baselines"),
)
_LAST_STATE = ("long_documents_last_state", "long_documents_imported_last_state")
TEXT_TRIALS = (
    *("lra_rotary", "lra_pretrained", "lra_text/at_rest/lra_rotary"),
    *("lra_text/at_rest/lra_pretrained", "lra_text/at_rest_5e-4/lra_rotary"),
    "lra_text/neighbour_5e-4/lra_rotary",
)

_MARKED_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _of(make: Callable[..., T], *names: str, **named: str) -> Callable[[], T]:
    """Bind `make` to the results with these names, which are read when it is called."""

    def bound() -> T:
        results = [read_result(RESULTS / f"{name}.json") for name in names]
        by_name = {key: read_result(RESULTS / f"{name}.json") for key, name in named.items()}
        return make(*results, **by_name)

    return bound


def _gains(*results: Result) -> dict[str, list[Row]]:
    """Rows of scripts.repeats by model and training steps; a run in several results is one."""
    return {
        f"{run['label']}, {run['about']['step']:,} steps": run["rows"]
        for result in results
        for run in result["runs"]
    }


TABLES: dict[str, Callable[[], str]] = {
    "headline": _of(
        headline.headline,
        **{name: name for name in ("train_speed", "attention_hopper", "scale_longest")},
    ),
    "attention_limit": _of(headline.attention_limit, "attention_hopper"),
    "results": _of(headline.results_table, **{name: name for name in headline.RESULTS}),
    "provenance": _of(provenance.provenance_table, **{name: name for name in provenance.RESULTS}),
    "train_speed": _of(train_steps.speed_table, "train_speed"),
    "train_parts": _of(train_steps.parts_table, "train_speed"),
    "train_speed_butterfly": _of(train_steps.butterfly_table, "train_speed_butterfly"),
    "transformers_step": _of(transformers_step.step_table, "transformers_step"),
    "bert_step": _of(bert_step.bert_table, "bert_step_padded", "bert_step_full"),
    "registered_step": _of(registered_step.registered_table, "registered_step"),
    "fits": fits.fits_table,
    "first_step": _of(first_step.first_step_table, "first_step"),
    "same_losses": _of(train_steps.losses_table, **COMPARED),
    "noise": _of(train_steps.gaps_table, **COMPARED),
    "attention_speed": _of(attention.dense_table, "attention_peers"),
    **{
        f"hopper_{direction}": _of(
            partial(attention.direction_table, direction=direction), "attention_hopper"
        )
        for direction in ("forward", "backward")
    },
    "repeatable": _of(attention.repeatable_table, "attention_hopper"),
    "attention_features": _of(features.features_table, "attention_features"),
    "attention_host": _of(host.host_table, "attention_host"),
    "butterfly_speed": _of(attention.butterfly_table, "attention_butterfly"),
    "block_sizes": _of(attention.blocks_table, "attention_blocks"),
    "mask_price": _of(attention.mask_price_table, "attention_butterfly"),
    "paper_speedup": _of(attention.paper_table, "attention_paper"),
    "approximate": _of(attention.approximate_table, "attention_approximate"),
    "approximate_verdict": _of(attention.approximate_verdict_table, "attention_approximate"),
    "billion": _of(table4.models_table, "table4_billion"),
    "billion_answers": _of(table4.differences_table, "table4_billion"),
    "table4": _of(table4.models_table, "table4_hours"),
    "table4_answers": _of(table4.answers_table, "table4_hours", "table4_minutes"),
    "long_ppl": _of(
        lambda result: losses_table(result["key"], perplexity="LongPPL"),
        "evaluation_long_ppl/evaluation",
    ),
    "differences_by_tokens": _of(
        by_tokens.differences_table, *(f"table4_{budget}" for budget in _BY_TOKENS)
    ),
    "history_by_tokens": _of(
        by_tokens.history_table,
        *(f"evaluation_{budget}/evaluation" for budget in _BY_TOKENS),
    ),
    "repeats": _of(lambda *results: repeats.table_of(_gains(*results)), *_REPEATS),
    "recipe": _of(lambda result: table4.models_table(recipe.overview(result)), "recipe"),
    "recipe_answers": _of(
        lambda result: table4.differences_table(recipe.overview(result)), "recipe"
    ),
    "recipe_parts": _of(recipe.parts_table, "recipe"),
    "recipe_removed": _of(recipe.parts_table, "recipe_removed"),
    "recipe_first_parts": _of(recipe.parts_table, "recipe_first"),
    "recipe_step": _of(recipe_step.step_table, "recipe_step"),
    "recipe_sizes": _of(table4.models_table, "table4_recipe_sizes"),
    "recipe_131k": _of(table4.models_table, "table4_recipe_131k"),
    "recipe_131k_answers": _of(table4.differences_table, "table4_recipe_131k"),
    "recipe_held_out": _of(table4.differences_table, "table4_recipe_held_out"),
    "time_to_loss": _of(time_to_loss.answers_table, "time_to_loss"),
    "modern": _of(table4.models_table, "table4_modern"),
    "modern_answers": _of(table4.differences_table, "table4_modern"),
    "passkey": _of(passkey.runs_table, "passkey"),
    "long_documents": _of(long_documents.documents_table, *_LONG_DOCUMENTS),
    "long_documents_last_state": _of(long_documents.documents_table, *_LAST_STATE),
    "pathx": _of(pathx.accuracy_table, "pathx"),
    "pathx_runs": _of(pathx.runs_table, "pathx"),
    "pathx_baselines": _of(pathx.baselines_table, "pathfinder_baselines"),
    "tracing": _of(tracing.runs_table, "pathfinder_tracing"),
    "tracing_32": _of(tracing.runs_table, "pathfinder_tracing_32"),
    "lra": _of(lra.accuracy_table, "lra"),
    "lra_rotary": _of(lra.accuracy_table, "lra_rotary"),
    "lra_text": _of(partial(lra.trials_table, task="text"), *TEXT_TRIALS),
    "lra_speed": _of(lra.speed_table, "lra_speed"),
    "lra_speed_approximate": _of(lra.approximate_speed_table, "lra_speed_approximate"),
    "reliability": _of(reliability_table, "reliability"),
    "saving": _of(saving.saving_table, "saving"),
    "scale_ddp": _of(scale.ddp_table, "scale"),
    "scale_fsdp": _of(scale.fsdp_table, "scale"),
    "scale_muon": _of(scale.muon_table, "scale_muon"),
    "scale_large": _of(scale.large_table, "scale"),
    "scale_context": _of(scale.context_table, "scale_context"),
    "scale_long": _of(scale.long_table, "scale_long"),
    "scale_longest": _of(scale.longest_table, "scale_longest"),
    "scale_predicted": _of(scale.predicted_table, "scale_long"),
    "scale_losses": _of(same_losses.sharing_table, "scale_losses"),
    "pathfinder_speed": _of(generator_speed.times_table, "pathfinder_speed"),
}


def _rows_of(draw: Callable[[list[Row]], T], name: str) -> Callable[[], T]:
    """Bind `draw` to the rows of a result."""
    return _of(lambda result: draw(result["rows"]), name)


PICTURES: dict[Path, Callable[[], Figure]] = {
    RESULTS / "context.png": _of(forest.draw, "table4_hours", "table4_minutes"),
    RESULTS / "context_by_tokens.png": _of(
        by_tokens.draw, *(f"table4_{budget}" for budget in _BY_TOKENS)
    ),
    RESULTS / "repeats.png": _of(lambda *results: repeats.draw(_gains(*results)), *_REPEATS),
    RESULTS / "passkey.png": _of(passkey.draw_runs, "passkey"),
    RESULTS / "long_documents.png": _of(long_documents.draw, *_LONG_DOCUMENTS),
    RESULTS / "attention_peers.png": _rows_of(pictures.draw_peers, "attention_peers"),
    RESULTS / "attention_hopper.png": _rows_of(pictures.draw_fastest, "attention_hopper"),
    RESULTS / "attention_butterfly.png": _rows_of(pictures.draw_butterflies, "attention_butterfly"),
    RESULTS / "attention_paper.png": _rows_of(pictures.draw_paper, "attention_paper"),
    RESULTS / "attention_approximate.png": _rows_of(
        pictures.draw_approximate, "attention_approximate"
    ),
    RESULTS / "attention_sparsity.png": _rows_of(pictures.draw_sparsity, "attention_sparsity"),
    RESULTS / "attention_io.png": _rows_of(hbm_bytes.draw, "attention_io"),
    RESULTS / "recipe.png": _of(recipe.draw, "recipe"),
    RESULTS / "recipe_curves.png": _of(recipe.draw_curves, "recipe"),
    RESULTS / "recipe_first.png": _of(recipe.draw, "recipe_first"),
    RESULTS / "time_to_loss.png": _of(time_to_loss.draw, "time_to_loss"),
    RESULTS / "bert_step.png": _of(bert_step.draw, "bert_step_padded", "bert_step_full"),
    RESULTS / "train_speed.png": _of(train_steps.draw_speed, "train_speed"),
    **{
        RESULTS / f"{name}.png": _of(
            partial(train_steps.draw_losses, name=name.removeprefix("compare_training_")), name
        )
        for name in COMPARED.values()
    },
    RESULTS / "scale_long.png": _of(scale.draw, "scale_long"),
    RESULTS / "lra_speed.png": _of(
        lambda speed, accuracy: lra.draw_speed(speed, accuracy["references"]), "lra_speed", "lra"
    ),
}


def fill(text: str) -> str:
    """Rewrite every table in `text`.

    Raises:
        KeyError: a marker names a table that is not in TABLES.
    """
    return _MARKED_TABLE.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> None:
    """Run the command."""
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    for path, draw in PICTURES.items():
        save(draw(), path)
    print(f"wrote the tables of {', '.join(map(str, PAGES))}")
    print(f"drew {', '.join(map(str, PICTURES))}")


if __name__ == "__main__":
    main()
