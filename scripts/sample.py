"""Generate text with a trained model.

python -m scripts.sample out/quickstart --prompt "def main(" [--tokens 200] [--temperature 0.8]
python -m scripts.sample out/quickstart --prompt "class " --prompt "import " --samples 3
python -m scripts.sample out/quickstart --checkpoint best

A single sample of a single prompt is printed while it is generated; several are printed when done.
Prompts with the same number of tokens form one batch; others run one after the other. A sample ends
where the model ends the document.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import (
    add_checkpoint_option,
    command_parser,
    parse_before_imports,
    user_errors_as_messages,
)


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add, prompt = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run")
    add_checkpoint_option(parser)
    prompt("--prompt", action="append", metavar="TEXT", help="text to continue; repeatable")
    prompt("--prompt-file", type=Path, metavar="FILE", help="UTF-8 file to continue")
    add("--tokens", type=int, default=200, help="number of new tokens (default: 200)")
    add("--samples", type=int, default=1, metavar="N", help="samples per prompt (default: 1)")
    add("--temperature", type=float, default=0.8, help="0 is greedy decoding (default: 0.8)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens only")
    add("--top-p", type=float, metavar="P", help="sample from the fewest tokens of probability P")
    add("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    add(
        "--past-context", choices=("slide", "refuse"), default="slide",
        help="texts longer than the context: read only the end, or refuse (default: slide)",
    )  # fmt: skip
    add("--no-stop", action="store_true", help="continue after the end of the document")
    return parser.parse_args(argv)


import os
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from typing import Unpack

import torch

from data.text.tokenizer import StreamDecoder
from evaluation.runs import Run, open_run
from model.generate import DrawOptions, generate, stream
from training.checkpoint.choice import find_checkpoint
from training.numerics import autocast


def sample(
    folder: Path,
    prompts: Sequence[str],
    n_tokens: int,
    *,
    checkpoint: str | None = None,
    samples: int = 1,
    stop: bool = True,
    **options: Unpack[DrawOptions],
) -> None:
    """Print prompts, each continued by at most `n_tokens` tokens.

    It runs on a GPU if there is one, in the dtype of training. On a CPU it runs in float32, without
    our kernels.

    Args:
        folder: folder of the run.
        prompts: texts to continue; an empty prompt begins a document.
        n_tokens: maximum number of new tokens.
        checkpoint: as for `find_checkpoint`; None is the newest.
        samples: samples per prompt.
        stop: end a sample where the model ends the document. The end-of-text token is not printed.
        options: options of `model.generate.stream`.

    Raises:
        FileNotFoundError: the run in `folder` has no checkpoint or no tokenizer.
        ValueError: an argument is out of range.
    """
    run = open_run(folder, find_checkpoint(folder, checkpoint))
    dtype = run.config.run.dtype
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        dtype = "float32"  # bfloat16 does not help on a CPU
        model = run.config.model
        if model.attention == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
            # another implementation of attention changes only rounding
            model = replace(model, attention="auto")
            run = replace(run, config=replace(run.config, model=model))
    run.model.to(device)
    if stop:
        options["stop_id"] = run.tokenizer.eot_id
    with autocast(dtype, device):
        if len(prompts) == samples == 1:
            try:
                for piece in pieces(run, prompts[0], n_tokens, **options):
                    print(_shown(piece), end="", flush=True)
            except KeyboardInterrupt:
                print()  # so that the message about it starts on a new line
                raise
            print()
            return
        texts = continuations(run, prompts, n_tokens, samples=samples, **options)
    for number, of_prompt in enumerate(texts, start=1):
        for sample_number, text in enumerate(of_prompt, start=1):
            print(f"--- prompt {number}, sample {sample_number} ---\n{_shown(text)}\n")


def _shown(text: str) -> str:
    """Return text for stdout; on a terminal, control characters from the model are replaced."""
    if not sys.stdout.isatty():
        return text
    kept = (c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
    return "".join(kept)


def pieces(run: Run, prompt: str, n_tokens: int, **options: Unpack[DrawOptions]) -> Iterator[str]:
    """Yield the prompt, then new text up to `stop_id` as it is generated, in whole characters."""
    decoder = StreamDecoder(run.tokenizer)
    prompt_ids = run.tokenizer.encode(prompt)
    # The call checks the arguments before anything is printed.
    drawn = stream(run.model, _batch(run, [prompt_ids]), n_tokens, **options)
    yield decoder.feed(*prompt_ids)
    for token in drawn:
        token_id = int(token)
        if token_id == options.get("stop_id"):
            break
        yield decoder.feed(token_id)
    yield decoder.finish()


def continuations(
    run: Run,
    prompts: Sequence[str],
    n_tokens: int,
    *,
    samples: int = 1,
    **options: Unpack[DrawOptions],
) -> list[list[str]]:
    """Generate `samples` texts per prompt; each includes the prompt and ends before `stop_id`.

    Prompts with the same number of tokens form a batch, so with the same seed, samples may depend
    on the other prompts.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1.")
    encoded = [run.tokenizer.encode(prompt) for prompt in prompts]
    texts: list[list[str]] = [[] for _ in prompts]
    for length in dict.fromkeys(map(len, encoded)):
        rows = [i for i, ids in enumerate(encoded) if len(ids) == length for _ in range(samples)]
        tokens = _batch(run, [encoded[index] for index in rows])
        drawn = generate(run.model, tokens, n_tokens, **options)[:, tokens.shape[1] :]
        stop_id = options.get("stop_id")
        for index, ids in zip(rows, drawn.tolist(), strict=True):
            kept = ids[: ids.index(stop_id)] if stop_id in ids else ids
            texts[index].append(run.tokenizer.decode(encoded[index] + kept))
    return texts


def _batch(run: Run, rows: list[list[int]]) -> torch.Tensor:
    """Return prompts (B, T) on the model's device; an empty one becomes an end-of-text token."""
    device = run.model.tok_emb.weight.device
    return torch.tensor([ids or [run.tokenizer.eot_id] for ids in rows], device=device)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    prompts = args.prompt or [""]
    for prompt in prompts:
        # Python decodes command-line arguments that are not UTF-8 to these characters.
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ValueError(f"--prompt={prompt!r} is not UTF-8: use --prompt-file for other text")
    if (path := args.prompt_file) is not None:
        try:
            prompts = [path.read_bytes().decode()]
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file {path} must be UTF-8 text: {error}") from error
    draws = {k: v for k, v in vars(args).items() if k in DrawOptions.__annotations__}
    sample(
        args.run,
        prompts,
        args.tokens,
        checkpoint=args.checkpoint,
        samples=args.samples,
        stop=not args.no_stop,
        **draws,
    )


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
