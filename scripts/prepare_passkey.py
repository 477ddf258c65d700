"""Prepare token shards of documents that teach a model to find a pass key in a long text.

    python -m scripts.prepare_passkey out/data/books --out out/data/passkey --longest 8192
    python train.py configs/paper/gpt2_small_4k.yaml data.path=out/data/books \\
      'data.mix=[{path: out/data/passkey, weight: 0.25}]'

--task chains teaches the chains of scripts.passkey instead, whose answers need two hops.
Haystacks are text of CORPUS, and the shards use its tokenizer. Set --longest to twice the context
length. Training cuts texts anywhere, so it rarely sees both ends of a text as long as the context.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import command_parser, parse_before_imports, user_errors_as_messages


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("corpus", type=Path, metavar="CORPUS", help="folder of a prepared text")
    add("--out", required=True, help="folder for the shards")
    add("--task", choices=("key", "chains"), default="key", help="(default: %(default)s)")
    add("--documents", type=int, default=60_000, metavar="N", help="(default: %(default)s)")
    add(
        "--longest", type=int, default=8192, metavar="TOKENS",
        help="length of the longest document (default: %(default)s)",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser.parse_args(argv)


from data.text.passkey import PasskeySource
from data.text.prepare import prepare
from data.text.recall_tasks import TASKS
from data.text.shards import TOKENIZER
from training.signals import on_interrupt


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    source = PasskeySource(args.corpus, args.documents, args.longest, args.seed, TASKS[args.task])
    with on_interrupt(lambda: ": the same command resumes from here"):
        report = prepare(source, args.out, tokenizer=str(args.corpus / TOKENIZER))
    for split, info in report.manifest.splits.items():
        print(f"{split}: {info.documents:,} documents, {info.tokens:,} tokens")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
