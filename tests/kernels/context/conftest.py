"""Process groups, for the tests that request them."""

import pytest

from tests.kernels.context.processes import Processes


@pytest.fixture(scope="session")
def two():
    processes = Processes(2)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def four():
    processes = Processes(4)
    yield processes
    processes.close()


@pytest.fixture(params=[2, 4], ids=["two", "four"])
def processes(request, two, four):
    return two if request.param == 2 else four
