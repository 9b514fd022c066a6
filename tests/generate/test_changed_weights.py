"""Nothing that is kept answers from weights that the model no longer has."""

import copy
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from queue import Queue

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from stateline.data.tokenizer import ByteTokenizer
from stateline.errors import InputError
from stateline.generate import PrefixStates, Read, generate, prefill
from stateline.generate.session import Session
from stateline.generate.session_state import extend
from stateline.generate.speculative import Speculation
from stateline.hf.cache import StatelineCache
from stateline.layers import load_state, save_state
from stateline.layers.state import leaves_of
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.serve.engine import Engine, Limits, Row
from stateline.serve.metrics import Metrics

TEXT = torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(1))
OTHER = TEXT.flip(-1)


def make(seed: int = 0, pattern: str = "h3 mamba attention") -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(ModelConfig(pattern, vocab_size=256, d_model=16)).eval()


def pairs(model: LanguageModel) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
    return zip(model.parameters(), make(seed=5).parameters(), strict=True)


def loaded(model: LanguageModel) -> None:
    model.load_state_dict(make(seed=5).state_dict())


def data_copied(model: LanguageModel) -> None:
    for old, new in pairs(model):
        old.data.copy_(new.data)


def data_replaced(model: LanguageModel) -> None:
    for old, new in pairs(model):
        old.data = new.data


def averaged(model: LanguageModel) -> None:
    for old, new in pairs(model):
        old.data.lerp_(new.data, 0.5)


def through_numpy(model: LanguageModel) -> None:
    for old, new in pairs(model):
        old.detach().numpy()[...] = new.detach().numpy()


def one_number_through_numpy(model: LanguageModel) -> None:
    model.get_parameter("stack.layers.0.layer.qkv.weight").detach().numpy()[5, 3] += 4.0


def rows_exchanged(model: LanguageModel) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.flip(0))


def signs_changed(model: LanguageModel) -> None:
    for parameter in model.parameters():
        parameter.data.neg_()


def by_a_flat_vector(model: LanguageModel) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 1.5, model.parameters())


def by_an_optimizer(model: LanguageModel, *, fused: bool = False) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    model(TEXT).square().sum().backward()
    optimizer.step()


def by_a_fused_optimizer(model: LanguageModel) -> None:
    """PyTorch does not count these changes in place."""
    by_an_optimizer(model, fused=True)


@torch.no_grad()
def by_an_optimizer_of_ones_own(model: LanguageModel) -> None:
    model(TEXT).square().sum()
    for old, new in pairs(model):
        old.sub_(new, alpha=0.5)


def swapped(model: LanguageModel) -> None:
    for link, other in zip(model.stack.links, make(seed=5).stack.links, strict=True):
        for name, new in other.named_parameters():
            path, _, last = name.rpartition(".")
            setattr(link.get_submodule(path), last, nn.Parameter(new.detach()))


WAYS = [
    *(loaded, data_copied, data_replaced, averaged, through_numpy, one_number_through_numpy),
    *(rows_exchanged, signs_changed, by_a_flat_vector, by_an_optimizer, by_a_fused_optimizer),
    *(by_an_optimizer_of_ones_own, swapped),
]
Change = Callable[[LanguageModel], object]
Pair = tuple[Tensor, Tensor]
"""What is found, and what a model that kept nothing gives."""


def close(found: Tensor, wanted: Tensor) -> Pair:
    """Where the two round differently."""
    same = (found - wanted).abs() < 1e-4 * wanted.abs().max()
    return same, torch.ones_like(same)


def prefix_states(model: LanguageModel, change: Change, folder: Path) -> Pair:
    kept = PrefixStates(model)
    generate(model, TEXT, 1, prefixes=kept)
    change(model)
    return generate(model, TEXT, 12, prefixes=kept), generate(model, TEXT, 12)


