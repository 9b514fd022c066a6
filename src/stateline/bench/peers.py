"""Layers and models of other projects, installed or in a checkout, to time beside ours.

A project is imported only when it is asked for by name.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateline.bench import fla_naive, peers_hf
from stateline.errors import InputError, check_choice
from stateline.layers import Stack
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.models.presets import configure
from stateline.ops import use_backend
from stateline.pattern import parse_pattern

Build = Callable[[str, int], nn.Module | None]
"""Makes a layer from our pattern and the number of channels; ``None`` if there is none."""

BuildTrained = Callable[[ModelConfig, int], nn.Module]
"""Makes a model from our configuration and the length of the rows."""


@runtime_checkable
class PeerLayer(Protocol):
    """A layer or a model of another project that decodes; a model reads tokens, not vectors."""

    def prefill(self, x: Tensor) -> Any:
        """Read a prompt (batch, length, channel), and return the state."""

    def step(self, x: Tensor, state: Any) -> object:
        """Read one more position (batch, 1, channel), and change the state."""


class _Transposed(nn.Module):
    """A layer that takes (batch, channel, length), for input (batch, length, channel)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.mT)
        return (y[0] if isinstance(y, tuple) else y).mT


class _Naive(nn.Module):
    """Our layer, whose recurrence is computed by the plain code of flash-linear-attention."""

    def __init__(self, pattern: str, d_model: int) -> None:
        super().__init__()
        self.layer = bare_layer(pattern, d_model)

    @use_backend(fla_naive.BACKEND)
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @use_backend(fla_naive.BACKEND)
    def prefill(self, x: Tensor) -> Any:
        return self.layer.forward_chunk(x, self.layer.init_state(len(x)))[1]

    @use_backend(fla_naive.BACKEND)
    def step(self, x: Tensor, state: Any) -> object:
        return self.layer.step_(x[:, 0], state)


