"""Let a trained model continue a text.

python -m scripts.sample out/quickstart --prompt "def main(" [--tokens 200] [--temperature 0.8]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from configs.command_line import errors_as_sentences
from model.generate import generate
from scripts.runs import open_run


def sample(
    run: Path, prompt: str, *, n_tokens: int, temperature: float, top_k: int | None, seed: int
) -> str:
    """The prompt and what the newest checkpoint of `run` makes of it.

    Args:
        run: folder of a run.
        prompt: text to continue; an empty one starts a new document.
        n_tokens, temperature, top_k, seed: as in `model.generate.generate`.

    Raises:
        FileNotFoundError: the run has no checkpoint or no tokenizer.
    """
    opened = open_run(run)
    tokenizer = opened.tokenizer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = opened.model.to(device)
    start = tokenizer.encode(prompt) or [tokenizer.eot_id]
    tokens = generate(
        model,
        torch.tensor([start], device=device),
        n_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return tokenizer.decode(tokens[0].tolist())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--prompt", default="", help="text to continue (default: none)")
    parser.add_argument("--tokens", type=int, default=200, help="how many to add (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, help="draw from the K likeliest only")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    args = parser.parse_args(argv)
    print(
        sample(
            args.run,
            args.prompt,
            n_tokens=args.tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
        )
    )


if __name__ == "__main__":
    with errors_as_sentences():
        main()
