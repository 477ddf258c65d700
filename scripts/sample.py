"""Let a trained model continue texts.

python -m scripts.sample out/quickstart --prompt "def main(" [--tokens 200] [--temperature 0.8]
python -m scripts.sample out/quickstart --prompt "class " --prompt "import " --samples 3
python -m scripts.sample out/quickstart --checkpoint best

One sample of one prompt is printed as it is drawn, others when they are done. Prompts of the same
number of tokens are continued as one batch, others one after the other. A sample ends where the
model ends the document.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import (
    add_checkpoint_option,
    command_parser,
    errors_as_sentences,
    read_first,
)


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add, prompt = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run")
    add_checkpoint_option(parser)
    prompt("--prompt", action="append", metavar="TEXT", help="to continue; repeatable")
    prompt("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text to continue, all of it")
    add("--tokens", type=int, default=200, help="how many to add (default: 200)")
    add("--samples", type=int, default=1, metavar="N", help="of each prompt (default: 1)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest (default: 0.8)")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest only")
    add("--top-p", type=float, metavar="P", help="draw from the fewest tokens of probability P")
    add("--seed", type=int, default=0, help="of the draws (default: 0)")
    add(
        "--past-context", choices=("slide", "refuse"), default="slide",
        help="of texts longer than the context: read the end of it, or refuse (default: slide)",
    )  # fmt: skip
    add("--no-stop", action="store_true", help="go on after the end of the document")
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
from training.checkpoint.choice import chosen_checkpoint
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
    """Print prompts and what a checkpoint of a run makes of them, `n_tokens` at most.

    The newest checkpoint, or another as `chosen_checkpoint` takes it. An empty prompt begins a
    document. With `stop`, a sample ends where the model ends the document,
    and the end of text is not printed; `options` are those of `model.generate.stream`. On a GPU,
    where there is one, in the dtype that the run was trained in; else in float32, without our
    kernels.

    Raises:
        FileNotFoundError: the run in `folder` has no checkpoint or no tokenizer.
        ValueError: an argument outside its range.
    """
    run = open_run(folder, chosen_checkpoint(folder, checkpoint))
    dtype = run.config.run.dtype
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        dtype = "float32"  # a CPU gains nothing from bfloat16
        model = run.config.model
        if model.attention == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
            # another attention changes nothing but rounding
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
                print()  # what is said of it begins a line
                raise
            print()
            return
        texts = continuations(run, prompts, n_tokens, samples=samples, **options)
    for number, of_prompt in enumerate(texts, start=1):
        for sample_number, text in enumerate(of_prompt, start=1):
            print(f"--- prompt {number}, sample {sample_number} ---\n{_shown(text)}\n")


def _shown(text: str) -> str:
    """Text for stdout; on a terminal without control characters, which a model may write to it."""
    if not sys.stdout.isatty():
        return text
    kept = (c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
    return "".join(kept)


def pieces(run: Run, prompt: str, n_tokens: int, **options: Unpack[DrawOptions]) -> Iterator[str]:
    """The prompt, then what follows it up to `stop_id` as it is drawn, cut between characters."""
    decoder = StreamDecoder(run.tokenizer)
    prompt_ids = run.tokenizer.encode(prompt)
    # refuses what is wrong before anything is printed
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
    """`samples` texts for each prompt, which they begin with; they end before `stop_id`.

    Prompts of equally many tokens make a batch, so what is drawn with a seed may depend on the
    other prompts.
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
    """(B, T) prompts on the device of the model; empty ones begin after an end of text."""
    device = run.model.tok_emb.weight.device
    return torch.tensor([ids or [run.tokenizer.eot_id] for ids in rows], device=device)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    prompts = args.prompt or [""]
    for prompt in prompts:
        # as Python decodes what is no UTF-8 on a command line
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ValueError(f"--prompt={prompt!r} is not UTF-8: take --prompt-file for other text")
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
    with errors_as_sentences():
        main()
