"""``pytest --device NAME``: what tests compute with is on that device.

Tensors that the code of tests makes, and parameters and buffers of all modules, are moved there.
Tensors that the library makes are where the library puts them, so a device that it forgot is an
error on CUDA devices, and on the simulated one of :mod:`tests.devices`. ``torch.as_tensor`` moves
what tests take from the library, such as the batches of a task.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

TESTS = str(Path(__file__).parent)


class _Placed(TorchFunctionMode):
    """Moves new tensors of tests to a device; numbers are drawn on the CPU, the same anywhere."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.makes = set(_device_constructors())

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if function not in self.makes or kwargs.get("device") is not None:
            return made
        if not sys._getframe(1).f_code.co_filename.startswith(TESTS):
            return made
        return made.detach().to(self.device).requires_grad_(made.requires_grad)


@contextmanager
def placed(device: torch.device) -> Iterator[None]:
    """Put what tests make on a device."""

    def move(_: nn.Module, __: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.is_meta or tensor.device.type == device.type:
            return tensor
        if isinstance(tensor, FakeTensor):  # it has no numbers
            return tensor
        moved = tensor.detach().to(device)
        learned = isinstance(tensor, nn.Parameter)
        return nn.Parameter(moved, tensor.requires_grad) if learned else moved

    hooks = [
        module.register_module_parameter_registration_hook(move),
        module.register_module_buffer_registration_hook(move),
    ]
    try:
        with _Placed(device):
            yield
    finally:
        for hook in hooks:
            hook.remove()
