"""Fixtures of the tests of Table 4's sweep."""

import pytest

from tests.evaluation.conftest import base, opened, scored, small_gains, stream, train  # noqa: F401
from tests.experiments.table4 import tiny_sweep


@pytest.fixture
def tiny(monkeypatch, corpus, tmp_path):
    """Sweeps of Table 4 over models of 32 and 64 tokens, of which nothing is drawn."""
    tiny_sweep.without_pictures(monkeypatch)
    return tiny_sweep.sweep(monkeypatch, corpus, tmp_path)
