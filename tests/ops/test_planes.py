import torch
from torch import Tensor

from stateline.ops.planes import divide, exponential, multiply

A, B = torch.randn(2, 4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def as_complex(planes: Tensor) -> Tensor:
    return torch.view_as_complex(planes.contiguous())


def assert_planes(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(as_complex(found), wanted, rtol=1e-13, atol=1e-13)


def test_multiply_is_complex_multiplication() -> None:
    assert_planes(multiply(A, B), as_complex(A) * as_complex(B))


def test_divide_is_complex_division() -> None:
    assert_planes(divide(A, B), as_complex(A) / as_complex(B))


def test_exponential_is_the_complex_exponential() -> None:
    assert_planes(exponential(A), as_complex(A).exp())


def test_leading_axes_broadcast() -> None:
    assert_planes(multiply(A[:, :1], B), as_complex(A)[:, :1] * as_complex(B))
    assert_planes(divide(A[0], B), as_complex(A)[0] / as_complex(B))
