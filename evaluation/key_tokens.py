"""Key tokens, whose prediction needs distant text. LongPPL is the perplexity on them.

Most tokens do not need distant text, and a mean over all tokens hides those that do. LongPPL (Fang
et al., arXiv 2410.23771) averages over the key tokens only. To choose them, one model predicts all
tokens with a long and with a short history: key tokens are those that a long history makes likely.

The choice favours the model that makes it, because it also takes tokens that this model predicts
well by luck. It must therefore be made by a run that is not compared, and be the same for all runs.
"""

import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from configs.reader import from_yaml, to_yaml
from data.arrays import load_npz
from data.files import parse_json, write_atomically
from data.text.shards import TokenStream
from evaluation.runs import Run, same_training
from evaluation.sums import DAMAGED, sha256_of, well_seen
from evaluation.windows import Scoring
from training.language.config import TrainConfig

MIN_GAIN = 2.0
"""Minimum fall of the loss from the short to the long history, nats: alpha of the paper."""

MAX_LOSS = 2.0
"""Maximum loss with the long history, nats: -beta of the paper."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """Key tokens of one text."""

    name: str  # of the text
    text_sha256: str  # of the validation split
    is_key: np.ndarray  # (n_tokens,) bool


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyTokens:
    """Key tokens of one or more texts, and who chose them."""

    chooser: str  # folder of the run
    step: int
    text_tokens: int | None  # length of its training text, if known
    config: TrainConfig
    long: Scoring
    short: Scoring
    choices: tuple[Choice, ...]
    min_gain: float
    max_loss: float

    def of(self, stream: TokenStream) -> Choice:
        """Key tokens of a validation split.

        Raises:
            ValueError: they were chosen on another text.
        """
        found = sha256_of(stream)
        for choice in self.choices:
            if choice.text_sha256 == found:
                return choice
        known = ", ".join(f"{c.name} ({c.text_sha256[:12]})" for c in self.choices)
        raise ValueError(
            f"the key tokens of {self.chooser} are of the texts {known}, which must include "
            f"{stream.path} ({found[:12]}). Choose key tokens of this text: scripts.evaluate "
            f"{self.chooser} --data {stream.path} --write-key-tokens FILE"
        )

    def check_texts(self, streams: Iterable[TokenStream]) -> None:
        """Raise ValueError if there are no key tokens of one of these texts."""
        for stream in streams:
            self.of(stream)

    def covers(self, n_tokens: int) -> np.ndarray:
        """(n_tokens,) bool: tokens that could be chosen, because they see nearly both histories."""
        return well_seen((self.long, self.short), n_tokens)

    def sha256(self, text_sha256: str) -> str | None:
        """Hash of the key tokens of a text and of how they were chosen, or None if unknown."""
        for choice in self.choices:
            if choice.text_sha256 == text_sha256:
                facts = json.dumps({**self.facts(), "text": text_sha256}).encode()
                return sha256(facts + np.packbits(choice.is_key).tobytes()).hexdigest()
        return None

    def about(self, stream: TokenStream, counted: np.ndarray) -> dict[str, Any]:
        """Describe the key tokens of a text, in JSON types. `counted` is an (n_tokens,) mask.

        sha256: identity of the key tokens and of their choice.
        tokens, of_tokens: number of key tokens, and of tokens that could be, among those counted.
        """
        choice = self.of(stream)
        covered = counted & self.covers(len(counted))
        return {
            "sha256": self.sha256(choice.text_sha256),
            "chooser": self.chooser,
            "step": self.step,
            "long": self.long.history,
            "short": self.short.history,
            "min_gain": self.min_gain,
            "max_loss": self.max_loss,
            "tokens": int((covered & choice.is_key).sum()),
            "of_tokens": int(covered.sum()),
        }

    def summary(self) -> str:
        """Number and share of the key tokens of each text, in words."""
        parts = []
        for choice in self.choices:
            n, of = int(choice.is_key.sum()), int(self.covers(len(choice.is_key)).sum())
            share = f"{n / of:.2%}" if of else "none"
            parts.append(f"{n:,} key tokens of {choice.name}, {share} of {of:,}")
        return "; ".join(parts)

    def check_some(self) -> None:
        """Raise ValueError if no text has a key token."""
        if not any(choice.is_key.any() for choice in self.choices):
            raise ValueError(
                f"{self.chooser} must choose at least one key token, but it found "
                f"{self.summary()}: tokens whose loss falls by more than {self.min_gain:g} nats, "
                f"to less than {self.max_loss:g}, with {self.long.history:,} instead of "
                f"{self.short.history:,} tokens before them. Try a shorter --near, a longer text "
                "(--data), or a run that was trained longer"
            )

    def facts(self) -> dict[str, Any]:
        """How the key tokens were chosen, except for the configuration of the run."""
        names = "chooser", "step", "text_tokens", "min_gain", "max_loss"
        scorings = {"long": asdict(self.long), "short": asdict(self.short)}
        return {name: getattr(self, name) for name in names} | scorings


Settings = tuple[TrainConfig, int | None]  # of a run, with the length of its training text if known


def settings_of(run: Run) -> Settings:
    """Settings that identify a training."""
    return run.config, run.text_tokens


def is_same_run(a: Settings, b: Settings) -> bool:
    """Whether these are settings of one training, perhaps of different length."""
    n_tokens = {a[1], b[1]}
    return (len(n_tokens) == 1 or None in n_tokens) and same_training(a[0], b[0])


def check_is_not_chooser(run: str, settings: Settings, chooser: str, its: Settings) -> None:
    """Raise ValueError if `run` has the settings and the seed of `chooser`, and so is that run."""
    if is_same_run(settings, its):
        raise ValueError(
            f"{run} has the settings and the seed of {chooser}, which chooses the key tokens. Such "
            "a choice favours the run itself: leave the run out, or let another seed choose "
            "(--key-tokens)"
        )


def choose(
    run: Run,
    scorings: Sequence[Scoring],
    streams: Iterable[TokenStream],
    losses: Callable[[TokenStream, Scoring], np.ndarray],
) -> KeyTokens:
    """Choose the key tokens of texts.

    Args:
        run: the run that chooses.
        scorings: its scorings with a long and with a short history.
        streams: validation splits.
        losses: function that returns the (n_tokens,) losses of the run.
    """
    (long, short), choices = scorings, []
    for stream in streams:
        with_long, with_short = losses(stream, long), losses(stream, short)
        # NaN, of tokens that are not scored, compares as False
        is_key = (with_short - with_long > MIN_GAIN) & (with_long < MAX_LOSS)
        is_key &= well_seen((long, short), len(stream))
        name = stream.path.resolve().name
        choices.append(Choice(name=name, text_sha256=sha256_of(stream), is_key=is_key))
    return KeyTokens(
        chooser=run.folder.resolve().name,
        step=run.progress.step,
        text_tokens=run.text_tokens,
        config=run.config,
        long=long,
        short=short,
        choices=tuple(choices),
        min_gain=MIN_GAIN,
        max_loss=MAX_LOSS,
    )


def default_chooser(runs: Sequence[Run], labels: Sequence[str]) -> Run | None:
    """Select the run that chooses the key tokens if no other run does, or return None.

    It is a seed of a model with the longest context, which can use the most distant text. A choice
    favours the other seeds of its model a little. So if several models have this context, the first
    chooses, as the others are compared with it: their gains are then not due to the choice.

    All runs of its seed number are left out (`left_out`), because they may share initial weights
    with it. Each model must keep a run. Of several seeds, the one that leaves out the fewest runs
    chooses, or else the last.
    """
    longest = max(run.config.model.context_length for run in runs)
    for label in dict.fromkeys(labels):
        candidates = []
        for run, name in zip(runs, labels, strict=True):
            out = left_out(runs, run)
            kept = {n for r, n in zip(runs, labels, strict=True) if r.folder not in out}
            if name == label and kept == {*labels} and run.config.model.context_length == longest:
                candidates.append((len(out), -run.seed_number, run))
        if candidates:
            return min(candidates, key=lambda candidate: candidate[:2])[2]
    return None


def left_out(runs: Iterable[Run], chooser: Run) -> set[Path]:
    """Folders of the runs that are not compared if `chooser`, one of them, chooses key tokens."""
    return {
        run.folder
        for run in runs
        if run.seed_number == chooser.seed_number
        or is_same_run(settings_of(run), settings_of(chooser))
    }


def write_key_tokens(key: KeyTokens, path: Path) -> None:
    """Write key tokens to a file, atomically: a bit per token, compressed."""
    facts = {
        **key.facts(),
        "config": to_yaml(key.config),
        "texts": [
            {"name": c.name, "text_sha256": c.text_sha256, "tokens": len(c.is_key)}
            for c in key.choices
        ],
    }
    bits = {f"bits_{n}": np.packbits(choice.is_key) for n, choice in enumerate(key.choices)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, facts=np.array(json.dumps(facts)), **bits)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def read_key_tokens(path: Path) -> KeyTokens:
    """Read a file of `write_key_tokens`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of another kind.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"--key-tokens={path} does not exist. It must be the folder of a run that is not "
            "compared, or a file of scripts.evaluate RUN --write-key-tokens FILE"
        )
    try:
        saved = load_npz(path)
        facts, choices = parse_json(str(saved["facts"])), []
        for n, text in enumerate(facts.pop("texts")):
            bits, n_tokens = saved[f"bits_{n}"], text.pop("tokens")
            if bits.dtype != np.uint8 or bits.shape != (-(-n_tokens // 8),):
                raise ValueError(f"{bits.shape} bytes of {bits.dtype} for {n_tokens} tokens")
            is_key = np.unpackbits(bits, count=n_tokens).astype(bool)
            choices.append(Choice(is_key=is_key, **text))
        scorings = {name: Scoring(**facts.pop(name)) for name in ("long", "short")}
        config = from_yaml(TrainConfig, facts.pop("config"))
        return KeyTokens(config=config, choices=tuple(choices), **scorings, **facts)
    except DAMAGED as error:
        raise ValueError(
            f"--key-tokens={path} is damaged, or is not a file of scripts.evaluate RUN "
            f"--write-key-tokens FILE ({error}). Copy it again, or choose the key tokens again"
        ) from error
