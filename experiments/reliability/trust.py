"""Untrusted runs, data and models: no leak of secrets, no traceback, no hang."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from data.files import sealed
from evaluation import report
from evaluation.results import Row
from experiments.reliability.hostile import RUN_FILES, commands, copies, prepare
from experiments.reliability.world import FINE, Tally, World, outcome, remove
from scripts import evaluate, passkey
from training.checkpoint.files import SUMS, write_sums

SECRET = "s3cr3t-of-the-reader"

Change = Callable[[Path], object]
"""Change a file of a copy."""
FILES = (*RUN_FILES, ".verified.json", "evaluation.json")


def _all_copies(world: World, command: str) -> list[Path]:
    """Copy all folders that the command reads, in place of earlier copies."""
    return [*copies(world, command), world.copy("made_report", "hostile_report")]


def _all_commands(world: World) -> dict[str, tuple]:
    """Commands of hostile.py, and others that read more of a run."""
    run, data = world.folder / "hostile", world.folder / "hostile_text"
    out = world.folder / "found"
    keys = ("--lengths", "160", "--trials", "2", "--depths", "0.5", "--device", "cpu")
    return commands(world) | {
        "passkey": (passkey.main, run, "--data", data, "--out", out, *keys),
        "report": (report.main, world.folder / "hostile_report"),
    }


def _believable(path: Path) -> None:
    """Update the checksums and seals of a changed file, as its author would."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 24:
        return
    if path.name == "manifest.json":
        try:
            values = json.loads(path.read_text())
        except (ValueError, RecursionError):
            return
        if isinstance(values, dict):
            values.pop("sha256_of_the_rest", None)
            path.write_text(json.dumps(sealed(values)))
    sums = path.parent / SUMS
    if sums.exists() and path.name in ("state.json", "model.safetensors"):
        sums.unlink()
        write_sums(path.parent)


def _holders(world: World) -> set[Path]:
    """Find files of the world that contain the secret, without following links."""
    holders = set()
    for folder, _, names in os.walk(world.folder):
        for path in (Path(folder) / name for name in names):
            readable = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26
            if readable and SECRET.encode() in path.read_bytes():
                holders.add(path)
    return holders


