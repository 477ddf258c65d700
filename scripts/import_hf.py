"""Import a Hugging Face model as a run, to sample from it, evaluate it or train it further.

python -m scripts.import_hf gpt2 --out out/gpt2           from the hub
python -m scripts.import_hf FOLDER --out out/mine [--data out/data/mine] [--tokenizer FILE]

The model must be a GPT-2, a GPT-NeoX with use_parallel_residual=False and rotary_pct=1, a Llama, or
a Qwen3. To continue it at a longer context, on text prepared with its tokenizer:

python -m scripts.prepare_text TEXT --out out/data/mine --tokenizer out/mine/tokenizer.json
python train.py out/mine/config.yaml run.init_from=out/mine run.out_dir=out/mine_16k
    model.context_length=16384 model.rope_base=1e6 optim.batch_tokens=524288
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import command_parser, parse_before_imports, user_errors_as_messages

DATA = "out/data/openwebtext"


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add(
        "name", metavar="NAME_OR_FOLDER",
        help="a folder with config.json and model.safetensors, or a name on the Hugging Face hub",
    )  # fmt: skip
    add("--out", type=Path, required=True, metavar="RUN", help="folder of the run to create")
    add("--data", default=DATA, metavar="FOLDER", help="its token shards (default: %(default)s)")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json (default: the model's)")
    add(
        "--end-of-text", metavar="TOKEN",
        help="special token of the tokenizer that ends each document (default: <|endoftext|>)",
    )  # fmt: skip
    return parser.parse_args(argv)


from dataclasses import asdict

import torch

from configs.reader import to_yaml
from data.files import list_folder, write_atomically
from data.hf_folder import find_folder, read_config, read_tensors, read_tokenizer
from data.text.config import DataConfig
from data.text.shards import TOKENIZER
from data.text.tokenizer import load_tokenizer
from model.config import ModelConfig
from model.gpt import GPT
from model.hf.config import config_from_hf
from model.hf.weights import state_from_hf
from training.checkpoint.contents import save_model
from training.checkpoint.folders import CHECKPOINTS, UNFINISHED
from training.config import RUN_CONFIG, RunConfig
from training.language.config import OptimConfig, TrainConfig


def check_out(out: Path) -> None:
    """Refuse a folder unless it is new, empty, or left by an import that was killed."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is not a folder: choose a folder that does not exist")
    existing = [path.name for path in list_folder(out)]
    written = [RUN_CONFIG, TOKENIZER, CHECKPOINTS]  # in this order
    checkpoints = [path.name for path in list_folder(out / CHECKPOINTS)]
    finished = [name for name in checkpoints if not name.startswith(UNFINISHED)]
    if finished or set(existing) != set(written[: len(existing)]):
        raise ValueError(
            f"--out {out} already has {', '.join((finished or existing)[:3])}, which a run would "
            "overwrite: choose a folder that does not exist or is empty"
        )


def train_config(model: ModelConfig, *, out: Path, data: str) -> TrainConfig:
    """Build a configuration for training the model further, with a low learning rate."""
    # up to 8,192 tokens, because a modern model's context may be 128 times that of GPT-2
    micro_batch_size, accumulated = max(1, min(8, 8192 // model.context_length)), 4
    optim = OptimConfig(
        max_steps=2000,
        batch_tokens=accumulated * micro_batch_size * model.context_length,
        micro_batch_size=micro_batch_size,
        lr=5e-5,
        warmup_steps=100,
    )
    run = RunConfig(out_dir=str(out))
    return TrainConfig(model=model, data=DataConfig(path=data), optim=optim, run=run)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    out = args.out
    check_out(out)
    folder = find_folder(args.name)
    config = train_config(config_from_hf(read_config(folder)), out=out, data=args.data)
    tokenizer = (
        load_tokenizer(args.tokenizer, args.end_of_text)
        if args.tokenizer
        else read_tokenizer(folder, args.end_of_text)
    )
    vocab_size = config.model.vocab_size
    if tokenizer.vocab_size > vocab_size:  # a model may have more token ids than the tokenizer
        raise ValueError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} entries and the model "
            f"vocab_size={vocab_size}: pass --tokenizer FILE, the tokenizer.json that the model "
            "was trained with"
        )
    state = state_from_hf(read_tensors(folder), config.model)  # checks all shapes
    with torch.device("meta"):  # without drawing random weights that would be replaced
        model = GPT(config.model)
    model.load_state_dict(state, assign=True)

    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / RUN_CONFIG, to_yaml(config).encode())
    write_atomically(out / TOKENIZER, tokenizer.to_json().encode())
    # The checkpoint comes last: without it, the run cannot be opened.
    save_model(out, model, config=asdict(config), tokenizer=tokenizer.sha256)
    print(
        f"{out}: {model.n_params() / 1e6:.1f}M parameters, context "
        f"{config.model.context_length:,}, {vocab_size:,} token ids, a tokenizer of "
        f"{tokenizer.vocab_size:,} entries\n"
        f'next: python -m scripts.sample {out} --prompt "Once upon a time"'
    )


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
