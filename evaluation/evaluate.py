"""Evaluate runs on texts: score each by a plan, and sum its losses by document."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from data.text.shards import TokenStream
from evaluation.key_tokens import (
    KeyTokens,
    check_is_not_chooser,
    choose,
    default_chooser,
    left_out,
    read_key_tokens,
    settings_of,
)
from evaluation.plan import MODES, Plan
from evaluation.runs import Run, describe, labels, open_run
from evaluation.score import check_tokenizer, compiling_pays, scorer, validation_splits, work_of
from evaluation.scoring_bar import ScoringBar
from evaluation.sums import KeySums, Scored, Text, add_up, describe_corpus, kind_of
from evaluation.windows import Scoring
from training.checkpoint.choice import find_checkpoint
from training.distributed import Processes


def evaluate_runs(
    folders: Sequence[Path],
    plan: Plan,
    processes: Processes,
    corpora: Sequence[Path],
    batch_tokens: int | None,
    checkpoint: str | None = None,
    key_tokens: Path | None = None,
) -> list[tuple[list[Scored], Text]]:
    """Score all runs on the validation splits of `corpora`, or of the first run's text.

    If another run chose key tokens, all runs are also scored on these. Without `key_tokens`, one of
    the runs chooses if possible (`default_chooser`), and some are left out.

    Args:
        folders: folders of the runs.
        plan: scorings of the runs.
        processes: all processes, each of which scores a shard.
        corpora: folders of token shards. Empty means the text of the first run.
        batch_tokens: tokens per GPU and batch. None means as in training.
        checkpoint: checkpoint of each run, in the format of `find_checkpoint`.
        key_tokens: a file of `write_key_tokens`, or the folder of a run that chooses at its newest
            checkpoint.

    Returns:
        For each corpus, the scored runs and the text.

    Raises:
        ValueError: a text is too short or was prepared with another tokenizer; runs with the same
            name are not seeds of one model; corpora have the same name; a mode in `plan.modes`
            scores no run; the sliding windows have no scored token in common; or `key_tokens` are
            of another text, were chosen by one of the runs, or have another short history than
            `plan.near` and no mode uses that.
        FileNotFoundError: `key_tokens` does not exist.
    """
    runs = _open_runs(folders, processes, checkpoint)
    names = labels(runs)
    contexts = [run.config.model.context_length for run in runs]
    plan.check_lengths(contexts)
    streams = _open_texts(runs, corpora)
    for mode, reason in plan.skipped_modes([run.config for run in runs]).items():
        if plan.modes is not None:
            raise ValueError(f"--modes {mode} has nothing to score: {reason}")
        if processes.is_main:
            print(f"skipping mode {mode}: {reason}")
    key, chooser = _find_key_tokens(key_tokens, runs, names, plan, processes)
    choosing = ()
    if chooser is not None:
        _open_texts([chooser], [stream.path for stream in streams])  # checks its tokenizer
        choosing = plan.key_scorings_of(chooser.config, contexts)
    if key is not None:
        key.check_texts(streams)
    omitted = left_out(runs, chooser) if chooser in runs else set()
    scorings_by_run = [plan.scorings_of(run.config, contexts) for run in runs]
    token_bytes = runs[0].tokenizer.token_bytes()
    compared = plan.compared(contexts)
    described = [describe_corpus(stream, token_bytes, compared) for stream in streams]
    scored: list[list[Scored]] = [[] for _ in streams]
    configs, n_tokens = [run.config for run in runs], sum(map(len, streams))
    compiles = compiling_pays(configs, scorings_by_run, n_tokens, processes.device)
    with _bar(streams, [*chain(*scorings_by_run), *choosing], processes) as bar:
        losses_by = partial(
            scorer, batch_tokens=batch_tokens, processes=processes, bar=bar, compiles=compiles
        )
        if chooser is not None:
            key = choose(chooser, choosing, streams, losses_by(chooser))
        for name, run, scorings in zip(names, runs, scorings_by_run, strict=True):
            losses_of, about = losses_by(run), describe(run)
            on_key = None if run.folder in omitted else key
            run_scored = [
                Scored(
                    label=name,
                    number=run.seed_number,
                    about=about,
                    config=run.config,
                    sums={},
                    key=on_key and KeySums(about=on_key.about(c.stream, c.well_seen), sums={}),
                )
                for c in described
            ]
            for scoring in scorings:  # scorings of one shape are adjacent, so each compiles once
                for corpus, into in zip(described, run_scored, strict=True):
                    losses = losses_of(corpus.stream, scoring)
                    into.sums[scoring] = add_up(losses, scoring, corpus)
                    if on_key and into.key and kind_of(scoring) == "sliding":
                        among = on_key.of(corpus.stream).is_key
                        into.key.sums[scoring] = add_up(losses, scoring, corpus, among)
            for runs_of_corpus, into in zip(scored, run_scored, strict=True):
                runs_of_corpus.append(into)
    return [(runs, corpus.text) for runs, corpus in zip(scored, described, strict=True)]


def choose_key_tokens(
    folder: Path,
    plan: Plan,
    processes: Processes,
    corpora: Sequence[Path],
    batch_tokens: int | None,
    checkpoint: str | None = None,
) -> KeyTokens:
    """Let a run choose the key tokens of texts. Arguments and errors as in `evaluate_runs`."""
    (run,) = _open_runs([folder], processes, checkpoint)
    contexts = [run.config.model.context_length]
    plan.check_lengths(contexts)
    streams = _open_texts([run], corpora)
    scorings = plan.key_scorings_of(run.config, contexts)
    n_tokens = sum(map(len, streams))
    compiles = compiling_pays([run.config], [scorings], n_tokens, processes.device)
    with _bar(streams, scorings, processes) as bar:
        losses_of = scorer(run, batch_tokens, processes, bar, compiles=compiles)
        return choose(run, scorings, streams, losses_of)


def _open_runs(folders: Sequence[Path], processes: Processes, checkpoint: str | None) -> list[Run]:
    # choose once for all processes: a run in training may write a new checkpoint at any time
    chosen = processes.run_on_main(
        lambda: [find_checkpoint(folder, checkpoint) for folder in folders]
    )
    return [open_run(*pair) for pair in zip(folders, chosen, strict=True)]


def _open_texts(runs: Sequence[Run], corpora: Sequence[Path]) -> list[TokenStream]:
    """Validation splits of `corpora`, or of the first run's text. Checks all tokenizers."""
    streams = validation_splits(corpora or [Path(runs[0].config.data.path)])
    for run in runs:
        for stream in streams:
            check_tokenizer(run, stream)
    return streams


