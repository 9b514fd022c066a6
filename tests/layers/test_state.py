from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.layers import (
    ATTENTION_WRAPPERS,
    H3,
    LAYERS,
    LSTM,
    WRAPPERS,
    Attention,
    Hyena,
    LongConv,
    Stack,
    cat_states,
    detach,
    load_state,
    nbytes,
    save_state,
    select_rows,
    to,
)
from stateline.layers.state import State, fingerprint, settings_of, trim
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

WIDTH = 8


@pytest.fixture
def layer() -> Stack:
    torch.manual_seed(0)
    return Stack(Attention(WIDTH, position="rope"), H3(WIDTH, d_state=4), LSTM(WIDTH))


def after(layer: Stack, length: int, batch_size: int = 2) -> State:
    """State after some random tokens."""
    x = torch.randn(batch_size, length, WIDTH, generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        return layer.forward_chunk(x, layer.init_state(batch_size))[1]


def same(a: State, b: State) -> bool:
    return all(map(torch.equal, pytree.tree_leaves(a), pytree.tree_leaves(b)))


def test_select_rows_takes_rows_in_the_given_order(layer: Stack) -> None:
    state = after(layer, 5, batch_size=3)
    for chosen in ([2, 0], torch.tensor([2, 0])):
        leaves = zip(
            pytree.tree_leaves(select_rows(state, chosen)), pytree.tree_leaves(state), strict=True
        )
        assert all(torch.equal(leaf, old[[2, 0]]) for leaf, old in leaves)


def test_select_rows_takes_the_rows_of_a_mask(layer: Stack) -> None:
    state = after(layer, 5, batch_size=3)
    assert same(select_rows(state, torch.tensor([True, False, True])), select_rows(state, [0, 2]))


def test_a_fork_does_not_change_its_origin_or_its_twin(layer: Stack) -> None:
    state = after(layer, 5)
    fork = select_rows(state, [1, 1])
    before, twin = pytree.tree_map(torch.clone, state), select_rows(fork, [1])
    for leaf in pytree.tree_leaves(fork):
        leaf[0] = 7
    assert same(state, before)
    assert same(select_rows(fork, [1]), twin)


def test_forks_go_on_as_their_origin_would(layer: Stack) -> None:
    state, x = after(layer, 5, batch_size=1), torch.randn(3, 4, WIDTH)
    with torch.no_grad():
        y, _ = layer.forward_chunk(x, select_rows(state, [0, 0, 0]))
        alone = [layer.forward_chunk(row[None], state)[0] for row in x]
    torch.testing.assert_close(y, torch.cat(alone))


def test_states_of_different_ages_join_and_part_again(layer: Stack) -> None:
    young, old, x = after(layer, 3), after(layer, 8, batch_size=1), torch.randn(3, 4, WIDTH)
    joined = cat_states([young, old])
    with torch.no_grad():
        y, _ = layer.forward_chunk(x, joined)
        y_young, _ = layer.forward_chunk(x[:2], young)
        y_parted, _ = layer.forward_chunk(x[:2], select_rows(joined, [0, 1]))
        y_old, _ = layer.forward_chunk(x[2:], old)
    torch.testing.assert_close(y, torch.cat([y_young, y_old]))
    torch.testing.assert_close(y_parted, y_young)


def test_joining_one_state_is_that_state(layer: Stack) -> None:
    state = after(layer, 3)
    assert same(cat_states([state]), state)


@pytest.mark.parametrize(
    "other",
    [
        lambda: Stack(LSTM(WIDTH)),
        lambda: Stack(Attention(WIDTH, n_heads=1), H3(WIDTH, d_state=4), LSTM(WIDTH)),
        lambda: Stack(Attention(WIDTH), H3(WIDTH, d_state=2), LSTM(WIDTH)),
        lambda: Stack(Attention(WIDTH), H3(WIDTH, d_state=4), H3(WIDTH, d_state=4)),
        lambda: Stack(Attention(WIDTH), H3(WIDTH, d_state=4), LSTM(WIDTH)).to("meta"),
    ],
    ids=["fewer", "heads", "size", "kind", "device"],
)
@pytest.mark.parametrize("capacity", [0, 9])
def test_states_of_different_layers_are_not_joined(
    layer: Stack, other: Callable[[], Stack], capacity: int
) -> None:
    mine = layer.init_state(2)
    with pytest.raises(InputError, match="one layer on one device, but state 2 has other parts"):
        cat_states([mine, mine, other().init_state(1)], layer=layer, capacity=capacity)


def test_states_of_equal_shapes_and_other_types_are_not_joined() -> None:
    one, two = (NamedTuple(name, [("h", torch.Tensor)]) for name in ("One", "Two"))
    with pytest.raises(InputError, match="but state 1 has other parts"):
        cat_states([one(torch.zeros(1, 2)), two(torch.zeros(1, 2))])


@pytest.mark.parametrize(
    ("rows", "shown"), [(1, "1"), ([2], r"\[2\]"), ([0, -3], r"\[0, -3\]"), ([[0]], r"\[\[0\]\]")]
)
@pytest.mark.usefixtures("unannotated")
def test_rows_that_are_not_there_are_refused(layer: Stack, rows: Any, shown: str) -> None:
    for given in (rows, torch.tensor(rows, device="cpu")):  # on an accelerator they are not read
        with pytest.raises(InputError, match=f"numbers below 2, the rows .* got {shown}: give"):
            select_rows(after(layer, 3), given)


@pytest.mark.parametrize("rows", ["a", None, [0.5], torch.tensor([True])])
@pytest.mark.usefixtures("unannotated")
def test_rows_of_another_kind_are_refused(layer: Stack, rows: Any) -> None:
    with pytest.raises(InputError, match="rows must be a list of numbers below 2, the rows of"):
        select_rows(after(layer, 3), rows)


@pytest.mark.parametrize(
    "wrong", [None, 3, "x", {"h": torch.zeros(1)}, [torch.zeros(1)], (torch.zeros(1), 3)]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda no: select_rows(no, [0]),
        lambda no: cat_states([no]),
        lambda no: to(no, dtype=torch.float32),
        lambda no: save_state("never written", no, torch.nn.Linear(1, 1)),
        detach,
        nbytes,
        trim,
    ],
)
@pytest.mark.usefixtures("unannotated")
def test_what_is_no_state_is_refused(call: Callable[[Any], object], wrong: object) -> None:
    with pytest.raises(InputError, match=r"a state is a tensor or a .* of states, got a"):
        call(wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer, _: load_state(3, layer), "path must be the name of a file, got 3"),
        (
            lambda layer, state: save_state(3, state, layer),
            "path must be the name of a file, got 3",
        ),
        (lambda *_: load_state("x", None), "layer must be a Module, got a NoneType"),
        (lambda _, state: save_state("x", state, None), "layer must be a Module, got a NoneT"),
        (lambda _, state: to(state, device="gpu"), "device must be auto, cpu, cuda"),
        (lambda _, state: to(state, device=0), "device must be auto, cpu, cuda, cuda:N"),
        (lambda _, state: to(state, dtype="bfloat16"), "dtype must be of floats"),
        (lambda _, state: to(state, dtype=torch.int64), "dtype must be of floats"),
    ],
)
@pytest.mark.usefixtures("unannotated")
def test_arguments_of_another_kind_are_refused(
    layer: Stack, call: Callable[[Any, Any], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        call(layer, layer.init_state(1))


@pytest.mark.parametrize("given", [None, 3, torch.zeros(1)])
@pytest.mark.usefixtures("unannotated")
def test_states_to_join_are_a_list(layer: Stack, given: Any) -> None:
    for wrong in (given, layer.init_state(1)[0]):
        with pytest.raises(InputError, match="cat_states needs "):
            cat_states(wrong)


def test_a_joined_state_is_of_the_same_type(layer: Stack) -> None:
    state = after(layer, 3)
    structure = pytree.tree_structure(state)
    assert pytree.tree_structure(cat_states([state, state])) == structure
    assert pytree.tree_structure(to(state, dtype=torch.bfloat16)) == structure


def test_detach_cuts_the_graph_and_keeps_the_values(layer: Stack) -> None:
    _, state = layer.forward_chunk(torch.randn(2, 3, WIDTH), layer.init_state(2))
    assert any(leaf.requires_grad for leaf in pytree.tree_leaves(state))
    cut = detach(state)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(cut))
    assert same(cut, state)


def test_to_casts_keys_and_past_inputs_but_no_accumulators_or_positions(layer: Stack) -> None:
    attention, h3, lstm = to(after(layer, 3), dtype=torch.bfloat16)
    assert attention.k.dtype == attention.v.dtype == torch.bfloat16
    assert attention.length.dtype == torch.int64
    assert h3.shift.past.dtype == torch.bfloat16
    assert h3.diagonal.h.dtype == torch.float32
    assert lstm.h.dtype == lstm.c.dtype == torch.float32


CONTINUED = {
    **{name: {} for name in LAYERS},
    "block_recurrent": {"window": 2, "n_states": 2, "qk_norm": False},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CONTINUED)
@torch.no_grad()
def test_every_layer_continues_from_a_cast_state(name: str, dtype: torch.dtype) -> None:
    layer = LAYERS[name](WIDTH, **CONTINUED[name])
    x = layer.example_input(2, 6)
    exact = layer.forward_chunk(x[:, :3], layer.init_state(2, capacity=6))[1]
    cast, wanted = to(exact, dtype=dtype), layer.forward_chunk(x[:, 3:], exact)[0]
    limit = (0.05 if dtype == torch.bfloat16 else 1e-5) * wanted.abs().max()
    found = [layer.forward_chunk(x[:, 3:], cast)[0][:, 0], layer.step(x[:, 3], cast)[0]]
    for y in (*found, layer.step_(x[:, 3], cast)):
        torch.testing.assert_close(y, wanted[:, 0], rtol=0, atol=float(limit))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_every_layer_in_float64_continues_from_a_state_in_float32(name: str) -> None:
    layer = LAYERS[name](WIDTH)
    x = layer.example_input(2, 6)
    state = layer.forward_chunk(x[:, :3], layer.init_state(2, capacity=6))[1]
    layer, x = layer.double(), x.double()
    precise = pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, state)
    wanted = layer.forward_chunk(x[:, 3:], precise)[0][:, 0]
    found = [layer.forward_chunk(x[:, 3:], state)[0][:, 0], layer.step(x[:, 3], state)[0]]
    for y in (*found, layer.step_(x[:, 3], state)):
        torch.testing.assert_close(y, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.cpu
def test_to_moves_all_leaves(layer: Stack) -> None:
    moved = to(after(layer, 3), device="meta")
    assert {leaf.device.type for leaf in pytree.tree_leaves(moved)} == {"meta"}


@pytest.mark.cpu
def test_to_a_device_keeps_all_dtypes(layer: Stack) -> None:
    state = after(layer, 3)
    assert same(to(state, device="cpu"), state)


def test_nbytes_counts_every_leaf() -> None:
    layer = Attention(WIDTH, n_heads=2)
    state = layer.forward_chunk(torch.randn(3, 5, WIDTH), layer.init_state(3))[1]
    assert nbytes(state) == 3 * (2 * 5 * WIDTH * 4 + 8)  # keys and values in float32, a length


def test_a_loaded_state_equals_the_saved_one(layer: Stack, tmp_path: Path) -> None:
    state = after(layer, 5)
    save_state(tmp_path / "new" / "state", state, layer)
    loaded = load_state(tmp_path / "new" / "state", layer)
    assert same(loaded, state)
    assert pytree.tree_structure(loaded) == pytree.tree_structure(state)


@pytest.mark.usefixtures("unannotated")
def test_what_is_no_state_is_not_saved(layer: Stack, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a state is a tensor or a .* of states, got a None"):
        save_state(tmp_path / "state", None, layer)
    assert not list(tmp_path.iterdir())


def test_a_slice_of_a_state_can_be_saved(layer: Stack, tmp_path: Path) -> None:
    state = pytree.tree_map(lambda t: t[1:], after(layer, 5, batch_size=3))
    save_state(tmp_path / "state", state, layer)
    assert same(load_state(tmp_path / "state", layer), state)


def altered_weights(layer: Stack) -> Stack:
    with torch.no_grad():
        next(layer.parameters()).add_(1)
    return layer


def test_a_state_of_other_weights_is_refused(layer: Stack, tmp_path: Path) -> None:
    save_state(tmp_path / "state", after(layer, 5), layer)
    with pytest.raises(InputError, match="state was saved by a model with other weights; load it"):
        load_state(tmp_path / "state", altered_weights(layer))


def test_every_number_of_the_weights_is_part_of_the_fingerprint(layer: Stack) -> None:
    before = fingerprint(layer)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1].add_(1)
        assert before != (before := fingerprint(layer))


def test_dropout_is_no_part_of_the_fingerprint() -> None:
    def marks(p: float) -> Any:
        torch.manual_seed(0)
        settings = {"embedding_dropout": p, "residual_dropout": p}
        settings |= {"layers": {"feed_forward": {"dropout": p}}} if p else {}
        return fingerprint(LanguageModel(ModelConfig("attention", 9, 8, **settings)))

    assert marks(0.0) == marks(0.5)


def test_a_state_of_other_weights_is_accepted_by_force(layer: Stack, tmp_path: Path) -> None:
    state = after(layer, 5)
    save_state(tmp_path / "state", state, layer)
    assert same(load_state(tmp_path / "state", altered_weights(layer), force=True), state)


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {"position": "rope"}),
        ({}, {"n_heads": 2}),
        ({"position": "rope"}, {"position": "rope(base=100)"}),
        ({"position": "hard_alibi"}, {"position": "hard_alibi(masked_heads=1)"}),
    ],
)
def test_a_state_of_another_configuration_is_refused(
    tmp_path: Path, options: dict[str, Any], changed: dict[str, Any]
) -> None:
    """Even where all weights are the same."""
    layer, other = Attention(WIDTH, **options), Attention(WIDTH, **options | changed)
    other.load_state_dict(layer.state_dict())
    save_state(tmp_path / "state", layer.init_state(1), layer)
    with pytest.raises(InputError, match=r"was saved by a model with (another|other) "):
        load_state(tmp_path / "state", other)


