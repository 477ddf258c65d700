"""Export a run in the format of Hugging Face transformers.

python -m scripts.export_hf out/gpt2_small_1k FOLDER [--dtype bfloat16] [--push-to-hub NAME]

Load FOLDER with AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained. Models with
learned positions are exported as a GPT-2, those with rotary positions as a GPT-NeoX. Models that
also have RMSNorm and SwiGLU are exported as a Llama, or with normalised queries and keys, and
windows if any, as a Qwen3. `train.py CONFIG --dry-run` says which, before training.
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
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run")
    add_checkpoint_option(parser)
    add("folder", type=Path, metavar="FOLDER", help="folder to create")
    dtypes = "float32", "bfloat16", "float16"
    add("--dtype", choices=dtypes, default="float32", help="dtype of tensors (default: float32)")
    add("--push-to-hub", metavar="NAME", help="also upload it to this repository, USER/MODEL")
    add("--private", action="store_true", help="make a new repository on the hub private")
    args = parser.parse_args(argv)
    if args.private and args.push_to_hub is None:
        parser.error("--private requires a repository on the hub: also pass --push-to-hub NAME")
    return args


import os
import shutil

from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from safetensors.torch import save_file

from data.files import sync_folder, to_json, write_atomically
from data.hf_folder import CONFIG, TOKENIZER, WEIGHTS
from data.hub import upload
from evaluation.model_card import early_note, model_card
from evaluation.runs import open_run
from model.hf.config import config_to_hf, layout_for
from model.hf.weights import DTYPES, state_to_hf
from training.checkpoint.choice import find_checkpoint


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    The files are written to a temporary folder next to FOLDER, which is then renamed. So an export
    that is killed does not leave a folder that looks complete.
    """
    args = options(argv)
    if args.push_to_hub is not None:
        validate_repo_id(args.push_to_hub)
    folder, dtype = args.folder, DTYPES[args.dtype]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: choose a folder that does not exist")
    final = folder.resolve()  # the target of a link, because a folder cannot be renamed to a link
    if final == Path.cwd():
        # The rename would leave the shell in a deleted folder.
        raise ValueError(f"{folder} is the current folder: pass a new one, for example in it")
    run = open_run(args.run, find_checkpoint(args.run, args.checkpoint))
    config, tokenizer = run.config.model, run.tokenizer
    hf_config = config_to_hf(config, eot_id=tokenizer.eot_id, dtype=dtype)
    tensors = state_to_hf(run.model.state_dict(), config, dtype=dtype)

    unfinished = final.with_name(f".unfinished_{final.name}")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    write_atomically(unfinished / TOKENIZER, tokenizer.to_library_json().encode())
    # AutoTokenizer needs this in addition to tokenizer.json, whose rules it must not change.
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), tokenizer.end_of_text),
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    write_atomically(unfinished / "tokenizer_config.json", to_json(tokenizer_config))
    write_atomically(unfinished / CONFIG, to_json(hf_config))
    name = args.push_to_hub or final.name
    card = model_card(run, name, layout_for(config).architecture)
    write_atomically(unfinished / "README.md", card.encode())
    try:
        # transformers requires the metadata
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(
            f"{final} could not be written ({error}): make room on its disk, or choose a folder "
            "elsewhere"
        ) from error
    # safetensors makes the file readable by the owner only
    (unfinished / WEIGHTS).chmod((unfinished / CONFIG).stat().st_mode)
    with (unfinished / WEIGHTS).open("rb+") as file:
        os.fsync(file.fileno())
    unfinished.rename(final)
    sync_folder(final.parent)
    if note := early_note(run, run.folder.resolve().name):
        print(note)
    print(f"wrote {folder}")
    if args.push_to_hub is not None:
        print(f"uploaded to {upload(final, args.push_to_hub, private=args.private)}")


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
