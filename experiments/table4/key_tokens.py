"""Key tokens of a sweep. Its runs are scored on different days, but on one choice of key tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evaluation.key_tokens import KeyTokens, check_is_not_chooser, read_key_tokens
from evaluation.sums import Scored, Text
from experiments.table4.jobs import Job, training_tokens


def read_for_sweep(path: Path, jobs: Sequence[Job], texts: Sequence[Text], data: Path) -> KeyTokens:
    """Read key tokens that a run outside of the sweep chose.

    Args:
        path: file of `scripts.evaluate RUN --write-key-tokens FILE`.
        jobs: runs of the sweep.
        texts: texts to score on.
        data: token shards that the sweep trains on.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, lacks a text, or was written by a run of the sweep.
    """
    key = read_key_tokens(path)
    for text in texts:
        if key.sha256(text.sha256) is None:
            known = ", ".join(f"{c.name} ({c.text_sha256[:12]})" for c in key.choices)
            raise ValueError(
                f"--key-tokens={path} has key tokens of {known}, which must include {text.name} "
                f"({text.sha256[:12]}). Choose them on all texts: scripts.evaluate "
                f"{key.chooser} --write-key-tokens {path} --data FOLDER [FOLDER ...]"
            )
    train_tokens = training_tokens(data)
    for job in jobs:
        its = key.config, key.text_tokens
        check_is_not_chooser(job.folder.name, (job.config, train_tokens), key.chooser, its)
    return key


def is_scored_on(key: KeyTokens, scored: Sequence[Scored], texts: Sequence[Text]) -> bool:
    """Whether a run was scored on these key tokens of every text."""
    return all(
        run.key is not None and run.key.about["sha256"] == key.sha256(text.sha256)
        for run, text in zip(scored, texts, strict=True)
    )


def keep_common(
    runs: Sequence[Sequence[Scored]], texts: Sequence[Text], key: KeyTokens | None
) -> list[list[Scored]]:
    """Drop losses on key tokens that are not those of all runs, and print of which models.

    Args:
        runs: for each run, its scores on each text.
        texts: the texts.
        key: the key tokens of the report. None means those that all scored runs share.
    """
    chosen = {
        tuple(s.key and s.key.about["sha256"] for s in run)
        for run in runs
        if any(s.key for s in run)
    }
    wanted = next(iter(chosen), None) if key is None else tuple(key.sha256(t.sha256) for t in texts)
    if key is None and len(chosen) > 1:
        wanted = None
        print(
            "no LongPPL: the runs were scored on different key tokens. Score them again with one "
            "--key-tokens FILE"
        )
    other = {
        run[0].about["folder"]: run[0].label
        for run in runs
        if tuple(s.key and s.key.about["sha256"] for s in run) != wanted
    }
    if wanted is not None and other:
        print(
            f"no LongPPL for {', '.join(dict.fromkeys(other.values()))}: not scored on the key "
            f"tokens of the report: {', '.join(other)}"
        )
    return [
        [replace(s, key=None) if s.label in {*other.values()} else s for s in run] for run in runs
    ]
