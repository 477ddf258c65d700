"""The wheel installs papilio.kernels, and no other package of the checkout; it is fit for PyPI."""

import re
import shutil
import subprocess
import sys
import sysconfig
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILT_FROM = ("pyproject.toml", "LICENSE", "kernels", "papilio")
README_PROGRAMS = [
    re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text(), re.DOTALL | re.MULTILINE)[0]
    for file in ("README.md", "papilio/README.md")
]
USE = (ROOT / "tests/use_wheel.py").read_text()  # also run by CI, with the wheel alone
USE_WITH_TRANSFORMERS = """
papilio.register_with_transformers()
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
config = LlamaConfig(vocab_size=9, **sizes, attn_implementation="papilio")
print(LlamaForCausalLM(config)(torch.arange(8)[None]).logits.shape)
print(papilio.__file__, papilio.__version__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from the source distribution of a copy, because a build leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    run("build", "--no-isolation", source)
    return next((source / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as content:
        name = next(n for n in content.namelist() if n.endswith("METADATA"))
        return message_from_bytes(content.read(name))


def run(module: str, *arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_installs_one_package(wheel: Path) -> None:
    files = {Path(name) for name in ZipFile(wheel).namelist()}
    folders = {file.parts[0] for file in files}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"papilio"}
    kernels = {f.relative_to(ROOT / "kernels") for f in (ROOT / "kernels").rglob("*.py")}
    installed = {f.relative_to("papilio/kernels") for f in files if f.parts[1] == "kernels"}
    assert installed == kernels
    others = {f for f in files if f.parts[0] == "papilio" and f.parts[1] != "kernels"}
    assert others == {Path("papilio/__init__.py"), Path("papilio/flash_attn.py")}


def test_requires_only_what_attention_needs(metadata: Message) -> None:
    needed = [x for x in metadata.get_all("Requires-Dist", []) if "extra ==" not in x]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in needed}
    assert names == {"torch", "triton", "numpy"}


def test_distributions_pass_the_checks_of_pypi(wheel: Path) -> None:
    run("twine", "check", "--strict", *wheel.parent.iterdir())


def test_metadata_is_complete(metadata: Message) -> None:
    for field in ("Author", "Classifier", "Keywords", "License-Expression", "License-File"):
        assert metadata[field], field
    description = metadata.get_payload()
    assert description == (ROOT / "papilio/README.md").read_text()
    assert not re.findall(r"\]\((?!https://)[^)]*\)", description), "PyPI shows no relative links"


@pytest.mark.slow
def test_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    run("pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    # Share the packages of this environment, but not the checkout, which its .pth files add.
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # One process, as the import of PyTorch takes most of the time.
    shown = [f"{program}print(out.shape)\n" for program in README_PROGRAMS]
    program = "".join([USE, USE_WITH_TRANSFORMERS, *shown])
    done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{packages}/papilio/__init__.py {wheel.name.split('-')[1]}\n" in done.stdout
    assert done.stdout.count("torch.Size([1, 2048, 8, 64])") == len(README_PROGRAMS)
