"""Memory and utilisation in the log: of a GPU only."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from stateline.cli.progress import describe
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.train.metrics import Metrics
from stateline.train.usage import Usage, rate_of_products

METRICS = Metrics(1, 2, 1.0, None, 1e-3, 1000.0, 1.0)


@pytest.fixture
def usage() -> Callable[..., Usage]:
    model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8))

    def make(**options: float) -> Usage:
        return Usage(model, 16, torch.float32, torch.device("cpu"), **options)

    return make


def test_there_is_nothing_to_read_on_a_cpu(usage: Callable[..., Usage]) -> None:
    assert (usage().memory(), usage().utilisation(100.0)) == (None, None)


def test_utilisation_is_three_forward_passes_over_the_peak(usage: Callable[..., Usage]) -> None:
    model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8))
    found = usage(flops_per_second=1e6).utilisation(100.0)
    assert found == pytest.approx(100 * 3 * model.flops_per_token(16) / 1e6)


def test_a_line_shows_both_where_they_are_known() -> None:
    assert "1,000 tokens/s  0:01" in describe(METRICS, "bits")
    both = dataclasses.replace(METRICS, memory=3 << 29, utilisation=0.414)
    assert "1,000 tokens/s (41% of peak)  1.5 GiB  0:01" in describe(both, "bits")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_memory_and_a_rate() -> None:
    device = torch.device("cuda")
    assert rate_of_products(device, torch.bfloat16) > 1e12
    model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)).cuda()
    memory = Usage(model, 16, torch.bfloat16, device).memory()
    assert memory is not None
    assert memory > 0
