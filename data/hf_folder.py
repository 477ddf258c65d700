"""Read a model as Hugging Face stores it: a folder, or a repository on the hub.

config.json                      what the model is
model.safetensors                its tensors; or
model.safetensors.index.json     which file holds which; or
pytorch_model.bin                as pickled by older versions
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
    """The folder `name`, or else what the hub has under that name, downloaded.

    Raises:
        ValueError: it is no folder and cannot be downloaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    download = partial(huggingface_hub.snapshot_download, name)
    remedy = (
        "check the name and the network, or download it elsewhere (hf download "
        f"{name} --local-dir FOLDER) and give that folder"
    )
    with from_hub(f"{name} is no folder here, and", remedy):
        first = [CONFIG, WEIGHTS, INDEX, "model-*.safetensors"]
        folder = Path(download(allow_patterns=first))
        # the pickle only where nothing else is: most repositories hold the same weights twice
        weights = [] if (folder / WEIGHTS).exists() or (folder / INDEX).exists() else [PICKLE]
        rest = [CONFIG, TOKENIZER, VOCAB, MERGES, *weights]
        return Path(download(allow_patterns=rest, revision=folder.name))


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON object.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG}, so it is no model's folder")
    return load_json(path, "get it again")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model, on the CPU, in the dtype they are stored in.

    Raises:
        FileNotFoundError: there are no weights, or a file that the index names is missing.
        ValueError: a file is damaged, or does not hold the tensors that the index says.
    """
    readers = {WEIGHTS: _read_safetensors, INDEX: _read_sharded, PICKLE: _read_pickle}
    for name, read in readers.items():
        if (folder / name).is_file():
            return read(folder / name)
    raise FileNotFoundError(f"{folder} holds no weights: neither {WEIGHTS}, {INDEX} nor {PICKLE}")


def read_tokenizer(folder: Path, end_of_text: str | None = None) -> TextTokenizer:
    """The tokenizer of a model's folder; `load_tokenizer` says what `end_of_text` is.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or has no end of text.
    """
    if (folder / TOKENIZER).is_file():
        return load_tokenizer(str(folder / TOKENIZER), end_of_text)
    if (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        return gpt2_tokenizer(folder / VOCAB, folder / MERGES, end_of_text or END_OF_TEXT)
    raise FileNotFoundError(
        f"{folder} holds no tokenizer, neither {TOKENIZER} nor {VOCAB} and {MERGES}: pass "
        "--tokenizer FILE, the tokenizer.json that the model was trained with"
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        declared_shapes(path)
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as safetensors, and may be cut short ({error}): get it again"
        ) from error


def _read_sharded(index_path: Path) -> dict[str, Tensor]:
    index = load_json(index_path, "get it again").get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{index_path} must have a weight_map of tensors to files: get it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(index.values())):
        path = index_path.parent / name
        if Path(name).name != name or not path.is_file():
            raise FileNotFoundError(f"{index_path} names {name}, which is not beside it")
        held = _read_safetensors(path)
        named = {tensor for tensor, file in index.items() if file == name}
        if held.keys() != named:
            differing = ", ".join(sorted(held.keys() ^ named)[:5])
            raise ValueError(
                f"{path} and {INDEX} do not agree on where {differing} lies: get both again"
            )
        tensors |= held
    return tensors


def _read_pickle(path: Path) -> dict[str, Tensor]:
    # what text, or part of a checkpoint, is to an unpickler: it takes each byte for an instruction
    wrong_bytes = EOFError, LookupError, RuntimeError, ValueError
    try:
        # weights_only: a pickle of anything else could run code
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, struct.error, *wrong_bytes) as error:
        # without torch's reason, which may advise to run whatever code the file holds
        raise ValueError(
            f"{path} is no PyTorch checkpoint of tensors alone, or is cut short: get it again, or "
            f"give a folder with {WEIGHTS}"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{path} must hold tensors by name and nothing else: is it a checkpoint?")
    return tensors
