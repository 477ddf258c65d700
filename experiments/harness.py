"""Measurement commands: options, the check for a GPU, and reports.

Nothing here imports PyTorch before `Command.read` has parsed the command line. The import takes
seconds, so --help and wrong options are answered first.
"""

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from training.command_line import command_parser, exit_on_ctrl_c, user_errors_as_messages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from evaluation.results import Row
    from experiments.results import Stage

Result = dict[str, Any]
Table = Callable[[Result], str]  # Markdown
Draw = Callable[[Result], "Figure | None"]
Check = Callable[[Namespace], None]


class Command:
    """A module that `python -m` runs: its options, and the function that receives them.

    The module starts with its options, before slow imports, and ends with `main`:

        command = Command(__name__, on_gpu=True)
        command.add("--steps", type=int, default=20)
        command.read(out="docs/results/speed.json", resume=True)

        import torch
        ...

        @command.main
        def main(args: Namespace) -> None:
            measure_rows(args, [partial(measure, args.steps)], speed_table)

    --help starts with the docstring of the module.
    """

    def __init__(self, name: str, *, on_gpu: bool = False) -> None:
        """Create a command without options; `name` is the `__name__` of its module.

        With `on_gpu`, the command fails if PyTorch finds no GPU.
        """
        module = sys.modules[name]
        self._runs, self._on_gpu = name == "__main__", on_gpu
        self._parser = command_parser(module.__doc__, module.__spec__)
        self.add = self._parser.add_argument

    def read(
        self, *, out: str | None = None, resume: bool = False, check: Check = lambda args: None
    ) -> None:
        """Finish the options, and parse the command line if this module is being run.

        Args:
            out: add --out, with this file as its default.
            resume: add --resume, for `measure_rows`.
            check: raises ValueError for invalid combinations of options.
        """
        if resume:
            self.add("--resume", action="store_true", help="continue an interrupted run")
        if out is not None:
            self.add("--out", type=Path, default=Path(out))
        self._check = check
        if self._runs:
            exit_on_ctrl_c()
            with user_errors_as_messages():
                self._parse(None)

    def _parse(self, argv: Sequence[str] | None) -> Namespace:
        args = self._parser.parse_intermixed_args(argv)
        try:
            self._check(args)
        except ValueError as error:
            self._parser.error(str(error))
        return args

    def main(self, run: Callable[[Namespace], None]) -> Callable[[Sequence[str] | None], None]:
        """Turn `run` into a function of argv, and call it if this module is being run."""

        @wraps(run)
        def main(argv: Sequence[str] | None) -> None:
            args = self._parse(argv)
            if self._on_gpu:
                import torch

                if not torch.cuda.is_available():
                    raise SystemExit("this command needs a GPU, but PyTorch finds none")
            run(args)

        if self._runs:
            with user_errors_as_messages():
                main(None)
        return main


def measure_rows(
    args: Namespace,
    stages: "Iterable[Stage]",
    table: Table | None = None,
    relate: "Callable[[list[Row]], None]" = lambda rows: None,
    *,
    draw: Draw | None = None,
    **values: Any,
) -> "list[Row]":
    """Measure the rows of a result, write them with `collect_rows`, and print their table.

    `args` has `out`, and `resume` if the command has that option. `table` and `draw` are those of
    `write_and_print`, and all others those of `collect_rows`.
    """
    from experiments.results import collect_rows

    resume = getattr(args, "resume", False)
    rows = collect_rows(args.out, stages, relate, resume=resume, **values)
    _report(args.out, {**values, "rows": rows}, table, draw)
    return rows


def write_and_print(path: Path, result: Result, table: Table, draw: Draw | None = None) -> None:
    """Write a result as JSON, save the picture from `draw` next to it, and print its table."""
    from evaluation.results import write_result

    write_result(path, result)
    _report(path, result, table, draw)


def _report(path: Path, result: Result, table: Table | None, draw: Draw | None) -> None:
    from evaluation.results import read_result
    from evaluation.style import save
    from experiments import history

    history.append(path, read_result(path))
    if figure := draw(result) if draw is not None else None:
        save(figure, path.with_suffix(".png"))
    if table is not None:
        print(table(result))
    print(f"wrote {path}" + (" and its picture" if figure is not None else ""))


def load_module(name: str, file: Path) -> ModuleType:
    """Import a Python file of another project as a module with this name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