def prefix_states_told(model: LanguageModel, change: Change, folder: Path) -> Pair:
    kept = PrefixStates(model)
    generate(model, TEXT, 1, prefixes=kept)
    change(model)
    kept.refresh()
    return generate(model, TEXT, 12, prefixes=kept), generate(model, TEXT, 12)


def states_of_others_in_a_folder(model: LanguageModel, change: Change, folder: Path) -> Pair:
    old, kept = copy.deepcopy(model), PrefixStates(model, folder=folder)
    generate(model, TEXT, 1, prefixes=kept)
    change(model)
    generate(model, OTHER, 1, prefixes=kept)
    kept.flush()
    found = [generate(old, x, 12, prefixes=PrefixStates(old, folder=folder)) for x in (TEXT, OTHER)]
    return torch.cat(found), torch.cat([generate(old, x, 12) for x in (TEXT, OTHER)])


def states_kept_after_a_change(model: LanguageModel, change: Change, folder: Path) -> Pair:
    """A session that began before the change ends after it: its state is nobody's."""
    old, kept = copy.deepcopy(model), PrefixStates(model, folder=folder)
    read = kept.read(TEXT[0])
    change(model)
    kept.keep(read.key, extend(model, read.state, OTHER))
    kept.flush()
    found = generate(old, TEXT, 12, prefixes=PrefixStates(old, folder=folder))
    return found, generate(old, TEXT, 12)


def refreshed(model: LanguageModel, change: Change, folder: Path) -> Pair:
    session = Session(model, prefill(model, TEXT))
    session.step()
    change(model)
    session.refresh()
    fresh = Session(model, session.state())
    return session.step().logits, fresh.step().logits


def joined(model: LanguageModel, change: Change, folder: Path) -> Pair:
    session = Session(model, prefill(model, TEXT))
    session.step()
    change(model)
    session.join(prefill(model, OTHER))
    fresh = Session(model, session.state())
    return session.step().logits, fresh.step().logits


def restored(model: LanguageModel, change: Change, folder: Path) -> Pair:
    session = Session(model, prefill(model, TEXT))
    session.step()
    change(model)
    session.restore(prefill(model, TEXT))
    return session.step().logits, Session(model, prefill(model, TEXT)).step().logits


