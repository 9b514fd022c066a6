"""The suite ``decode``: several models read a prompt (prefill), then decode token by token."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from stateline.bench.peers import PeerLayer
from stateline.bench.peers_hf import Mamba
from stateline.bench.record import Figure, Skipped
from stateline.bench.speed import read
from stateline.bench.suites import BenchSettings, build_model, figure_of, layers_of
from stateline.bench.timing import Call, Timing, interleave, stopwatch
from stateline.generate.graphs import Graphs
from stateline.layers import Stack
from stateline.layers.decoder import Decoder
from stateline.layers.state import nbytes
from stateline.layers.stored_state import stored
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.ops import use_backend
from stateline.ops.op import Sizes

DECODED = 32
"""Tokens that are decoded after a prompt, each a sample."""

LAYER_STEPS = 8 * DECODED
"""Tokens that single layers decode after a prompt: more, since their steps are short."""

LONG_SECONDS = 10.0
"""If the first prefill takes longer, it is the only sample."""


def bench_decode(
    settings: BenchSettings,
    configs: Mapping[str, ModelConfig],
    batches: Sequence[int],
    peers: Mapping[str, Mamba],
) -> Iterator[Figure]:
    """Prefill of a prompt, then one token after the other, for models side by side.

    All models decode in turns, a token each. Their states stay in memory at the same time. A peer
    whose prefill needs too much memory decodes after a prompt of one token: a state of constant
    size costs the same at any length.
    """
    models = {name: build_model(config, settings).eval() for name, config in configs.items()}
    ours = {f"{n} [{b}]": (model, b) for n, model in models.items() for b in settings.of_models}
    for prompt in settings.lengths:
        for batch in batches:
            sizes = Sizes(batch, prompt, 1, settings.device, settings.dtype)
            one = Sizes(batch, 1, 1, settings.device, settings.dtype)
            decoders: dict[str, _Ours | _Peer] = {
                name: _Ours(model, backend, settings.state_dtype, batch, prompt)
                for name, (model, backend) in ours.items()
            }
            fill = {name: decoder.prefill for name, decoder in decoders.items()}
            for name, peer in peers.items():
                reason = peer.too_large(batch, prompt)
                shape = batch, 1 if reason else prompt
                tokens = torch.randint(peer.vocab_size, shape, device=settings.device)
                decoders[name] = _Peer(peer, tokens)
                if reason:
                    settings.skipped.append(Skipped("prefill", name, "prefill", prompt, reason))
                    decoders[name].prefill()
                else:
                    fill[name] = decoders[name].prefill
            for name, timing in _prefills(fill, settings.device).items():
                yield figure_of("prefill", name, "prefill", sizes, timing)
            steps = {name: decoder.step for name, decoder in decoders.items()}
            timed = interleave(steps, rounds=DECODED, device=settings.device)
            for name, timing in timed.items():
                size = nbytes(decoders[name].state) if name in ours else None
                figure = figure_of("decode", name, "decode", one, timing, n_bytes=size)
                yield msgspec.structs.replace(figure, length=prompt)


def _prefills(fill: Mapping[str, Call], device: torch.device) -> dict[str, Timing]:
    """Two rounds of short calls; a long prefill is called once."""
    elapsed_in = stopwatch(device)
    first = {name: elapsed_in(call, 1) for name, call in fill.items()}
    short = {name: call for name, call in fill.items() if first[name] < LONG_SECONDS}
    timed = interleave(short, rounds=2, device=device, first=first)
    return {name: timed.get(name) or Timing(first[name], (first[name],)) for name in fill}


def bench_layer_decoding(settings: BenchSettings, patterns: Sequence[str]) -> Iterator[Figure]:
    """Prefill and decoding by single layers, and by the peers that can decode."""
    for pattern in patterns:
        ours, peers = layers_of(pattern, settings)
        recurrent = {n: peer for n, peer in peers.items() if isinstance(peer, PeerLayer)}
        for length in settings.lengths:
            sizes = settings.sizes(length)
            x = sizes.signal(settings.d_model)
            decoders: dict[str, _Ours | _Peer] = {
                backend: _Ours(ours, backend, None, sizes.batch, length, 2 * LAYER_STEPS)
                for backend in settings.of_models
            }
            decoders |= {name: _Peer(peer, x) for name, peer in recurrent.items()}
            prefill = {name: decoder.prefill for name, decoder in decoders.items()}
            yield from settings.timed(pattern, "prefill", sizes, prefill)
            held = {name: tensor_bytes(decoder.state) for name, decoder in decoders.items()}
            steps = {name: decoder.step for name, decoder in decoders.items()}
            timed = interleave(
                steps, rounds=LAYER_STEPS, device=settings.device, clock=settings.clock
            )
            for name, timing in timed.items():
                one = sizes._replace(length=1)
                figure = figure_of(pattern, name, "decode", one, timing, n_bytes=held[name])
                yield msgspec.structs.replace(figure, length=length)


def tensor_bytes(state: object) -> int:
    """Bytes of all tensors that a state holds, ours or a cache of another project."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(tensor_bytes, state.values()))
    if isinstance(state, list | tuple):
        return sum(map(tensor_bytes, state))
    return tensor_bytes(vars(state)) if hasattr(state, "__dict__") else 0


class _Ours:
    """A model of ours that decodes in place, as in a decoding session, or a single layer.

    A session prepares a token once for all layers, so the time of a layer excludes that.
    """

    def __init__(
        self,
        model: LanguageModel | Stack,
        backend: str,
        state_dtype: torch.dtype | None,
        batch: int,
        prompt: int,
        capacity: int = 2 * DECODED,
    ) -> None:
        self.model, self.backend, self.state_dtype = model, backend, state_dtype
        self.tokens, self.capacity = model.example_input(batch, prompt), capacity
        self.state: Any = None
        with use_backend(backend):  # which prepared steps are bound to
            self.decode = Decoder(model).ready.step_
        self.graphs = Graphs(self.decode) if self.tokens.is_cuda else None

    @torch.inference_mode()
    def prefill(self) -> None:
        with use_backend(self.backend):
            begun = self.model.init_state(len(self.tokens), capacity=self.capacity)
            self.state = read(self.model, self.tokens, begun)
            if self.state_dtype is not None:
                self.state = stored(self.state, self.state_dtype)

    @torch.inference_mode()
    def step(self) -> None:
        with use_backend(self.backend):
            if self.graphs is None:
                self.decode(self.tokens[:, 0], self.state)
            else:
                _, self.state = self.graphs(self.tokens[:, 0], self.state)


class _Peer:
    """A model or a layer of another project."""

    def __init__(self, peer: PeerLayer, tokens: Tensor) -> None:
        self.peer, self.tokens = peer, tokens
        self.state: Any = None

    @torch.inference_mode()
    def prefill(self) -> None:
        self.state = self.peer.prefill(self.tokens)

    @torch.inference_mode()
    def step(self) -> None:
        self.peer.step(self.tokens[:, :1], self.state)
