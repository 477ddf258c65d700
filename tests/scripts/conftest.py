"""What the tests of commands share."""

from tests.evaluation.conftest import opened, train  # noqa: F401
