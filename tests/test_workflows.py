"""GitHub workflows: pinned actions, few permissions, and the versions pyproject.toml names."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CI, NIGHTLY = (
    yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    for name in ("ci", "nightly")
)
TESTED = CI["jobs"]["test"]["strategy"]["matrix"]["include"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_hash_and_may_only_read(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    jobs = content["jobs"].values()
    assert not any("permissions" in job for job in jobs)
    actions = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert actions and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", uses) for uses in actions)


def test_oldest_allowed_versions_are_tested() -> None:
    torch = next(x for x in map(Requirement, PROJECT["dependencies"]) if x.name == "torch")
    (oldest,) = (bound.version for bound in torch.specifier if bound.operator == ">=")
    python = PROJECT["requires-python"].removeprefix(">=")
    assert {"python": python, "torch": f"torch=={oldest}.0"} in TESTED


def test_newest_named_python_is_tested_with_the_newest_pytorch() -> None:
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))
    assert {"python": f"3.{max(map(int, named))}", "torch": "torch"} in TESTED


def test_oldest_allowed_triton_compiles_the_hopper_kernels() -> None:
    triton = next(x for x in map(Requirement, PROJECT["dependencies"]) if x.name == "triton")
    (oldest,) = (bound.version for bound in triton.specifier if bound.operator == ">=")
    assert f"{oldest}.0" in NIGHTLY["jobs"]["test-compile"]["strategy"]["matrix"]["triton"]
