"""The Hugging Face hub: what is taken from it and given to it, and what to do where it is not."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE = 5.0
"""Seconds that the hub has to take a connection; without a network it is known at once."""


@contextmanager
def from_hub(wanted: str, remedy: str) -> Iterator[None]:
    """Let the block download `wanted`, or take what was downloaded before where there is no hub.

    Raises:
        ValueError: it cannot be had; the text says why, and ends with the remedy.
    """
    missing = why_offline()
    try:
        yield
    except hub_errors() as error:
        reason = missing or _sentence(error)
        raise ValueError(
            f"{wanted} could not be downloaded from the Hugging Face hub ({reason}): {remedy}"
        ) from error


def upload(folder: Path, name: str, *, private: bool) -> str:
    """Put the files of a folder into the repository `name`, which is made where there is none.

    Returns:
        Where it can be seen.

    Raises:
        ValueError: it cannot be done; the text says why, and what to do.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message="Upload the model"
        )
    except hub_errors() as error:
        raise ValueError(
            f"{folder} could not be uploaded to {name} on the Hugging Face hub "
            f"({_sentence(error)}). It is whole here: log in with `hf auth login`, and then "
            f"hf upload {name} {folder}"
        ) from error
    return str(repository)


def hub_errors() -> tuple[type[BaseException], ...]:
    """What its libraries raise where something cannot be had or given.

    The bases of the hub's error are those of the HTTP client that its version uses, which reports
    lost connections by them; a name that cannot be one is a ValueError.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, ValueError, *HfHubHTTPError.__bases__


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


@cache
def why_offline() -> str | None:
    """Why the hub cannot be reached; None if it can, or if a proxy would have to be asked.

    Its libraries find out by themselves, in half a minute of attempts; from now on they make none
    in this process, and take what they have.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and it was not downloaded before"
    hub = urlsplit(constants.ENDPOINT)
    if not getproxies().keys().isdisjoint({hub.scheme, "all"}):
        return None
    assert hub.hostname is not None
    address = hub.hostname, hub.port or (443 if hub.scheme == "https" else 80)
    answers: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=PATIENCE).close()
            answers.append(None)
        except OSError as error:
            answers.append(error.strerror or str(error))

    # in a thread, as a look-up of the name knows no limit of time
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(PATIENCE)
    problem = answers[0] if answers else f"no answer in {PATIENCE:g} s"
    if problem is None:
        return None
    constants.HF_HUB_OFFLINE = True
    return f"no connection to {hub.hostname}: {problem}; and it was not downloaded before"
