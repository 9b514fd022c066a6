import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random weights and inputs are the same in every run."""
    torch.manual_seed(0)
