"""The law holds on CUDA devices, too: ``pytest --device cuda`` for a certain one."""

import pytest
import torch

from stateline.layers.law import check_layer
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig

PATTERNS = [
    "attention(position=rope)",
    "attention(position=hard_alibi)",
    "h3(d_head=2)",
    "ladder(s4d lstm)",
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_law_holds_on_a_cuda_device(pattern: str, dtype: torch.dtype) -> None:
    stack = build_stack(ModelConfig(pattern, vocab_size=1, d_model=16)).cuda()
    report = check_layer(stack, dtype=dtype, name=pattern)
    assert report.ok, str(report)
