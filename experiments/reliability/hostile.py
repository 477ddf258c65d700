"""Replace each file that a command reads by one that runs code when it is unpickled."""

import pickle
import shutil
from pathlib import Path

import train
from evaluation.results import Row
from experiments.reliability.dots import CPU
from experiments.reliability.world import FINE, Tally, World, outcome
from scripts import evaluate, export_hf, import_hf, plot_run, prepare_text, sample

RUN_FILES = (
    *("config.yaml", "state.json", "SHA256SUMS", "metrics.jsonl", "environments.json"),
    *("tokenizer.json", "manifest.json", "config.json", "model.safetensors"),
    *("optimizer.safetensors", "processes.safetensors", "best.safetensors"),
    *("train_00000.bin", "train_00000.offsets.npy", "val_00000.offsets.npy", "train.images.npy"),
)
HOSTILE = (*RUN_FILES, ".metadata", "__0_0.distcp", "pytorch_model.bin")


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _payloads(name: str, went_off: Path) -> list[bytes]:
    if name.endswith(".yaml"):
        return [f"a: !!python/object/apply:pathlib.Path.touch ['{went_off}']\n".encode()]
    payload = pickle.dumps(Bomb(went_off))
    if name.endswith(".npy"):  # the header of an object array, then the pickle
        header = b"{'descr': '|O', 'fortran_order': False, 'shape': (2,), }".ljust(117) + b"\n"
        return [payload, b"\x93NUMPY\x01\x00\x76\x00" + header + payload]
    return [payload]


def commands(world: World) -> dict[str, tuple]:
    """Commands that open runs, data and models, by name: the function, then its arguments."""
    folder = world.folder
    run, data = folder / "hostile", folder / "hostile_text"
    gpt = (world.config, f"data.path={data}")
    classes = (world.classes, *CPU)
    return {
        "train.py": (train.main, *gpt, f"run.out_dir={run}", "optim.max_steps=9"),
        "run.init_from": (
            train.main, *gpt, f"run.init_from={run}", f"run.out_dir={folder / 'new'}",
        ),
        "train.py, a classifier": (train.main, *classes, f"run.out_dir={run}"),
        "run.init_from, a classifier": (
            train.main, *classes, f"run.init_from={run}", f"run.out_dir={folder / 'new'}",
        ),
        "evaluate": (
            evaluate.main, run, "--data", data, "--device", "cpu", "--out", folder / "report",
        ),
        "sample": (sample.main, run, "--prompt", "the", "--tokens", "2"),
        "export_hf": (export_hf.main, run, folder / "exported"),
        "import_hf": (
            import_hf.main, folder / "hostile_gpt2", "--out", folder / "imported", "--data", data,
        ),
        "plot_run": (plot_run.main, run, "--out", folder / "plot.png"),
        "prepare_text": (
            prepare_text.main, folder / "train.jsonl", "--tokenizer", run / "tokenizer.json",
            "--out", folder / "new_text",
        ),
    }  # fmt: skip


def copies(world: World, command: str) -> list[Path]:
    """Copy all folders that the command reads, in place of earlier copies."""
    run = world.copy("classifier" if "classifier" in command else "gpt", "hostile")
    for leftover in ("new", "exported", "imported", "new_text"):
        shutil.rmtree(world.folder / leftover, ignore_errors=True)
    others = [world.copy(name, f"hostile_{name}") for name in ("text", "gpt2")]
    # a classifier's data has a single path
    others.insert(1, world.copy("whole_dots", "dots"))
    return [run, max((run / "checkpoints").iterdir()), *others]


def _put(name: str, payload: bytes, folders: list[Path]) -> None:
    """Write the payload over a file in all folders, or where an older version had it."""
    _, checkpoint, *_, gpt2 = folders
    if name == "pytorch_model.bin":
        (gpt2 / "model.safetensors").unlink()
        (gpt2 / name).write_bytes(payload)
    elif name in (".metadata", "__0_0.distcp"):
        (checkpoint / name).write_bytes(payload)
    for folder in folders:
        if (folder / name).exists():
            (folder / name).write_bytes(payload)


def prepare(world: World) -> None:
    """Create once the files that all commands read."""
    if not (world.folder / "gpt2").exists():
        world.copy("dots", "whole_dots")
        export_hf.main([str(world.folder / "gpt"), str(world.folder / "gpt2")])


def hostile(world: World) -> Row:
    """Try each command with each file made hostile, whether the command reads it or not."""
    prepare(world)
    for command, (main, *arguments) in commands(world).items():
        copies(world, command)
        assert outcome(main, *arguments).ended == FINE, command  # each works with intact files
    tally, went_off = Tally("hostile files"), world.folder / "went_off"
    for name in HOSTILE:
        for command, (main, *arguments) in commands(world).items():
            for payload in _payloads(name, went_off):
                _put(name, payload, copies(world, command))
                ended, error, _ = outcome(main, *arguments)
                tally.add(ended, f"{name} by {command}", error)
                if went_off.exists():
                    tally.fail("leak", f"{name} by {command} was executed")
                    went_off.unlink()
    return tally.row(refused=tally.refused)
