"""Layers of other projects, where they are installed or lie in a checkout, to be timed beside ours.

A project is imported only when one of its layers is asked for by name.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from stateline.errors import InputError, unknown_name
from stateline.models.config import ModelConfig
from stateline.models.pattern import parse_pattern

Build = Callable[[int], nn.Module]
BuildTrained = Callable[[ModelConfig, int], nn.Module]
"""From the configuration of our model and the length of the rows."""


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
    with _importable("safari", folder, "src/models/sequence/h3.py"):
        module = import_module("src.models.sequence.h3")
    return {"h3": lambda d: module.H3(d, d_state=64, head_dim=1)}


def _s4(folder: Path | None) -> Mapping[str, Build]:
    with _importable("s4", folder, "models/s4/s4d.py"):
        module = import_module("models.s4.s4d")
    return {"s4d": lambda d: _Transposed(module.S4D(d, d_state=64, dropout=0.0))}


PEERS: Mapping[str, Callable[[Path | None], Mapping[str, Build]]] = {
    "hf": _hugging_face,
    "mambapy": _mambapy,
    "s4": _s4,
    "safari": _safari,
}
"""Projects, each with a function that gives its layers by the name of ours."""


@runtime_checkable
class PeerModel(Protocol):
    """A language model of another project, with random weights."""

    vocab_size: int

    def too_large(self, batch: int, prompt: int) -> str:
        """Why a prompt of this size cannot be read, or an empty string."""

    def prefill(self, tokens: Tensor) -> Any:
        """Read a prompt (batch, length), and return the state."""

    def step(self, tokens: Tensor, state: Any) -> object:
        """Read one more token (batch, 1), and change the state."""


class _HuggingFaceMamba:
    """Mamba of transformers, without its own kernels."""

    def __init__(self, d_model: int, vocab_size: int, place: torch.device) -> None:
        mamba = import_module("transformers.models.mamba")
        config = mamba.MambaConfig(
            vocab_size=vocab_size, hidden_size=d_model, num_hidden_layers=MAMBA_LAYERS
        )
        torch.manual_seed(0)
        self.model = mamba.MambaForCausalLM(config).eval().to(place)
        self.vocab_size, self.width = vocab_size, config.intermediate_size * config.state_size

    def too_large(self, batch: int, prompt: int) -> str:
        """Its scan writes out states, transitions and inputs at all positions."""
        needed = 3 * 4 * batch * prompt * self.width
        return f"it would need {needed >> 30} GiB" if needed > MOST_BYTES else ""

    def prefill(self, tokens: Tensor) -> Any:
        """Read the prompt."""
        return self.model(tokens, use_cache=True, logits_to_keep=1).cache_params

    def step(self, tokens: Tensor, state: Any) -> object:
        """Read one token."""
        return self.model(tokens, cache_params=state, use_cache=True)


MAMBA_LAYERS = 24
"""As in Mamba-130M; about as many parameters as 12 layers that each have a feed-forward."""

MOST_BYTES = 4 << 30


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
        """As its own method, which computes all logits only together with a loss."""
        parts = self.gpt.transformer
        x = parts.wte(tokens) + parts.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in parts.h:
            x = block(x)
        logits: Tensor = self.gpt.lm_head(parts.ln_f(x))
        return logits


def _nanogpt(folder: Path | None) -> BuildTrained:
    with _importable("nanogpt", folder, "model.py"):
        module = import_module("model")
    return lambda config, length: _NanoGPT(module, config, length)


PEER_UPDATES: Mapping[str, Callable[[Path | None], BuildTrained]] = {"nanogpt": _nanogpt}
"""Projects with a transformer to train, beside patterns that are attention alone."""

PEER_MODELS: Mapping[str, tuple[str, Callable[[int, int, torch.device], PeerModel]]] = {
    "hf": (f"hf mamba*{MAMBA_LAYERS}", _HuggingFaceMamba)
}
"""Projects with a language model, its name in tables, and what builds it."""


def find_models(
    names: Sequence[str], d_model: int, vocab_size: int, place: torch.device
) -> dict[str, PeerModel]:
    """Language models of other projects with random weights, by name.

    Raises:
        InputError: If a project has none, or cannot be imported.
    """
    for name in names:
        if name not in PEER_MODELS:
            raise unknown_name("peer with a language model", name, PEER_MODELS)
    built = {}
    for name in names:
        title, build = PEER_MODELS[name]
        with _said(name):
            built[title] = build(d_model, vocab_size, place)
    return built


def find_trained(names: Sequence[str], patterns: Sequence[str]) -> dict[str, BuildTrained]:
    """Transformers of other projects to train, ``nanogpt=PATH`` from a checkout, by name.

    Raises:
        InputError: If a project has none or cannot be imported, or no pattern is a transformer.
    """
    found = {}
    for text in names:
        name, _, folder = text.partition("=")
        if name not in PEER_UPDATES:
            raise unknown_name("peer with a transformer to train", name, PEER_UPDATES)
        if not any(map(is_transformer, patterns)):
            raise InputError(f"{name!r} is a transformer: add attention*2 to --patterns")
        with _said(name):
            found[name] = PEER_UPDATES[name](Path(folder) if folder else None)
    return found


def is_transformer(pattern: str) -> bool:
    """Whether a pattern is attention alone.

    Example:
        >>> is_transformer("attention(position=rope)*2"), is_transformer("h3 attention")
        (True, False)
    """
    return {item.name for item in parse_pattern(pattern)} == {"attention"}


def layer_of(pattern: str) -> str:
    """Name of the layer in a pattern of one layer.

    Example:
        >>> layer_of("s4d(output=glu)")
        's4d'
    """
    return pattern.partition("(")[0].strip()


def find_peers(names: Sequence[str], patterns: Sequence[str]) -> dict[str, dict[str, Build]]:
    """Layers of other projects by the name of our layer.

    Args:
        names: Projects: ``hf`` and ``mambapy`` as installed, ``safari=PATH`` and ``s4=PATH`` from
            a checkout of HazyResearch/safari and state-spaces/s4.
        patterns: Layers of ours that are measured.

    Returns:
        ``{layer: {project: build(d_model)}}``.

    Raises:
        InputError: If a project is unknown, cannot be imported, or has none of the layers.
    """
    wanted = set(map(layer_of, patterns))
    found: dict[str, dict[str, Build]] = {}
    for text in names:
        name, _, folder = text.partition("=")
        if name not in PEERS:
            raise unknown_name("peer", name, PEERS)
        with _said(name):
            layers = PEERS[name](Path(folder) if folder else None)
        if wanted.isdisjoint(layers):
            raise InputError(
                f"the peer {name!r} has only {', '.join(layers)}: add it to --patterns, or leave "
                "the peer out of --against"
            )
        for layer, build in layers.items():
            found.setdefault(layer, {})[name] = build
    return found


@contextmanager
def _said(name: str) -> Iterator[None]:
    """Turn a failed import into one line."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"the peer {name!r} cannot be imported: {error}; install it, or leave it out of "
            "--against"
        ) from error


@contextmanager
def _importable(name: str, folder: Path | None, file: str) -> Iterator[None]:
    """Let modules of a checkout, which must have a file, be imported.

    They are forgotten afterwards: both checkouts name their package ``src``.
    """
    if folder is None or not folder.is_dir():
        raise InputError(f"the peer {name!r} needs a checkout: give --against {name}=FOLDER")
    if not (folder / file).is_file():
        raise InputError(f"{folder} is no checkout of {name}: it has no {file}")
    root, before = folder.resolve(), set(sys.modules)
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for module in set(sys.modules) - before:
            place = root / module.partition(".")[0]
            if place.is_dir() or place.with_suffix(".py").is_file():
                del sys.modules[module]
