"""One thread for every test of a part."""

import pytest

from fedflat.rounds.interface import one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield
