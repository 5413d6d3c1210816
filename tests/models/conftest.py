"""One thread: the models here are too small for two, which would wait for each other on a busy machine."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
