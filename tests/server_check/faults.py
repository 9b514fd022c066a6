"""Servers with a planted bug each."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch
from starlette.applications import Starlette
from torch.utils import _pytree as pytree

from stateline.data import CharacterTokenizer
from stateline.generate import PrefixStates, SessionState, extend
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.serve import engine as engine_module
from stateline.serve import make_app
from stateline.serve.engine import Engine
from stateline.serve.replies import CompletionAnswer

LETTERS = "abcdefghijklmnopqrstuvwxyz .,;:?"


def model_of_letters(max_len: int = 640) -> LanguageModel:
    """A model whose answers depend on all that it has read, and on its position."""
    torch.manual_seed(3)
    pattern = "h3(d_state=8) attention(position=rope)"
    config = ModelConfig(pattern, len(LETTERS), 16, tie_embeddings=False, max_len=max_len)
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def letters_app(model: LanguageModel, memory: int = 1 << 20, every: int = 16) -> Starlette:
    """A server with little memory for kept states, so that it must drop some."""
    kept = PrefixStates(model, every=every, memory=memory)
    return make_app(kept, CharacterTokenizer(LETTERS), "letters")


def changed(state: SessionState, change: Callable[[torch.Tensor], torch.Tensor]) -> SessionState:
    """The state with all its real numbers changed."""

    def one(leaf: torch.Tensor) -> torch.Tensor:
        return change(leaf) if leaf.is_floating_point() else leaf

    return state._replace(model=pytree.tree_map(one, state.model))


def on_get(engine: Engine, change: Callable[[SessionState], SessionState]) -> None:
    """What is kept comes back changed."""
    kept, get = engine.prefixes, engine.prefixes.get

    def wrong(key: bytes) -> SessionState | None:
        state = get(key)
        return None if state is None else change(state)

    kept.get = wrong  # type: ignore[method-assign]


def changing_state(engine: Engine) -> None:
    """Every use of a kept state changes it."""

    def used(state: SessionState) -> SessionState:
        for leaf in pytree.tree_leaves(state.model):
            if leaf.is_floating_point():
                leaf.mul_(1.5)
        return state

    on_get(engine, used)


def wrong_block(engine: Engine) -> None:
    """The state of a shorter prefix is taken for that of a longer one."""
    kept = engine.prefixes
    longest = kept._longest

    def wrong(found: dict[int, bytes]) -> Any:
        number, state = longest(found)
        shorter, other = longest({n: key for n, key in found.items() if n < number})
        return (number, other) if shorter else (number, state)

    kept._longest = wrong  # type: ignore[method-assign]


def mixed_rows(engine: Engine) -> None:
    """Rows that join stand in another order than their clients."""
    join = engine._join

    def wrong(ready: Any) -> None:
        join(ready)
        if len(ready) > 1:
            rows = list(range(len(engine._rows)))
            engine._session.select([*rows[:-2], rows[-1], rows[-2]])

    engine._join = wrong  # type: ignore[method-assign]


def lost_halo(engine: Engine) -> None:
    """The past inputs of the short filter are not kept."""

    def without(state: SessionState) -> SessionState:
        leaves, structure = pytree.tree_flatten(state.model)
        first = next(n for n, leaf in enumerate(leaves) if leaf.is_floating_point())
        leaves[first] = torch.zeros_like(leaves[first])
        return state._replace(model=pytree.tree_unflatten(leaves, structure))

    on_get(engine, without)


def position_off_by_one(engine: Engine) -> None:
    """What continues a kept state has the position of the token before."""

    def earlier(state: SessionState) -> SessionState:
        position = (state.model.position - 1).clamp(min=0)
        return state._replace(model=state.model._replace(position=position))

    on_get(engine, earlier)


def not_reloaded(engine: Engine) -> None:
    """States that were driven out are found, empty."""
    kept, get, known = engine.prefixes, engine.prefixes.get, set[bytes]()
    empty = extend(kept.model, kept.read([0]).state, torch.zeros(1, 4, dtype=torch.int64))

    def wrong(key: bytes) -> SessionState | None:
        state = get(key)
        return empty if state is None and key in known else state

    keep = kept._keep

    def remembered(key: bytes, state: SessionState, **how: bool) -> None:
        known.add(key)
        keep(key, state, **how)

    kept.get, kept._keep = wrong, remembered  # type: ignore[method-assign]
    kept.holds = known.__contains__  # type: ignore[method-assign]


def draft_not_rolled_back(engine: Engine) -> None:
    """After some tokens, the model has read one that nobody was given."""
    step, count = engine_module.Session.step, [0]

    class Careless(engine_module.Session):
        def step(self, **options: Any) -> Any:
            choice = step(self, **options)
            count[0] += 1
            if count[0] % 5 == 0:
                step(self, **options)
            return choice

    decode_with(engine, Careless)


def decode_with(engine: Engine, kind: type) -> None:
    """Let one engine decode with another kind of session."""
    join = engine._join

    def own(ready: Any) -> None:
        begins = engine._session is None
        join(ready)
        if begins:
            engine._session.__class__ = kind

    engine._join = own  # type: ignore[method-assign]


def short_hash(engine: Engine) -> None:
    """The hash knows the last token and the length alone."""

    def keys(tokens: Any, after: bytes | None = None, salt: str = "") -> Any:
        number = 0 if after is None else int.from_bytes(after[:4])
        last = [] if after is None else list(after[7:8])
        for token in tokens:
            number, last = number + 1, [token]
            head = number.to_bytes(4) + bytes(last).rjust(4, b"\0")
            yield head + sha256(head + salt.encode()).digest()

    engine.prefixes.keys = keys  # type: ignore[method-assign]


def wrong_rows_leave(engine: Engine) -> None:
    """When a row leaves, others are moved."""

    def keep_rows(places: list[int]) -> None:
        if engine._session is not None and len(places) < len(engine._rows):
            engine._session.select(places[::-1])
            engine._rows = [engine._rows[place] for place in places]

    engine._keep_rows = keep_rows  # type: ignore[method-assign]


def shared_branch(engine: Engine) -> None:
    """A branch writes into the state that it began from."""
    kept, get, keep, given = engine.prefixes, engine.prefixes.get, engine.prefixes.keep, []

    def seen(key: bytes) -> SessionState | None:
        if (state := get(key)) is not None:
            given.append(state)
        return state

    def written(key: bytes, state: SessionState, **how: bool) -> None:
        for old in given:
            for a, b in zip(*map(pytree.tree_leaves, (old.model, state.model)), strict=True):
                if a.is_floating_point() and a.shape == b.shape:
                    a.copy_(b)
        given.clear()
        keep(key, state, **how)

    kept.get, kept.keep = seen, written  # type: ignore[method-assign]


def coarse_states(engine: Engine) -> None:
    """Kept states are rounded to quarters."""
    on_get(engine, lambda state: changed(state, lambda leaf: (leaf * 4).round() / 4))


def skipped_token(engine: Engine) -> None:
    """The token after a kept prefix is not read."""
    kept = engine.prefixes
    longest = kept._longest

    def wrong(found: dict[int, bytes]) -> Any:
        number, state = longest(found)
        return number + (number > 0), state

    kept._longest = wrong  # type: ignore[method-assign]


def read_padding(engine: Engine) -> None:
    """Of prompts that join together, the shorter ones read a token of padding."""
    join = engine._join

    def wrong(ready: Any) -> None:
        longest, padded = max(state.length for _, state in ready), []
        for going, state in ready:
            if state.length < longest:
                more = extend(engine.model, state, torch.zeros(1, 1, dtype=torch.int64))
                padded.append((going, more._replace(token=state.token)))
            else:
                padded.append((going, state))
        join(padded)

    engine._join = wrong  # type: ignore[method-assign]


def plant_in_streams(monkeypatch: Any) -> None:
    """Streams lose the first character of each piece but the first."""
    events = CompletionAnswer.events

    def losing(self: Any, number: int, new: str, pieces: Any) -> Any:
        begun = len(self.texts[number].text) > len(new)
        return events(self, number, new[1:] if begun else new, pieces)

    monkeypatch.setattr(CompletionAnswer, "events", losing)


def plant_in_log_probs(monkeypatch: Any) -> None:
    """Log-probabilities go to the next row."""
    told = engine_module.log_probs

    def turned(choice: Any, asked: Any) -> Any:
        found = told(choice, asked)
        return found[1:] + found[:1]

    monkeypatch.setattr(engine_module, "log_probs", turned)


FAULTS: tuple[Callable[[Engine], None], ...] = (
    changing_state,
    wrong_block,
    mixed_rows,
    lost_halo,
    position_off_by_one,
    not_reloaded,
    draft_not_rolled_back,
    short_hash,
    wrong_rows_leave,
    shared_branch,
    coarse_states,
    skipped_token,
    read_padding,
)
"""Bugs that are planted in an engine; two more are planted in modules."""
