"""Linear maps by oneDNN equal PyTorch's, in outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing import assert_close

from stateline.layers.linear import Linear
from stateline.ops import linear as module
from stateline.ops.linear import linear

SIZES = [(2048, 64, 192), (2048, 192, 64), (1030, 63, 65)]


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def slower(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both choices, whatever processor this is."""
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("PyTorch was built without oneDNN")
    monkeypatch.setattr(module, "mkl_is_slower", lambda: request.param)
    return request.param


def outcome(function: object, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)  # type: ignore[operator]
    weight = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y, *torch.autograd.grad((y * weight).sum(), leaves)]


@pytest.mark.usefixtures("slower")
@pytest.mark.parametrize(("rows", "d_in", "d_out"), SIZES)
@pytest.mark.parametrize("biased", [True, False])
def test_outputs_and_gradients_are_those_of_double_precision(
    rows: int, d_in: int, d_out: int, biased: bool
) -> None:
    """To the rounding of sums of float32 that are as long as the longest axis."""
    assert rows * d_in * d_out >= module.LEAST
    shapes = [(2, rows // 2, d_in), (d_out, d_in), (d_out,)][: 2 + biased]
    inputs = [torch.randn(shape) for shape in shapes]
    wanted = outcome(F.linear, [x.double() for x in inputs])
    for found, exact in zip(outcome(linear, inputs), wanted, strict=True):
        size = exact.abs().max()
        assert (found - exact).abs().max() <= 2**-24 * rows**0.5 * 4 * size


@pytest.mark.usefixtures("slower")
def test_a_slice_without_a_gradient_is_mapped_as_its_copy_is() -> None:
    x, weight = torch.randn(2048, 3, 64)[:, 1], torch.randn(192, 64)
    assert_close(linear(x, weight), F.linear(x.contiguous(), weight))


@pytest.mark.parametrize("widths", [(64, 192), (192, 64)])
def test_gradients_of_weights_give_onednn_no_slice_as_second_input(
    widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one, it would take 400 times as long."""
    x, grad = (torch.randn(2048, 6, width)[:, 1] for width in widths)
    dense = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        dense.append(b.T.is_contiguous())
        return a @ b.T

    monkeypatch.setattr(module, "product", multiply)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert_close(module.weight_gradient(grad, x), grad.T @ x)
    assert dense == [True]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert_close(module.weight_gradient(grad, x), grad.T @ x)  # by MKL
    assert dense == [True]


@pytest.mark.usefixtures("unannotated")
def test_few_positions_and_other_precisions_take_pytorchs_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "mkl_is_slower", lambda: True)
    weight = torch.randn(192, 64)
    for x in (torch.randn(3, 64), torch.randn(2048, 64, dtype=torch.float64)):
        assert linear(x, weight.to(x.dtype)).equal(F.linear(x, weight.to(x.dtype)))
    x = torch.randn(2048, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    compiled = torch.compile(Linear(64, 192), backend="eager", fullgraph=True)
    assert compiled(x).shape == (2048, 192)


def test_an_exported_map_takes_any_number_of_rows() -> None:
    exported = torch.export.export(
        Linear(64, 192), (torch.randn(3, 64),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    assert exported.module()(torch.randn(2048, 64)).shape == (2048, 192)


@pytest.mark.usefixtures("slower")
def test_gradients_have_the_layout_of_their_weights() -> None:
    layer = Linear(64, 192)
    assert isinstance(layer, nn.Linear)
    layer(torch.randn(2048, 64)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.stride() == layer.weight.stride()


@pytest.mark.usefixtures("slower")
def test_second_derivatives_are_pytorchs() -> None:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((2048, 64), (192, 64), (192,))]

    def second(function: object) -> list[Tensor]:
        y = function(*inputs)  # type: ignore[operator]
        first = torch.autograd.grad(y.tanh().sum(), inputs, create_graph=True)
        return [*torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]

    for found, wanted in zip(second(linear), second(F.linear), strict=True):
        assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.usefixtures("slower")
def test_tangents_of_the_forward_mode_are_mapped() -> None:
    x, weight = torch.randn(2048, 64), torch.randn(192, 64)
    with forward_ad.dual_level():
        y = linear(forward_ad.make_dual(x, 2 * x), weight)
        assert_close(forward_ad.unpack_dual(y).tangent, F.linear(2 * x, weight))


@pytest.mark.usefixtures("slower")
def test_functions_of_a_map_can_be_transformed() -> None:
    x, weight = torch.randn(2048, 64), torch.randn(192, 64)
    gradient = torch.func.grad(lambda x: linear(x, weight).sum())(x)
    assert_close(gradient, weight.sum(0).expand(2048, 64))


@pytest.mark.parametrize(
    ("capability", "flags", "few_too"),
    [
        ("AVX512", "avx512f avx_vnni", True),
        ("AVX512", "avx512f", False),
        ("AVX2", "avx512f avx_vnni", False),
    ],
)
def test_without_whole_avx512_few_positions_are_left_to_mkl(
    capability: str, flags: str, few_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "mkl_is_slower", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(module, "_about_processor", lambda: flags)
    module._limits.cache_clear()
    maps = [(128, 256, 768), (1024, 64, 64), (1024, 128, 128)]
    found = [module._by_onednn(torch.ones(n, d), torch.ones(out, d)) for n, d, out in maps]
    module._limits.cache_clear()
    assert found == [few_too, few_too, True]


def test_rows_that_are_filled_up_in_bfloat16_are_mapped_as_they_are() -> None:
    x, weight = torch.randn(2, 150, 512).bfloat16(), torch.randn(1024, 512).bfloat16()
    bias, wanted = torch.randn(1024).bfloat16(), F.linear(x.double(), weight.double())
    wanted += bias.double()
    limit = 2**-7 * float(wanted.abs().max())
    assert_close(linear(x[:, 1:], weight, bias).double(), wanted[:, 1:], rtol=0, atol=limit)
