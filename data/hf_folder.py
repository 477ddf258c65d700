"""Read a model in Hugging Face format from a local folder or a repository on the hub.

config.json                      architecture of the model
model.safetensors                its tensors; or
model.safetensors.index.json     which file holds which tensor; or
pytorch_model.bin                tensors as older versions pickled them
tokenizer.json                   or vocab.json and merges.txt
"""

import pickle
import struct
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.files import load_json
from data.hub import from_hub
from data.tensor_files import declared_shapes
from data.text.tokenizer import END_OF_TEXT, TextTokenizer, gpt2_tokenizer, load_tokenizer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
TOKENIZER = "tokenizer.json"
VOCAB = "vocab.json"
MERGES = "merges.txt"


def find_folder(name: str) -> Path:
    """Path of the local folder `name`; if there is none, download that repository from the hub.

    Raises:
        ValueError: The folder does not exist and the repository cannot be downloaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    download = partial(huggingface_hub.snapshot_download, name)
    remedy = (
        "check the name and the network, or download it on another machine (hf download "
        f"{name} --local-dir FOLDER) and pass that folder"
    )
    with from_hub(f"{name} is not a local folder, and", remedy):
        first = [CONFIG, WEIGHTS, INDEX, "model-*.safetensors"]
        folder = Path(download(allow_patterns=first))
        # the pickle only if there is nothing else: most repositories hold the weights twice
        weights = [] if (folder / WEIGHTS).exists() or (folder / INDEX).exists() else [PICKLE]
        rest = [CONFIG, TOKENIZER, VOCAB, MERGES, *weights]
        return Path(download(allow_patterns=rest, revision=folder.name))


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a JSON object.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG}, so it is not the folder of a model")
    return load_json(path, "download it again")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a model to the CPU, in their stored dtype.

    Raises:
        FileNotFoundError: The folder holds no weights, or a file named by the index is missing.
        ValueError: A file is damaged, or does not hold exactly the tensors listed by the index.
    """
    readers = {WEIGHTS: _read_safetensors, INDEX: _read_sharded, PICKLE: _read_pickle}
    for name, read in readers.items():
        if (folder / name).is_file():
            return read(folder / name)
    raise FileNotFoundError(f"{folder} holds no weights: neither {WEIGHTS}, {INDEX} nor {PICKLE}")


def read_tokenizer(folder: Path, end_of_text: str | None = None) -> TextTokenizer:
    """Read the tokenizer of a model's folder.

    Args:
        end_of_text: Special token that ends documents, see `load_tokenizer`. Without
            "<|endoftext|>", the default is the token of eos_token_id in config.json.

    Raises:
        FileNotFoundError: The folder holds no tokenizer.
        ValueError: The tokenizer is damaged, or has no end of text.
    """
    if (folder / TOKENIZER).is_file():
        return load_tokenizer(str(folder / TOKENIZER), end_of_text or _end_of_text(folder))
    if (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        return gpt2_tokenizer(folder / VOCAB, folder / MERGES, end_of_text or END_OF_TEXT)
    raise FileNotFoundError(
        f"{folder} holds no tokenizer ({TOKENIZER}, or {VOCAB} and {MERGES}): pass "
        "--tokenizer FILE, the tokenizer.json that the model was trained with"
    )


def _end_of_text(folder: Path) -> str | None:
    """Special token that config.json names as the end, unless there is an END_OF_TEXT."""
    if not (folder / CONFIG).is_file():
        return None
    eos_id = load_json(folder / CONFIG, "download it again").get("eos_token_id")
    added = load_json(folder / TOKENIZER, "download it again").get("added_tokens")
    tokens = [x for x in added if isinstance(x, dict)] if isinstance(added, list) else []
    special = {x.get("id"): x.get("content") for x in tokens if x.get("special")}
    return None if END_OF_TEXT in special.values() else special.get(eos_id)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        declared_shapes(path)
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as safetensors and may be truncated ({error}): download it "
            "again"
        ) from error


def _read_sharded(index_path: Path) -> dict[str, Tensor]:
    index = load_json(index_path, "download it again").get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(
            f"{index_path} must have a weight_map from tensors to files: download it again"
        )
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(index.values())):
        path = index_path.parent / name
        if Path(name).name != name or not path.is_file():
            raise FileNotFoundError(f"{index_path} names {name}, which is not in its folder")
        shard = _read_safetensors(path)
        expected = {tensor for tensor, file in index.items() if file == name}
        if shard.keys() != expected:
            differing = ", ".join(sorted(shard.keys() ^ expected)[:5])
            raise ValueError(
                f"{path} and {INDEX} disagree about the file of {differing}: download both again"
            )
        tensors |= shard
    return tensors


def _read_pickle(path: Path) -> dict[str, Tensor]:
    # An unpickler takes each byte for an instruction, so text or a partial file can raise these.
    wrong_bytes = EOFError, LookupError, RuntimeError, ValueError
    try:
        # weights_only: a pickle of anything else could run code
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, struct.error, *wrong_bytes) as error:
        # without torch's message, which may advise to run arbitrary code from the file
        raise ValueError(
            f"{path} must be a PyTorch checkpoint of tensors only, and may be truncated: download "
            f"it again, or pass a folder with {WEIGHTS}"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{path} must hold tensors by name and nothing else: is it a checkpoint?")
    return tensors
