"""requirements.lock has what pyproject.toml requires, and `make LOCKED=1` installs it."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NOT_LOCKED = {"torch", "triton", "setuptools", "papilio"}
REQUIRED = [
    line
    for line in PROJECT["dependencies"] + EXTRAS["train"] + EXTRAS["peers"] + EXTRAS["dev"]
    if Requirement(line).name not in NOT_LOCKED
]
LINES = (ROOT / "requirements.lock").read_text().splitlines()
LOCKED = [Requirement(line) for line in (x.partition("#")[0].strip() for x in LINES) if line]


def name_of(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


@pytest.mark.parametrize("line", REQUIRED)
def test_a_requirement_is_locked_at_an_allowed_version(line: str) -> None:
    required = Requirement(line)
    pins = [pin for x in LOCKED if name_of(x) == name_of(required) for pin in x.specifier]
    assert pins, f"requirements.lock lacks {required.name}: run make lock"
    assert all(required.specifier.contains(pin.version) for pin in pins), f"{pins}: run make lock"


def test_versions_are_exact() -> None:
    assert LOCKED
    for locked in LOCKED:
        assert re.fullmatch(r"==[\w.]+", str(locked.specifier)), locked


def test_pytorch_chooses_triton_and_cuda_packages() -> None:
    names = {name_of(locked) for locked in LOCKED}
    assert not {name for name in names if name in NOT_LOCKED or re.match("nvidia|cuda", name)}


@pytest.mark.parametrize(
    ("locked", "changed", "installs"),
    [
        (1, "README.md", False),
        (1, "requirements.lock", True),
        (0, "requirements.lock", False),
        (0, "pyproject.toml", True),
    ],
)
def test_setup_follows_the_files_that_it_installs(
    locked: int, changed: str, installs: bool, tmp_path: Path
) -> None:
    for record in (".installed", ".installed-locked"):
        (tmp_path / record).touch()
    # Without the variables of a `make test` that runs this test.
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    arguments = ["--dry-run", f"--what-if={changed}", f"VENV={tmp_path}", f"LOCKED={locked}"]
    done = subprocess.run(
        ["make", *arguments, "setup"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("--editable '.[dev]'" in done.stdout) == installs
    assert ("--requirement requirements.lock" in done.stdout) == (installs and locked == 1)