def with_graphs(model: LanguageModel, change: Change, folder: Path) -> Pair:
    """Graphs that hold the weights that they were recorded with, as CUDA graphs do."""

    def record(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        logits, parameters = call(), list(model.parameters())
        held = [parameter.data.clone() for parameter in parameters]

        def replay() -> None:
            now = [parameter.data for parameter in parameters]
            for parameter, weight in zip(parameters, held, strict=True):
                parameter.data = weight
            logits.copy_(call())
            for parameter, weight in zip(parameters, now, strict=True):
                parameter.data = weight

        return replay, logits

    session = Session(model, prefill(model, TEXT))
    session.use_graphs(record)
    session.step()
    change(model)
    session.refresh()
    fresh = Session(model, session.state())
    return session.step().logits, fresh.step().logits


def drafted(model: LanguageModel, change: Change, folder: Path) -> Pair:
    draft = copy.deepcopy(model)
    decoding = Speculation(model, prefill(model, TEXT), draft, prefill(draft, TEXT), ahead=2)
    for _ in range(3):  # the first round
        decoding.step()
    change(model)
    change(draft)
    decoding.refresh()
    fresh = Session(model, decoding.state())
    for _ in range(3):
        found, wanted = (each.step().logits for each in (decoding, fresh))
    return close(found, wanted)


def hf_cache(model: LanguageModel, change: Change, folder: Path) -> Pair:
    cache = StatelineCache()
    with torch.no_grad():
        cache.step(model, TEXT[:, 0])
    change(model)
    with torch.no_grad():
        after = model.forward_chunk(TEXT, cache.prepare(model, 1))[1]
        cache.advance(after, TEXT.shape[1], TEXT)
        wanted = model.step(TEXT[:, 1], after)[0]
        return close(cache.step(model, TEXT[:, 1]), wanted)


def served(model: LanguageModel, change: Change, folder: Path) -> Pair:
    """Texts of a server, which keeps its session and the states of conversations."""
    answers: Queue[str] = Queue()
    found = {"": ""}

    def deliver(pieces: list[tuple[Row, object]]) -> None:
        for _, piece in pieces:
            found[""] += piece.text  # type: ignore[attr-defined]
            if piece.finish or piece.error:  # type: ignore[attr-defined]
                answers.put(found.pop("", ""))
                found[""] = ""

    limits, prefixes = Limits(), PrefixStates(model, folder=folder)
    engine = Engine(ByteTokenizer(), prefixes, limits=limits, deliver=deliver, metrics=Metrics())
    engine.start()
    said = []
    for text in (TEXT, TEXT, TEXT):
        engine.submit(Row(text[0].tolist(), new_tokens=12))
        said.append(answers.get(timeout=60))
        if len(said) == 1:
            change(model)
    engine.stop()
    tokens = generate(model, TEXT, 12)[0].tolist()
    wanted = ByteTokenizer().decode(tokens)
    return torch.tensor([answer == wanted for answer in said[1:]]), torch.ones(2, dtype=torch.bool)


KEEPERS = [
    *(prefix_states, prefix_states_told, states_of_others_in_a_folder, states_kept_after_a_change),
    *(refreshed, joined, restored, with_graphs, drafted, hf_cache, served),
]


@pytest.mark.cpu
@pytest.mark.parametrize("change", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("keeper", KEEPERS, ids=lambda keeper: keeper.__name__)
def test_what_is_kept_is_of_the_weights_of_now(
    keeper: Callable[[LanguageModel, Change, Path], Pair], change: Change, tmp_path: Path
) -> None:
    found, wanted = keeper(make(), change, tmp_path)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("change", WAYS, ids=lambda way: way.__name__)
def test_a_state_on_disk_is_of_the_weights_that_saved_it(change: Change, tmp_path: Path) -> None:
    model = make()
    old = copy.deepcopy(model)
    change(model)
    save_state(tmp_path / "state", prefill(model, TEXT).model, model)
    load_state(tmp_path / "state", model)
    with pytest.raises(InputError, match="other weights"):
        load_state(tmp_path / "state", old)


@pytest.mark.cpu
def test_after_a_cast_nothing_of_the_old_precision_is_used(tmp_path: Path) -> None:
    model = make()
    kept = PrefixStates(model, folder=tmp_path)
    generate(model, TEXT, 1, prefixes=kept)
    session = Session(model, prefill(model, TEXT))
    session.step()
    model.double()
    found, wanted = generate(model, TEXT, 12, prefixes=kept), generate(model, TEXT, 12)
    assert torch.equal(found, wanted)
    for call in (session.refresh, session.step, lambda: session.restore(prefill(model, TEXT))):
        with pytest.raises(InputError, match=r"cast or moved|in the same dtype"):
            call()


def test_states_of_old_weights_serve_the_old_weights_again(tmp_path: Path) -> None:
    model = make()
    old, kept = copy.deepcopy(model.state_dict()), PrefixStates(model, folder=tmp_path)
    kept.read(TEXT[0])
    loaded(model)
    assert kept.read(TEXT[0]).reused == 0
    model.load_state_dict(old)
    assert kept.read(TEXT[0]).reused == TEXT.shape[1]


def rest(reading: Generator[int, None, Read]) -> Read:
    """What a text is read to in the end."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def test_weights_that_change_while_a_text_is_read_are_found(tmp_path: Path) -> None:
    model = make()
    kept = PrefixStates(model, every=4, folder=tmp_path)
    reading = kept.pieces(TEXT[0])
    next(reading)
    loaded(model)
    found, wanted = rest(reading), PrefixStates(model, every=4).read(TEXT[0])
    assert found.key == wanted.key
    assert all(map(torch.equal, leaves_of(found.state), leaves_of(wanted.state)))
