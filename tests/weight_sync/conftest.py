"""Two ranks in processes of their own, for the tests of a module."""

import pytest
from weight_sync.processes import Processes


@pytest.fixture(scope="module")
def processes():
    made = Processes(2, "weight_sync.components:RowsRank")
    yield made
    made.close()


@pytest.fixture
def ranks(processes):
    processes.ask("become", 0)
    return processes
