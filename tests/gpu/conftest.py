import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9:
        return
    for item in items:
        if "tests/gpu" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
