"""Downloads from and uploads to the Hugging Face hub, with errors that name a remedy."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE = 5.0
"""Seconds to wait for a connection to the hub; without a network the attempt fails at once."""


@contextmanager
def from_hub(wanted: str, remedy: str) -> Iterator[None]:
    """Let the block download `wanted`, or use the local cache if the hub cannot be reached.

    Raises:
        ValueError: The download failed. The message says why and ends with `remedy`.
    """
    offline_reason = why_offline()
    try:
        yield
    except hub_errors() as error:
        reason = offline_reason or _sentence(error)
        raise ValueError(
            f"{wanted} could not be downloaded from the Hugging Face hub ({reason}): {remedy}"
        ) from error


def upload(folder: Path, name: str, *, private: bool) -> str:
    """Upload the files of a folder to the repository `name`, which is created if needed.

    Returns:
        URL of the repository.

    Raises:
        ValueError: The upload failed. The message says why and what to do.
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
            f"({_sentence(error)}). The local folder is complete: log in with `hf auth login`, "
            f"then run hf upload {name} {folder}"
        ) from error
    return str(repository)


def hub_errors() -> tuple[type[BaseException], ...]:
    """Exceptions that the hub's libraries raise when a download or an upload fails.

    The bases of the hub's own error depend on the HTTP client of its version, which raises them
    for lost connections. An invalid name raises ValueError.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, ValueError, *HfHubHTTPError.__bases__


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


@cache
def why_offline() -> str | None:
    """Reason why the hub cannot be reached; None if it can, or if a proxy is configured.

    The hub's libraries would retry for half a minute. If the hub cannot be reached, this function
    therefore switches them to offline mode for the rest of the process: they only use their cache.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and it is not in the cache"
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

    # in a thread, because a DNS lookup has no timeout
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(PATIENCE)
    problem = answers[0] if answers else f"no answer in {PATIENCE:g} s"
    if problem is None:
        return None
    constants.HF_HUB_OFFLINE = True
    return f"no connection to {hub.hostname}: {problem}; and it is not in the cache"
