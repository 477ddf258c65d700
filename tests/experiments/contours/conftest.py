"""Fixtures of the tests of contours."""

from tests.evaluation.conftest import train  # noqa: F401
