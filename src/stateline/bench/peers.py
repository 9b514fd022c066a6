"""Layers of other projects, where they are installed or lie in a checkout, to be timed beside ours.

Nothing of theirs is imported before it is asked for by name.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from torch import Tensor, nn

from stateline.errors import InputError, unknown_name

Build = Callable[[int], nn.Module]


class _Transposed(nn.Module):
    """A layer that takes (batch, channel, length), for input (batch, length, channel)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.mT)
        return (y[0] if isinstance(y, tuple) else y).mT


def _hugging_face(_: Path | None) -> Mapping[str, Build]:
    mamba2 = import_module("transformers.models.mamba2")

    def block2(d_model: int) -> nn.Module:
        config = mamba2.Mamba2Config(
            hidden_size=d_model,
            vocab_size=8,
            num_hidden_layers=1,
            num_heads=2 * d_model // 64,
            head_dim=64,
            state_size=128,
            n_groups=1,
        )
        return mamba2.modeling_mamba2.Mamba2Mixer(config, 0)

    return {"mamba2": block2}  # without its kernels, the backward pass of Mamba takes minutes


def _mambapy(_: Path | None) -> Mapping[str, Build]:
    module = import_module("mambapy.mamba")
    return {"mamba": lambda d: module.MambaBlock(module.MambaConfig(d_model=d, n_layers=1))}


def _safari(folder: Path | None) -> Mapping[str, Build]:
    with _importable("safari", folder):
        module = import_module("src.models.sequence.h3")
    return {"h3": lambda d: module.H3(d, d_state=64, head_dim=1)}


def _s4(folder: Path | None) -> Mapping[str, Build]:
    with _importable("s4", folder):
        module = import_module("models.s4.s4d")
    return {"s4d": lambda d: _Transposed(module.S4D(d, d_state=64, dropout=0.0))}


PEERS: Mapping[str, Callable[[Path | None], Mapping[str, Build]]] = {
    "hf": _hugging_face,
    "mambapy": _mambapy,
    "s4": _s4,
    "safari": _safari,
}
"""Projects, each with a function that gives its layers by the name of ours."""


def find_peers(names: Sequence[str]) -> dict[str, dict[str, Build]]:
    """Layers of other projects by the name of our layer.

    Args:
        names: Projects: ``hf`` and ``mambapy`` as installed, ``safari=PATH`` and ``s4=PATH`` from
            a checkout of HazyResearch/safari and state-spaces/s4.

    Returns:
        ``{layer: {project: build(d_model)}}``.

    Raises:
        InputError: If a project is unknown or cannot be imported.
    """
    found: dict[str, dict[str, Build]] = {}
    for text in names:
        name, _, folder = text.partition("=")
        if name not in PEERS:
            raise unknown_name("peer", name, PEERS)
        try:
            layers = PEERS[name](Path(folder) if folder else None)
        except ImportError as error:
            raise InputError(
                f"the peer {name!r} cannot be imported: {error}; install it, or leave it out of "
                "--against"
            ) from error
        for layer, build in layers.items():
            found.setdefault(layer, {})[name] = build
    return found


@contextmanager
def _importable(name: str, folder: Path | None) -> Iterator[None]:
    """Let modules of a checkout be imported."""
    if folder is None or not folder.is_dir():
        raise InputError(f"the peer {name!r} needs a checkout: give --against {name}=FOLDER")
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))