class _SLSTM(nn.Module):
    """The sLSTM of NX-AI in plain PyTorch."""

    def __init__(self, module: Any, d_model: int) -> None:
        super().__init__()
        config = module.sLSTMLayerConfig(embedding_dim=d_model, num_heads=4, backend="vanilla")
        self.layer = module.sLSTMLayer(config)
        self.layer.reset_parameters()
        self.taps: int = config.conv1d_kernel_size

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y

    def prefill(self, x: Tensor) -> dict[str, Any]:
        """The state after a prompt; the convolution's part of it is the latest inputs."""
        state: dict[str, Any] = self.layer(x, return_last_state=True)[1]
        latest = F.pad(x, (0, 0, self.taps, 0))[:, -self.taps :]
        return state | {"conv_state": (latest,)}

    def step(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        y, after = self.layer.step(x, **state)
        state |= after
        return y


class _NanoGPT(nn.Module):
    """The GPT of nanoGPT without dropout, which gives the logits of all positions."""

    def __init__(self, module: Any, config: ModelConfig, length: int) -> None:
        super().__init__()
        items = parse_pattern(config.pattern)
        own = module.GPTConfig(
            block_size=length,
            vocab_size=config.vocab_size,
            n_layer=sum(item.repeat for item in items),
            n_head=items[0].keywords.get("n_heads", 4),
            n_embd=config.d_model,
            dropout=0.0,
        )
        with redirect_stdout(None):  # it prints its number of parameters
            self.gpt = module.GPT(own)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of all positions, which nanoGPT's own method gives only together with a loss."""
        parts = self.gpt.transformer
        x = parts.wte(tokens) + parts.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in parts.h:
            x = block(x)
        logits: Tensor = self.gpt.lm_head(parts.ln_f(x))
        return logits


def _mambapy(_: Path | None) -> Mapping[str, Build]:
    module = import_module("mambapy.mamba")
    return {"mamba": lambda _, d: module.MambaBlock(module.MambaConfig(d_model=d, n_layers=1))}


def _safari(folder: Path | None) -> Mapping[str, Build]:
    module = _of_checkout("safari", folder, "src/models/sequence/h3.py")
    return {"h3": lambda _, d: module.H3(d, d_state=64, head_dim=1)}


def _s4(folder: Path | None) -> Mapping[str, Build]:
    module = _of_checkout("s4", folder, "models/s4/s4d.py")
    return {"s4d": lambda _, d: _Transposed(module.S4D(d, d_state=64, dropout=0.0))}


def _xlstm(folder: Path | None) -> Mapping[str, Build]:
    module = _of_checkout("xlstm", folder, "xlstm/blocks/slstm/layer.py")
    return {"slstm": lambda _, d: _SLSTM(module, d)}


def _fla(folder: Path | None) -> Mapping[str, Build]:
    if folder is None:
        raise InputError("the peer 'fla' needs a checkout: give --against fla=FOLDER")
    fla_naive.register(folder)
    return dict.fromkeys(fla_naive.LAYERS, _Naive)


def _nanogpt(folder: Path | None) -> BuildTrained:
    module = _of_checkout("nanogpt", folder, "model.py")
    return lambda config, length: _NanoGPT(module, config, length)


PEERS: Mapping[str, Callable[[Path | None], Mapping[str, Build]]] = {
    "fla": _fla,
    "hf": peers_hf.hugging_face,
    "mambapy": _mambapy,
    "s4": _s4,
    "safari": _safari,
    "xlstm": _xlstm,
}
"""For each project, a function that returns its layers by the names of ours."""

PEER_UPDATES: Mapping[str, Callable[[Path | None], BuildTrained]] = {"nanogpt": _nanogpt}
"""Projects with a transformer to train, beside patterns that are attention alone."""

PEER_MODELS: Mapping[str, type[peers_hf.Mamba]] = {"hf": peers_hf.Mamba}
"""For each project with a language model, its class."""


def find_models(
    names: Sequence[str], d_model: int, vocab_size: int, place: torch.device
) -> dict[str, peers_hf.Mamba]:
    """Language models of other projects, by their names in tables.

    Raises:
        InputError: If a project has none, or cannot be imported.
    """
    for name in names:
        check_choice("peer with a language model", name, PEER_MODELS)
    models = [_imported(name, PEER_MODELS[name], d_model, vocab_size, place) for name in names]
    return {model.title: model for model in models}


def find_trained(names: Sequence[str], patterns: Sequence[str]) -> dict[str, BuildTrained]:
    """Transformers of other projects to train, ``nanogpt=PATH`` from a checkout, by name.

    Raises:
        InputError: If a project has none or cannot be imported, or no pattern is a transformer.
    """
    found = {}
    for name, folder in map(_named, names):
        check_choice("peer with a transformer to train", name, PEER_UPDATES)
        if not any(map(is_transformer, patterns)):
            raise InputError(f"{name!r} is a transformer: add attention*2 to --patterns")
        found[name] = _imported(name, PEER_UPDATES[name], folder)
    return found


def find_peers(names: Sequence[str], patterns: Sequence[str]) -> dict[str, dict[str, Build]]:
    """Layers of other projects by the name of our layer.

    Args:
        names: Projects: ``hf`` and ``mambapy`` as installed, ``safari=PATH``, ``s4=PATH``,
            ``fla=PATH`` and ``xlstm=PATH`` from checkouts of HazyResearch/safari, state-spaces/s4,
            fla-org/flash-linear-attention and NX-AI/xlstm.
        patterns: Layers of ours that are measured.

    Returns:
        ``{layer: {project: build(pattern, d_model)}}``.

    Raises:
        InputError: If a project is unknown, cannot be imported, or has none of the layers.
    """
    wanted = set(map(layer_of, patterns))
    found: dict[str, dict[str, Build]] = {}
    for name, folder in map(_named, names):
        check_choice("peer", name, PEERS)
        layers = _imported(name, PEERS[name], folder)
        if wanted.isdisjoint(layers):
            raise InputError(
                f"the peer {name!r} has only {', '.join(layers)}: add it to --patterns, or leave "
                "the peer out of --against"
            )
        for layer, build in layers.items():
            found.setdefault(layer, {})[name] = build
    return found


def is_transformer(pattern: str) -> bool:
    """Whether a pattern is attention alone.

    Example:
        >>> is_transformer("attention(position=rope)*2"), is_transformer("h3 attention")
        (True, False)
    """
    return {item.name for item in parse_pattern(pattern)} == {"attention"}


def bare_layer(pattern: str, d_model: int) -> Stack:
    """A layer of ours, without norm, residual and feed-forward."""
    return build_stack(
        configure(pattern, vocab_size=1, d_model=d_model, block="plain", feed_forward="none")
    )


def layer_of(pattern: str) -> str:
    """Name of the layer in a pattern of one layer.

    Example:
        >>> layer_of("s4d(output=glu)")
        's4d'
    """
    return pattern.partition("(")[0].strip()


def _named(text: str) -> tuple[str, Path | None]:
    """Name and folder of ``name=folder`` or ``name``."""
    name, _, folder = text.partition("=")
    return name, Path(folder) if folder else None


def _imported(name: str, build: Callable[..., Any], *given: Any) -> Any:
    """The result of ``build``; InputError if it cannot import the project."""
    try:
        return build(*given)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"the peer {name!r} cannot be imported: {error}; install it, or leave it out of "
            "--against"
        ) from error


def _of_checkout(name: str, folder: Path | None, file: str) -> Any:
    """A module of a checkout.

    All modules of the checkout are forgotten afterwards: several projects name their package
    ``src``.
    """
    if folder is None or not folder.is_dir():
        raise InputError(f"the peer {name!r} needs a checkout: give --against {name}=FOLDER")
    if not (folder / file).is_file():
        raise InputError(f"{folder} is no checkout of {name}: it has no {file}")
    root, before = folder.resolve(), set(sys.modules)
    sys.path.insert(0, str(root))
    try:
        return import_module(file.removesuffix(".py").replace("/", "."))
    finally:
        sys.path.remove(str(root))
        for module in set(sys.modules) - before:
            place = root / module.partition(".")[0]
            if place.is_dir() or place.with_suffix(".py").is_file():
                del sys.modules[module]
