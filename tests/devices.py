"""A simulated accelerator: tensors on the device ``fake`` compute on the CPU, under supervision.

An operation that mixes tensors of the device with tensors of the CPU fails, as on a GPU, so a
forgotten ``.to(device)`` is found on a machine without one. :func:`watch` counts what is done.

Where there is a GPU, importing this module skips the tests: PyTorch would take the simulated device
for the accelerator, and gradients on the GPU would fail in the whole process.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch._decomp.decompositions import lstm_impl, matmul
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

if torch.cuda.is_available():
    pytest.skip(
        "a simulated accelerator cannot stand beside a GPU: hide it with CUDA_VISIBLE_DEVICES=",
        allow_module_level=True,
    )

MIXED = {"_to_copy", "copy_", "_copy_from", "index", "index_put", "index_put_"}
"""Operations that take tensors of both devices, as on a GPU (indices may be on the CPU)."""

READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim"}
READS |= {"_unique2", "unique_consecutive"}
HEAVY = {"mm", "bmm", "addmm", "baddbmm", "embedding", "convolution", "_fft_r2c", "_fft_c2r"}
HEAVY |= {"_log_softmax", "_softmax", "nll_loss_forward", "native_layer_norm", "tanh"}
HEAVY |= {"_thnn_fused_lstm_cell", "_scaled_dot_product_flash_attention_for_cpu", "sigmoid"}


@dataclass
class Counts:
    """Operations by name.

    Attributes:
        device: On the simulated device.
        cpu: On the CPU alone.
        reads: Results that the host waited for (a synchronisation each).
    """

    device: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)
    reads: int = 0

    @property
    def heavy_on_cpu(self) -> set[str]:
        """Computations of a model that ran on the CPU."""
        return HEAVY & self.cpu.keys()


_counting: list[Counts] = []


@contextmanager
def watch() -> Iterator[Counts]:
    """Count operations of this thread."""
    counts = Counts()
    _counting.append(counts)
    try:
        with _Watch():
            yield counts
    finally:
        _counting.remove(counts)


class FakeTensor(torch.Tensor):
    """A tensor that says it is on the device ``fake``; ``held`` has its numbers, on the CPU."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # where ``item``, ``to``, ... come undecomposed
            if op is torch.ops.aten.lstm.input:
                return _lstm(*args, **kwargs)
            parts = op.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        return _run(op, *args, **kwargs)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: "FakeTensor") -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held = other.held

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        learned = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = _restored(self.held, self.requires_grad, learned)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.held, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"fake {self.held!r}"

    def tolist(self) -> Any:
        """A copy as numbers, which PyTorch refuses for subclasses."""
        return self.cpu().tolist()


def _restored(held: torch.Tensor, requires_grad: bool, learned: bool) -> torch.Tensor:
    """A tensor or parameter of the device, with these numbers."""
    tensor = held.to("fake").requires_grad_(requires_grad)
    return torch.nn.Parameter(tensor, requires_grad) if learned else tensor


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        estimated = fake_tensor.FakeTensor in types  # PyTorch's: they have no numbers
        if not estimated and not _on_device(args, kwargs):
            for counts in _counting:
                counts.cpu[_name(op)] += 1
        return op(*args, **kwargs)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of the device on the CPU."""
    name, flat = _name(op), pytree.tree_leaves((args, kwargs))
    held = {id(leaf.held): leaf for leaf in flat if isinstance(leaf, FakeTensor)}
    strangers = [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.ndim]
    strangers = [leaf for leaf in strangers if not isinstance(leaf, FakeTensor)]
    if held and strangers and name not in MIXED:
        shapes = [tuple(leaf.shape) for leaf in strangers]
        raise RuntimeError(f"{name} got tensors of the device and, of shapes {shapes}, of the CPU")
    target = kwargs.get("device")
    stays = name != "_to_copy" or target is None or torch.device(target).type == "fake"
    for counts in _counting:
        counts.device[name] += 1
        counts.reads += name in READS or not stays or (name == "copy_" and _leaves(args))
    args, kwargs = pytree.tree_map(_unwrap, (args, kwargs))
    result = op(*args, **kwargs)
    if name == "copy_" and not held:
        return result
    return pytree.tree_map(lambda leaf: _wrap(leaf, held), result) if stays else result


def _leaves(args: tuple[Any, ...]) -> bool:
    """Whether numbers are copied from the device to the CPU."""
    return isinstance(args[1], FakeTensor) and not isinstance(args[0], FakeTensor)


def _name(op: Any) -> str:
    return str(op.name()).removeprefix("aten::").partition(".")[0]


def _on_device(args: Any, kwargs: Any) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    named = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "fake"
    return named or any(isinstance(leaf, FakeTensor) or _is_meta(leaf) for leaf in leaves)


def _is_meta(leaf: Any) -> bool:
    """Whether a tensor has no numbers, so that an operation on it computes nothing anywhere."""
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _unwrap(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value.held.resolve_conj()  # the kernels of the CPU take the numbers as they lie
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _wrap(value: Any, known: dict[int, FakeTensor]) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    if id(value) in known:  # changed in place
        return known[id(value)]
    with torch.inference_mode(False):  # else a view of a parameter cannot be made
        made = torch.Tensor._make_wrapper_subclass(
            FakeTensor,
            value.shape,
            value.stride(),
            value.storage_offset(),
            dtype=value.dtype,
            device=torch.device("fake", 0),
        )
    made.held = value
    return made


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def synchronize(self) -> None:
        """Nothing runs in the background."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


_setup_privateuseone_for_python_backend("fake", backend_module=_Module())
_library = torch.library.Library("_", "IMPL")
_library.fallback(_run, "PrivateUse1")
_autocast = torch.library.Library("_", "IMPL")
_autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _lowered(op: Any) -> Any:
    """An operation as autocast runs it."""

    def run(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype("fake")
        with torch.autocast("fake", enabled=False):
            return op(*pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype), args))

    return run


def _lstm(x: torch.Tensor, state: list[torch.Tensor], *args: Any) -> Any:
    """PyTorch's decomposition, whose final states have a dimension too many in torch 2.11."""
    y, *after = lstm_impl(x, state, *args)
    return y, *(new.view_as(old) for new, old in zip(after, state, strict=True))


_aten = torch.library.Library("aten", "IMPL")
_made = torch.ops.aten
for _op in (  # which find no fallback, or fill an empty tensor whose size would have to change
    _made._to_copy.default,
    *(_made.eye.default, _made.eye.m),
    *(_made.arange.default, _made.arange.start, _made.arange.start_step),
):
    _aten.impl(_op, partial(_run, _op), "PrivateUse1")
for _product in ("linear", "matmul", "mm", "bmm", "addmm"):
    _aten.impl(_product, _lowered(getattr(_made, _product)), "AutocastPrivateUse1")
_aten.impl("matmul", matmul, "AutogradPrivateUse1")  # without changes of shape in place
_aten.impl("lstm.input", _lstm, "AutogradPrivateUse1")  # not the fused cell of GPUs