def _row(
    world: World,
    fault: str,
    changes: dict[tuple[str, str], Change],
    n: int,
    must_refuse: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Row:
    """Try n changes of files, each with one command.

    Args:
        world: data and runs to copy.
        fault: name of the row.
        changes: by name of the file and of the change.
        n: number of tries.
        must_refuse: by name of a change, the commands that must fail.
    """
    prepare(world)
    made = world.folder / "made_report"
    if not made.exists():
        data = world.folder / "text"
        evaluate.main([*map(str, (world.folder / "gpt", "--data", data, "--out", made))])
        shutil.rmtree(world.folder / "gpt" / "scores")
    cases = [
        (case, command)
        for case in changes
        for command in _all_commands(world)
        # only this command reads a report's file, and drawing takes a second
        if (case[0] == report.RESULT) == (command == "report")
    ]
    random.Random(fault).shuffle(cases)
    tally = Tally(fault)
    os.environ["SECRET"] = SECRET
    try:
        for (name, change), command in cases:
            folders = _all_copies(world, command)
            paths = [folder / name for folder in folders if (folder / name).exists()]
            if not paths:  # the command reads no such file
                continue
            if tally.tries == n:
                break
            for path in paths:
                changes[name, change](path)
                _believable(path)
            holders = _holders(world)
            main, *arguments = _all_commands(world)[command]
            ended, _, printed = outcome(main, *arguments)
            place = f"{name}, {change}, by {command}"
            tally.add(ended, place, printed[-300:])
            if leaks := _holders(world) - holders:
                tally.fail("leak", f"{place}: in {', '.join(path.name for path in leaks)}")
            elif SECRET in printed:
                tally.fail("leak", f"{place}: {printed[-300:]}")
            elif ended == FINE and command in must_refuse.get(change, ()):
                tally.fail("silent", f"{place}: {printed[-300:]}")
            for path in paths:  # the next copy cannot overwrite links and pipes
                remove(path)
    finally:
        del os.environ["SECRET"]
    return tally.row(refused=tally.refused)


# Changes of a file


def _of(change: Callable[..., object]) -> Callable[..., Change]:
    """Decorator: take the arguments of a change first, and its path later."""
    return lambda *arguments, **values: lambda path: change(path, *arguments, **values)


@_of
def _text(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@_of
def _replaced(path: Path, old: str, new: str) -> None:
    """Replace `old` in a text file, and drop the rest of its line."""
    lines = path.read_text().split("\n")
    path.write_text("\n".join(l.split(old)[0] + old + new if old in l else l for l in lines))


@_of
def _json(path: Path, **values: object) -> None:
    """Set values of a JSON file; section__name sets a value in a section."""
    content = json.loads(path.read_text())
    for key, value in values.items():
        section, names = content[0] if isinstance(content, list) else content, key.split("__")
        for name in names[:-1]:
            section = section.setdefault(name, {})
        section[names[-1]] = value
    path.write_text(json.dumps(content))


@_of
def _record(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line + "\n")


@_of
def _link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


@_of
def _not_finite(path: Path, value: float) -> None:
    tensors = load_file(path)
    name = next(name for name, x in tensors.items() if x.is_floating_point())
    tensors[name].view(-1)[0] = value
    save_file(tensors, path)


def _sparse_terabyte(path: Path) -> None:
    os.truncate(path, 1 << 40)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _header(shape: str, descr: str = "'<i8'") -> Change:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = header.ljust(117) + b"\n"
    return _text(b"\x93NUMPY\x01\x00\x76\x00" + header + bytes(64))


def _other_meaning(path: Path) -> None:
    """Change the text of a tokenizer's ids, but not their number."""
    spec = json.loads(path.read_text())
    merges = spec["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    path.write_text(json.dumps(spec))


INTERPOLATIONS = ("${oc.env:SECRET}", "${oc.decode:${oc.env:SECRET}}", "${env:SECRET}", "$SECRET")
PRIVATE = (
    SECRET,
    f"{SECRET}: {SECRET}\n",
    f"model: {SECRET}\ndata: [{SECRET}]\n",
    json.dumps({SECRET: SECRET}),
    json.dumps([SECRET]),
    f'{{"step": "{SECRET}"}}\n',
    f"[default]\nkey = {SECRET}\n",
)
MALFORMED = {
    "empty": "",
    "a list": f"- {SECRET}",
    "a scalar": SECRET,
    "a section of a list": f"optim: [{SECRET}]",
    "an unknown key": f"run: {{of_the_future: {SECRET}}}",
    "a key twice": f"task: language\ntask: {SECRET}",
    "a bomb of aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]",
    "a tag": f"task: !!python/name:os.{SECRET}",
    "a tab": f"task:\n\t{SECRET}",
    "NUL": f"task: {SECRET}\0",
    "not UTF-8": b"task: \xff",
    "deep": "[" * 5000,
    "a long number": f"optim: {{max_steps: {'9' * 5000}}}",
    "a date": "run: {out_dir: 2024-01-01}",
}
OPENS = frozenset(("run.init_from", "evaluate", "sample", "export_hf", "passkey"))
"""Commands that read the weights and the tokenizer of a run."""
WRONG = (None, [], {}, "x", -1, 10**400, 1e999, True, [[[]]], {"a": {"a": {}}})
SETTINGS = {
    "metrics.jsonl": ("step", "loss", "val_loss", "tokens", "gpu_hours", "tokens_per_s"),
    "environments.json": ("from_step", "before", "device", "torch", "commit", "world_size"),
    "state.json": (
        *("progress", "must_match", "config", "progress__step", "progress__tokens"),
        *("must_match__tokenizer", "must_match__training tokens", "config__model", "config__task"),
        *("config__model__n_layer", "config__model__vocab_size", "config__optim__betas"),
        *("config__run__out_dir", "config__data__mix", "config__model__mask"),
    ),
    "manifest.json": ("format_version", "splits", "tokenizer", "settings", "dtype", "kind", "task"),
    "evaluation.json": ("data", "strided", "runs", "chunk", "control", "environment", "data__name"),
    "config.json": ("model_type", "n_layer", "n_embd", "vocab_size", "attn_pdrop", "n_inner"),
}


def secrets(world: World, n: int) -> Row:
    """Interpolations, malformed configurations, and links to private files of the user."""
    changes: dict[tuple[str, str], Change] = {}
    for text in INTERPOLATIONS:
        for key in ("init_from:", "path:", "task:", "lr:", "wandb_project:"):
            changes["config.yaml", f"{key} {text}"] = _replaced(key, f' "{text}"')
        for key in ("config__run__init_from", "config__data__path", "config__optim__schedule"):
            changes["state.json", f"{key} {text}"] = _json(**{key: text})
    for kind, content in MALFORMED.items():
        changes["config.yaml", kind] = _text(content)
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(PRIVATE):
            private = Path(folder) / str(number)
            private.write_text(content)
            for name in FILES:
                changes[name, f"a link to private text {number}"] = _link(private)
        return _row(world, "somebody's run: secrets", changes, n)


def wrong_types(world: World, n: int) -> Row:
    """Values of wrong types or out of range, with valid checksums and seals."""
    changes: dict[tuple[str, str], Change] = {}
    for name, keys in SETTINGS.items():
        for key in keys:
            for value in WRONG:
                change = f"{key} = {value!r}"[:60]
                record = json.dumps({"step": 8, "loss": 1.0} | {key: value})
                lines = name == "metrics.jsonl"
                changes[name, change] = _record(record) if lines else _json(**{key: value})
    return _row(world, "somebody's run: wrong types", changes, n)


def absurd_sizes(world: World, n: int) -> Row:
    """Files that have or declare more data than a machine holds, and pipes or folders instead."""
    changes: dict[tuple[str, str], Change] = {}
    for name in FILES:
        changes[name, "a sparse terabyte"] = _sparse_terabyte
        changes[name, "a pipe"] = _pipe
        changes[name, "a folder"] = _folder
        if name.endswith(".npy"):
            for shape in (f"({1 << 40},)", f"({1 << 70}, {1 << 70})", "(-1,)", "(" * 60 + ")" * 60):
                changes[name, f"the shape {shape[:40]}"] = _header(shape)
            changes[name, "objects"] = _header("(2,)", "'|O'")
        if name.endswith(".safetensors"):
            changes[name, "a header of a terabyte"] = _text((1 << 40).to_bytes(8, "little"))
    for key, value in (("n_layer", 10_000), ("n_embd", 2**20), ("context_length", 2**30)):
        changes["state.json", f"{key} = {value}"] = _json(**{f"config__model__{key}": value})
        changes["config.json", f"{key} = {value}"] = _json(**{key: value})
    return _row(world, "somebody's run: absurd sizes", changes, n)


def other_weights(world: World, n: int) -> Row:
    """Another tokenizer, and weights that are not finite: commands must reject them."""
    changes: dict[tuple[str, str], Change] = {
        ("tokenizer.json", "of other meaning"): _other_meaning,
        ("tokenizer.json", "another decoder"): _json(decoder=None),
        ("model.safetensors", "NaN"): _not_finite(torch.nan),
        ("model.safetensors", "infinite"): _not_finite(-np.inf),
    }
    must_refuse = dict.fromkeys((change for _, change in changes), OPENS)
    must_refuse["another decoder"] = OPENS - {"run.init_from"}
    return _row(world, "another tokenizer, broken weights", changes, n, must_refuse)
