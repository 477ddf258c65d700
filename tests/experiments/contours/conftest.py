"""What the tests of contours share."""

from tests.evaluation.conftest import train  # noqa: F401
