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
USE = """
import importlib.util, torch
import papilio
from papilio.kernels import BlockSparseMask, butterfly, flash_attention
for name in ("kernels", "configs", "data", "model", "train", "training", "scripts"):
    assert importlib.util.find_spec(name) is None, name
q, k, v = (torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3))
mask = BlockSparseMask(butterfly(4), block_size=16)
results = {}
for impl in ("triton", "reference"):
    out = flash_attention(q, k, v, causal=True, mask=mask, impl=impl)
    results[impl] = (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
for got, expected in zip(*results.values(), strict=True):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
from papilio.flash_attn import flash_attn_func
torch.testing.assert_close(flash_attn_func(q, k, v), flash_attention(q, k, v))
papilio.register_with_torch()
heads_first = [x.transpose(1, 2) for x in (q, k, v)]
out = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
torch.testing.assert_close(out, flash_attention(q, k, v))
papilio.unregister_with_torch()
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


def test_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    run("pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    # Share the packages of this environment, but not the checkout, which its .pth files add.
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # One process, as the import of PyTorch takes most of the time.
    program = USE + "".join(f"{p}print(out.shape)\n" for p in README_PROGRAMS)
    done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{packages}/papilio/__init__.py {wheel.name.split('-')[1]}\n" in done.stdout
    assert done.stdout.count("torch.Size([1, 2048, 8, 64])") == len(README_PROGRAMS)
