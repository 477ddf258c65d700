"""Train a small GPT from scratch: prepare a corpus, train, evaluate, plot its perplexity, sample.

python -m scripts.quickstart [key=value ...]        (key=value overrides configs/quickstart.yaml)

The corpus is the source code of the standard library, which every machine with Python has.
"""

import sys

from training.command_line import handle_help, user_errors_as_messages
from training.language.config import load_config

CONFIG = "configs/quickstart.yaml"

if __name__ == "__main__":
    handle_help(__doc__)  # before PyTorch is loaded, so that help and misspelt keys are fast
    with user_errors_as_messages():
        load_config([CONFIG, *sys.argv[1:]])

from collections.abc import Sequence
from pathlib import Path

from scripts import plot_run, prepare_text
from scripts.sample import sample
from train import main as train

PROMPT = "class Counter:\n    def __init__(self"


def main(argv: Sequence[str]) -> None:
    """Run all steps. Each one prints what it does, and finished ones are not repeated."""
    config = load_config([CONFIG, *argv])
    run = Path(config.run.out_dir)

    print("\n1. Tokenizing Python's standard library\n")
    status = prepare_text.main(["stdlib", "--train-bpe", "4096", "--out", config.data.path])
    if status != 0:
        raise SystemExit(status)

    print("\n2. Training a GPT on it\n")
    result = train([CONFIG, *argv])

    print("\n3. Its perplexity\n")
    plot_run.main([str(run)])
    print(
        f"perplexity {result['val_perplexity']:.2f} on {result['val_tokens']:,} tokens "
        "held out from training"
    )

    print("\n4. A sample of generated code\n")
    sample(run, [PROMPT], 120, temperature=0.7, top_k=50, seed=0)
    print(
        f'\nMore samples: python -m scripts.sample {run} --prompt "import "\n'
        "Next: README.md, section Train on your text"
    )


if __name__ == "__main__":
    with user_errors_as_messages():
        main(sys.argv[1:])
