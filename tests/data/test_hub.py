"""A hub that cannot be reached, without a network of our own."""

import socket
import threading

import pytest
from huggingface_hub import constants

from data.hub import from_hub, why_offline


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is known of the hub yet, and no proxy either; the rest of the tests never learn."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("data.hub.getproxies", dict)
    why_offline.cache_clear()
    yield
    why_offline.cache_clear()


@pytest.fixture
def no_name(monkeypatch):
    def fail(address, timeout):
        assert address == ("huggingface.co", 443)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(socket, "create_connection", fail)


def test_no_network_and_a_wrong_name_give_different_errors(no_name):
    with pytest.raises(ValueError) as raised, from_hub("gpt2", "give a folder"):
        assert constants.HF_HUB_OFFLINE  # so that nothing is tried again and again
        raise ConnectionError("after half a minute")
    assert str(raised.value) == (
        "gpt2 could not be downloaded from the Hugging Face hub (no connection to huggingface.co: "
        "Name or service not known; and it is not in the cache): give a folder"
    )


def test_earlier_downloads_are_used(no_name):
    with from_hub("gpt2", "give a folder"):
        pass


def test_a_hub_that_answers(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with (
            pytest.raises(ValueError, match=r"hub \(no such repository\): check the name$"),
            from_hub("gpt3", "check the name"),
        ):
            raise ConnectionError("no such\nrepository.")
    assert not constants.HF_HUB_OFFLINE


def test_a_hub_that_does_not_answer(monkeypatch):
    asked, given_up = threading.Event(), threading.Event()

    def never(address, timeout):
        asked.set()
        given_up.wait()
        raise TimeoutError

    monkeypatch.setattr("data.hub.PATIENCE", 0.01)
    monkeypatch.setattr(socket, "create_connection", never)
    assert "no answer in 0.01 s" in why_offline()
    assert asked.wait(60)
    given_up.set()


def test_a_proxy_is_left_to_those_who_ask_it(no_name, monkeypatch):
    monkeypatch.setattr("data.hub.getproxies", lambda: {"https": "http://proxy:3128"})
    assert why_offline() is None


def test_a_user_who_is_offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert why_offline().startswith("HF_HUB_OFFLINE is set")