def _find_key_tokens(
    path: Path | None, runs: Sequence[Run], names: Sequence[str], plan: Plan, processes: Processes
) -> tuple[KeyTokens | None, Run | None]:
    """Key tokens in the file `path`, or else the run that is to choose them, if any."""
    if path is None:
        chooser = default_chooser(runs, names) if plan.slides else None
        if chooser is None:
            return None, None
        contexts = [run.config.model.context_length for run in runs]
        try:
            plan.key_scorings_of(chooser.config, contexts)
        except ValueError as error:
            if processes.is_main:
                print(f"skipping LongPPL: {error}")
            return None, None
        return None, chooser
    if path.is_dir():
        (chooser,) = _open_runs([path], processes, None)
        key, name, settings = None, str(path), settings_of(chooser)
    else:
        chooser, key = None, read_key_tokens(path)
        name, settings = key.chooser, (key.config, key.text_tokens)
        if plan.near not in (None, key.short.history):
            unused = (
                f"--near={plan.near} does not change the key tokens of {path}, which have a short "
                f"history of {key.short.history} tokens"
            )
            if "control" not in (plan.modes or MODES):
                raise ValueError(
                    f"{unused}: leave --near out, or choose the key tokens again "
                    f"(--write-key-tokens with --near {plan.near})"
                )
            if processes.is_main:
                print(f"{unused}: only control uses it")
    for run in runs:
        check_is_not_chooser(str(run.folder), settings_of(run), name, settings)
    return key, chooser


def _bar(
    streams: Sequence[TokenStream], scorings: Sequence[Scoring], processes: Processes
) -> ScoringBar:
    """Progress bar of scorings, each of all streams."""
    work = sum(work_of(stream, scoring) for scoring in scorings for stream in streams)
    return ScoringBar(work, is_main=processes.is_main)
