"""Commands answer before they load PyTorch, which takes seconds."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    path
    for room in ("scripts", "experiments", "evaluation")
    for path in ROOT.glob(f"{room}/**/*.py")
]
ENDINGS = (
    '"__main__":\n    with user_errors_as_messages():\n',
    "\n@command.main\n",
    "\ncommand.main(",
    "main())",
)
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in FILES
    if any(ending in path.read_text() for ending in ENDINGS)
)
HELP = """
import runpy, sys
sys.modules["torch"] = None  # so that importing it is an error
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_path(name, run_name="__main__") if name.endswith(".py") else runpy.run_module(
            name, run_name="__main__", alter_sys=True
        )
    except SystemExit as end:
        assert end.code in (0, None), (name, end.code)
"""
TRAIN = """
import runpy, sys
sys.modules["torch"] = None
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_command_runs_when_all_its_functions_exist() -> None:
    for path in FILES:
        text = path.read_text()
        if "\n@command.main\n" in text:
            last = ast.parse(text).body[-1]
            assert isinstance(last, ast.FunctionDef) and last.decorator_list, path


def test_help_needs_no_pytorch() -> None:
    done = run(HELP, "train.py", *COMMANDS)
    assert done.returncode == 0, done.stderr
    assert len(COMMANDS) == 46
    assert done.stdout.count("usage: ") == len(COMMANDS)  # train.py, and all but the quickstart


def test_a_wrong_option_needs_no_pytorch() -> None:
    program = HELP.replace('"--help"', '"--wrong"').replace("(0, None)", "(2,)")
    commands = [name for name in COMMANDS if name != "scripts.quickstart"]  # which takes key=value
    done = run(program, *commands)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(commands)


@pytest.mark.parametrize(
    ("config", "override", "sentence"),
    [
        ("quickstart", "optim.inertia=1", "optim.inertia is not a setting: "),
        ("quickstart", "data.path=nowhere", "data.path=nowhere does not exist; create it "),
        ("lra/image", "run.exportable=true", "run.exportable=true must be false for a classifier"),
        ("lra/image", "data.path=nowhere", "data.path=nowhere is not prepared; make it with"),
    ],
)
def test_a_run_that_cannot_start_needs_no_pytorch(config: str, override: str, sentence: str):
    done = run(TRAIN, f"configs/{config}.yaml", override)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {sentence}"), done.stderr
