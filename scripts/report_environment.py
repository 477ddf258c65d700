"""Print facts for a bug report: versions, GPUs, and which attention implementation is used.

python -m scripts.report_environment

It works without a GPU and without Triton.
"""

from training.command_line import command_parser, parse_before_imports, user_errors_as_messages


@parse_before_imports
def check_arguments() -> None:
    """Accept --help and refuse all other arguments."""
    command_parser(__doc__, __spec__).parse_args()


import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from kernels.attention import UNSUPPORTED_REASONS, pick
from kernels.options import make_options
from training.environment import commit

PACKAGES = ("triton", "numpy", "transformers", "datasets", "tokenizers")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "PAPILIO_CACHE", "TRITON_INTERPRET")


def report() -> Iterator[tuple[str, str]]:
    """Yield the lines of the report as (subject, fact)."""
    yield "papilio", f"{installed('papilio')}, commit {commit() or 'unknown'}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", f"{torch.__version__}, built for CUDA {torch.version.cuda}"
    for package in PACKAGES:
        yield package, installed(package)
    for name in VARIABLES:
        if name in os.environ:
            yield name, repr(os.environ[name])
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield (
            f"GPU {i}",
            f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB",
        )
    yield "driver", nvidia_driver() or "no NVIDIA driver"
    yield from attention()


def attention() -> Iterator[tuple[str, str]]:
    """Report the implementation used for a causal call in bf16, and why others cannot be used."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = 1, 1024, 12, 64
    q, k, v = (torch.empty(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    options = make_options(q, k, v, causal=True)
    choice = pick(None, q, k, v, options)
    yield "attention", f"{choice}, for causal=True and q of {shape} in bf16 on {device}"
    for name, unsupported_reason in UNSUPPORTED_REASONS.items():
        reason = unsupported_reason(q, k, v, options)
        yield f"  {name}", "supported" if reason is None else f"not supported: {reason}"


def installed(package: str) -> str:
    """Version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.partition("\n")[0] if result.returncode == 0 else None


def main() -> None:
    """Print the report."""
    for subject, fact in report():
        print(f"{subject:20} {fact}")


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