@pytest.mark.parametrize("name", [*LAYERS, *WRAPPERS])
def test_every_setting_of_a_layer_is_part_of_its_fingerprint(name: str) -> None:
    """But for chances of dropout."""
    core = LAYERS["attention" if name in ATTENTION_WRAPPERS else "h3"]
    layer = WRAPPERS[name](core(WIDTH)) if name in WRAPPERS else LAYERS[name](WIDTH)
    assert vars(layer.settings).keys() - {"dropout"} <= settings_of(layer).keys()


_CONFIGS = {
    "aft": "ae5fd279",
    "attention": "e896219b",
    "block_recurrent": "9eb3b6ca",
    "block_state": "fc524c66",
    "channel_mixing": "7338b5ce",
    "diagonal_ssm": "e8ea5055",
    "dss": "c3557169",
    "feed_forward": "7fc44f46",
    "gated_conv": "6205eeae",
    "gated_delta_net": "06c664bc",
    "gated_linear_attention": "df80c73d",
    "gss": "24265094",
    "h3": "b64ec0ba",
    "hgrn2": "d750ea1c",
    "hyena": "a706ff21",
    "kimi_delta_attention": "e7867fda",
    "latent_attention": "ea8b8e50",
    "lightning_attention": "ea5bd597",
    "linear_attention": "a735b6fa",
    "long_conv": "acd065c4",
    "lstm": "2fbcdd66",
    "mamba": "78be2001",
    "mamba2": "7edcb9e3",
    "mamba3": "427d48d6",
    "mlstm": "ffec342c",
    "moe": "a9534730",
    "retention": "b561dfaa",
    "rg_lru": "7855478d",
    "rwkv7": "e8cce970",
    "s4": "75b3336a",
    "s4d": "78ce2104",
    "s5": "d9f51aae",
    "shift_ssm": "d3df2c3f",
    "sliding_attention": "83bae464",
    "slstm": "2a069c35",
}
"""Beginnings of the hashes of all layers' configurations, with default settings."""


