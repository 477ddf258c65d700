"""Fixtures for the tests of commands."""

from tests.evaluation.conftest import opened, train  # noqa: F401
