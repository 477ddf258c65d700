"""The options, the checks and the files of a measuring command."""

import json
import sys
from types import ModuleType

import pytest
import torch
from matplotlib.figure import Figure

from experiments.harness import Command, measure_rows, write_and_print


def refuse_three(args):
    if args.steps == 3:
        raise ValueError("--steps=3 is one too many")


@pytest.fixture
def command(monkeypatch):
    """Make a command and what its function was given, as a module that is imported does."""
    monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up", "Measure nothing."))

    def make(**options):
        given = []
        made = Command("made_up", **options)
        made.add("--steps", type=int, default=2)
        made.read(out="docs/results/made_up.json", resume=True, check=refuse_three)
        return made.main(given.append), given

    return make


def test_options_are_passed_on(command, capsys):
    main, given = command()
    main(["--steps", "4"])
    (args,) = given
    assert (args.steps, str(args.out), args.resume) == (4, "docs/results/made_up.json", False)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "Measure nothing." in capsys.readouterr().out


def test_options_that_do_not_go_together_are_refused(command, capsys):
    main, given = command()
    with pytest.raises(SystemExit) as exited:
        main(["--steps", "3"])
    assert exited.value.code == 2 and not given
    assert "error: --steps=3 is one too many" in capsys.readouterr().err


def test_a_gpu_is_needed_by_some(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main, given = command(on_gpu=True)
    with pytest.raises(SystemExit, match="needs a GPU, but PyTorch finds none"):
        main([])
    assert not given
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    main([])
    assert len(given) == 1


def test_the_command_that_runs_ends_in_a_sentence(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["made_up", "--steps", "4"])
    command = Command("__main__")
    command.add("--steps", type=int)
    command.read()

    def fail(args):
        raise ValueError(f"--steps={args.steps} cannot be")

    with pytest.raises(SystemExit, match="^error: --steps=4 cannot be$"):
        command.main(fail)


def broken():
    yield [{"ms": 3}]
    raise ValueError("the GPU is gone")


def test_rows_are_measured_and_resumed(command, tmp_path, capsys):
    main, given = command()
    main(["--out", str(tmp_path / "rows.json")])
    stage, seen = (lambda: [[{"ms": 2}]]), []
    with pytest.raises(ValueError, match="the GPU is gone"):
        measure_rows(given[0], [stage, broken], device="a made-up GPU")
    assert not (tmp_path / "rows.json").exists()
    given[0].resume = True
    measure_rows(
        given[0], [broken, stage],
        lambda result: f"{len(result['rows'])} rows of {result['device']}",
        lambda rows: seen.append(len(rows)), device="a made-up GPU",
    )  # fmt: skip
    result = json.loads((tmp_path / "rows.json").read_text())
    assert result["rows"] == [{"ms": 2}] * 2 and result["device"] == "a made-up GPU"
    assert seen == [2]
    printed = f"2 rows of a made-up GPU\nwrote {tmp_path / 'rows.json'}\n"
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("drawn", [True, False])
def test_a_picture_is_written_where_there_is_one(drawn, tmp_path, capsys):
    out = tmp_path / "result.json"
    draw = lambda result: Figure() if drawn else None  # noqa: E731
    write_and_print(out, {"value": 1}, lambda result: f"it is {result['value']}", draw)
    assert json.loads(out.read_text())["value"] == 1
    assert out.with_suffix(".png").exists() == drawn
    ending = " and its picture" * drawn
    assert capsys.readouterr().out == f"it is 1\nwrote {out}{ending}\n"
