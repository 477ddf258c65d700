"""From nothing to a trained GPT: prepare a corpus, train, evaluate, draw its perplexity, sample.

python -m scripts.quickstart [key=value ...]        (values of configs/quickstart.yaml to replace)

The corpus is what every machine with Python has: the source files of the standard library.
"""

import sys

from training.command_line import errors_as_sentences, help_if_asked
from training.language.config import load_config

CONFIG = "configs/quickstart.yaml"

if __name__ == "__main__":
    help_if_asked(__doc__)  # before PyTorch is loaded: nor need a misspelt key wait for it
    with errors_as_sentences():
        load_config([CONFIG, *sys.argv[1:]])

from collections.abc import Sequence
from pathlib import Path

from scripts import plot_run, prepare_text
from scripts.sample import sample
from train import main as train

PROMPT = "class Counter:\n    def __init__(self"


def main(argv: Sequence[str]) -> None:
    """Run all steps; each says what it does, and one that was done before is not done again."""
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
        "that it never saw"
    )

    print("\n4. What it writes\n")
    sample(run, [PROMPT], 120, temperature=0.7, top_k=50, seed=0)
    print(
        f'\nMore of that: python -m scripts.sample {run} --prompt "import "\n'
        "Next: README.md, section Train on your text"
    )


if __name__ == "__main__":
    with errors_as_sentences():
        main(sys.argv[1:])
