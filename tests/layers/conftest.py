from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from stateline.ops import OPS, register_backend


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random weights and inputs are the same in every run."""
    torch.manual_seed(0)


@pytest.fixture
def windows_without_operations() -> Iterator[None]:
    """Attention in a window costs no operations, for it computes whole blocks of scores."""
    module = SimpleNamespace(local_attention=lambda q, *_: q)
    register_backend("local_attention", "free", module, before=OPS["local_attention"].backends[0])
    yield
    OPS["local_attention"].remove("free")