@pytest.mark.parametrize("name", LAYERS)
def test_the_configuration_of_a_layer_keeps_its_hash(name: str) -> None:
    """Another hash refuses all states that were saved before: settings keep names and order."""
    assert fingerprint(LAYERS[name](WIDTH))["config"][:8] == _CONFIGS[name]


def test_the_settings_of_filters_are_attributes() -> None:
    assert (Hyena(WIDTH).settings.filter_len, LongConv(WIDTH).settings.n_filters) == (1024, 1)


def test_settings_alone_make_another_fingerprint() -> None:
    plain, scaled = Attention(WIDTH), Attention(WIDTH, score_scale=1.0)
    scaled.load_state_dict(plain.state_dict())
    assert fingerprint(plain)["weights"] == fingerprint(scaled)["weights"]
    assert fingerprint(plain)["config"] != fingerprint(scaled)["config"]


def test_a_state_of_an_older_format_is_refused(layer: Stack, tmp_path: Path) -> None:
    save_state(tmp_path / "state", after(layer, 5), layer)
    with safe_open(tmp_path / "state", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() | {"format": "stateline-state-1"}
    save_file(tensors, tmp_path / "state", metadata=metadata)
    with pytest.raises(InputError, match=r"saved by another version of Stateline .*compute the st"):
        load_state(tmp_path / "state", layer)


def test_a_state_of_another_kind_is_refused_even_by_force(layer: Stack, tmp_path: Path) -> None:
    save_state(tmp_path / "state", after(layer, 5), layer)
    with pytest.raises(InputError, match="holds the state of another kind of layer"):
        load_state(tmp_path / "state", LSTM(WIDTH), force=True)


def test_damaged_and_foreign_files_are_refused_in_one_line(layer: Stack, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    save_state(whole, after(layer, 5), layer)
    (tmp_path / "truncated").write_bytes(whole.read_bytes()[:-100])
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("not a state at all, but long enough to have a header")
    save_file({"weight": torch.ones(2)}, tmp_path / "weights")
    expected = {
        "truncated": "cannot read .*truncated as a state: ",
        "empty": "cannot read .*empty as a state: ",
        "text": "cannot read .*text as a state: ",
        "weights": "weights is not a state file ",
        "missing": "no such state file: .*missing",
        "": "cannot read ",  # a folder
    }
    for name, message in expected.items():
        with pytest.raises(InputError, match=message) as caught:
            load_state(tmp_path / name, layer)
        assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(layer: Stack, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write ") as caught:
        save_state(tmp_path / "file" / "state", after(layer, 5), layer)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    layer: Stack, tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "state"
    save_state(path, after(layer, 5), layer)
    before = path.read_bytes()
    with pytest.raises(InputError, match="cannot write ") as caught, full_disk(1000):
        save_state(path, after(layer, 40), layer)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    layer: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    save_state(path, after(layer, 5), layer)
    before = path.read_bytes()

    def interrupted(_: object, file: Path, **__: object) -> None:
        file.write_bytes(b"half of")
        raise KeyboardInterrupt

    monkeypatch.setattr("stateline.layers.state.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_state(path, after(layer, 6), layer)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("length", [3, 10**6, 2**62])
def test_a_length_beyond_the_slots_is_refused(length: int, tmp_path: Path) -> None:
    """With the right hash: steps would write outside of the keys and values."""
    layer = Attention(8, n_heads=2)
    state = layer.forward_chunk(torch.zeros(1, 2, 8), layer.init_state(1))[1]
    save_state(tmp_path / "state", state._replace(length=torch.tensor([length])), layer)
    with pytest.raises(InputError, match=r"is damaged: .* (tokens|slots); save it again"):
        load_state(tmp_path / "state", layer)
