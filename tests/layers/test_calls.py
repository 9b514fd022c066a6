"""What a layer does with calls that do not fit: every layer and wrapper, by one check."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from stateline import ModelConfig
from stateline.errors import InputError
from stateline.layers import (
    ATTENTION_WRAPPERS,
    H3,
    LAYERS,
    LSTM,
    NOT_CAUSAL,
    WRAPPERS,
    AnyLayer,
    Attention,
    BlockState,
    FeedForward,
    GatedDeltaNet,
    Mamba,
    Residual,
    SequenceLayer,
    Stack,
    cat_states,
    load_state,
    save_state,
    select_rows,
)
from stateline.layers.law import check_layer
from stateline.models.language_model import LanguageModel
from stateline.ops import use_backend

WIDTH = 8


def make(name: str) -> AnyLayer:
    if name in LAYERS:
        return LAYERS[name](WIDTH)
    core = "attention" if name in ATTENTION_WRAPPERS else "h3"
    return WRAPPERS[name](LAYERS[core](WIDTH))


def warm(layer: AnyLayer, rows: int = 2) -> Any:
    with torch.no_grad():
        return layer.forward_chunk(layer.example_input(rows, 3), layer.init_state(rows))[1]


KINDS = [name for name in (*LAYERS, *WRAPPERS) if name not in NOT_CAUSAL]
STATEFUL = [name for name in KINDS if name not in ("feed_forward", "moe")]


def verbs(layer: AnyLayer, rows: int) -> list[Callable[[Any], object]]:
    x = layer.example_input(rows, 2)
    return [
        lambda state: layer.forward_chunk(x, state),
        lambda state: layer.step(x[:, 0], state),
        lambda state: layer.step_(x[:, 0], state),
    ]


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_other_rows_is_refused(name: str) -> None:
    layer = make(name)
    for verb in verbs(layer, 3):
        with pytest.raises(InputError, match="the input has 3 rows, the state 2 rows"):
            verb(warm(layer))


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_another_layer_is_refused(name: str) -> None:
    layer = make(name)
    foreign = [torch.zeros(2, WIDTH), (), (1, 2, 3), warm(LSTM(WIDTH + 1)), warm(H3(2 * WIDTH))]
    for state in foreign:
        for verb in verbs(layer, 2):
            with pytest.raises(InputError, match="cannot continue from this state: a "):
                verb(state)


@pytest.mark.usefixtures("unannotated")
def test_a_state_without_the_names_of_its_parts_is_refused() -> None:
    layer = H3(WIDTH)
    for verb in verbs(layer, 2):
        with pytest.raises(
            InputError, match=r"a \w+ of \d parts is needed, got a tuple of \d parts"
        ):
            verb(tuple(warm(layer)))


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("name", STATEFUL)
def test_a_leaf_of_another_shape_is_refused(name: str) -> None:
    layer = make(name)
    leaves, spec = pytree.tree_flatten(warm(layer))
    for index, leaf in enumerate(leaves):
        damaged = [*leaves]
        damaged[index] = leaf[..., None]
        with pytest.raises(InputError, match=r"a tensor of shape \(rows, .*is needed, got"):
            layer.forward_chunk(layer.example_input(2, 1), pytree.tree_unflatten(damaged, spec))


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("name", ["h3", "attention", "mamba", "feed_forward"])
def test_token_numbers_are_refused_by_a_layer_of_vectors(name: str) -> None:
    layer, x = make(name), torch.ones(2, 3, WIDTH, dtype=torch.int64)
    with pytest.raises(InputError, match=r"takes real numbers, got torch.int64: give x.float\(\)"):
        layer(x)
    with pytest.raises(InputError, match=r"\.step takes real numbers, got torch.int64"):
        layer.step(x[:, 0], layer.init_state(2))


@pytest.mark.usefixtures("unannotated")
def test_a_complex_state_is_refused() -> None:
    layer = LSTM(8)
    state = pytree.tree_map(lambda leaf: leaf.to(torch.complex64), layer.init_state(2))
    with pytest.raises(InputError, match=r"a tensor of real numbers is needed, got one of torch.c"):
        layer.step(torch.zeros(2, 8), state)


@pytest.mark.cpu  # kernels of other devices run under some transforms
@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("transform", ["vmap", "grad", "weights", "rows", "jvp"])
def test_transforms_of_calls_name_the_way_out(transform: str) -> None:
    layer, x = Attention(8, n_heads=2), torch.randn(3, 2, 5, 8)
    weights = dict(layer.named_parameters())

    def loss(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, own, (x,)).square().sum()

    run: Callable[[], Any] = {
        "vmap": lambda: torch.vmap(layer)(x),
        "grad": lambda: torch.func.grad(lambda x: layer(x).square().sum())(x[0]),
        "weights": lambda: torch.func.grad(loss)(weights, x[0]),
        "rows": lambda: torch.vmap(torch.func.grad(loss), (None, 0))(weights, x),
        "jvp": lambda: torch.func.jvp(layer, (x[0],), (x[0],)),
    }[transform]
    with pytest.raises(InputError, match=r"attention do not run under .*_backend\(\"reference\"\)"):
        run()
    with use_backend("reference"):
        found = run()
    if transform == "rows":
        wanted = [torch.autograd.grad(loss(weights, each), [*weights.values()]) for each in x]
        for each, *its in zip(found.values(), *wanted, strict=True):
            torch.testing.assert_close(each, torch.stack(its), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.cpu
@torch.no_grad()
def test_forward_mode_derivatives_pass_through_every_op_or_are_refused() -> None:
    layer = Stack(Mamba(8), H3(8), GatedDeltaNet(8), FeedForward(8)).double()
    x, direction = torch.randn(2, 2, 5, 8, dtype=torch.float64)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent
    wanted = (layer(x + 1e-6 * direction) - layer(x - 1e-6 * direction)) / 2e-6
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    with forward_ad.dual_level(), pytest.raises(InputError, match="and forward-mode derivatives"):
        Attention(8).double()(forward_ad.make_dual(x, direction))


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("verb", ["forward", "forward_chunk", "step", "step_"])
@pytest.mark.parametrize("x", [[[0.0] * WIDTH], np.zeros((2, WIDTH))])
def test_what_is_no_tensor_is_refused(x: Any, verb: str) -> None:
    layer = H3(WIDTH)
    more = () if verb == "forward" else (layer.init_state(2),)
    message = rf"H3.{verb} takes a tensor, got (list|ndarray): give torch.as_tensor\(x\)"
    with pytest.raises(InputError, match=message):
        getattr(layer, verb)(x, *more)
    if verb.startswith("forward"):
        with pytest.raises(InputError, match=message):
            getattr(layer, verb)(x, *more, starts=torch.zeros(2, 1, dtype=torch.bool))


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_less_than_no_rows_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="batch_size and capacity must be whole numbers from 0"):
        make(name).init_state(-1)


@pytest.mark.parametrize("capacity", [-1, "3", 2.5, None])
@pytest.mark.usefixtures("unannotated")
def test_a_state_with_less_than_no_room_is_refused(capacity: Any) -> None:
    with pytest.raises(InputError, match="batch_size and capacity must be whole numbers from 0"):
        Attention(WIDTH).init_state(2, capacity=capacity)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace(_method)?` is deprecated")
@pytest.mark.parametrize("pattern", ["h3", "attention", "lstm"])
def test_a_trace_of_torchscript_is_refused(pattern: str) -> None:
    model = LanguageModel(ModelConfig(pattern, vocab_size=5, d_model=8))
    with pytest.raises(InputError, match=r"torch.jit.trace cannot .* use torch.export.export"):
        torch.jit.trace(model, torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.usefixtures("unannotated")
def test_the_lstm_names_both_shapes() -> None:
    layer = LSTM(8)
    with pytest.raises(InputError) as caught:
        layer.forward_chunk(torch.randn(3, 4, 8), layer.init_state(2))
    assert str(caught.value) == (
        "LSTM cannot continue from this state: the input has 3 rows, the state 2 rows (a tensor of "
        "shape (2, 1, 8)); pass a state of this layer with the rows of the input (of shape "
        "(3, 4, 8))"
    )


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("name", KINDS)
def test_an_input_of_another_width_is_refused(name: str) -> None:
    layer, x = make(name), torch.randn(2, 5, WIDTH + 1)
    with pytest.raises(InputError, match=rf"d_model={WIDTH}\), got \(2, 5, {WIDTH + 1}\)"):
        layer(x)
    with pytest.raises(InputError, match=rf"step takes .* got \(2, {WIDTH + 1}\)"):
        layer.step(x[:, 0], layer.init_state(2))


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("sizes", [(5,), (1, 2, 5)])
def test_an_input_of_other_axes_is_refused(sizes: tuple[int, ...]) -> None:
    wanted = rf"takes an input of shape \(batch, length, d_model={WIDTH}\), got \({sizes[0]}, "
    with pytest.raises(InputError, match=wanted):
        H3(WIDTH)(torch.randn(*sizes, WIDTH))


@pytest.mark.usefixtures("unannotated")
def test_a_model_refuses_the_state_of_another_model() -> None:
    model, other = (
        LanguageModel(ModelConfig(pattern, vocab_size=5, d_model=8)) for pattern in ("h3", "lstm")
    )
    with pytest.raises(InputError, match="LanguageModel cannot continue from this state"):
        model.step(torch.zeros(2, dtype=torch.int64), other.init_state(2))


class Growing(SequenceLayer[tuple[Tensor]]):
    """Keeps all inputs and ignores the capacity."""

    def init_state(self, batch_size: int, *, capacity: int = 0) -> tuple[Tensor]:
        return (torch.zeros(batch_size, 0, self.d_model),)

    def forward_chunk(self, x: Tensor, state: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        seen = torch.cat([state[0], x], dim=1)
        return seen.cumsum(dim=1)[:, -x.shape[1] :], (seen,)

    def state_bytes(self, length: int) -> int:
        return 4 * self.d_model * length


def test_a_growing_layer_may_ignore_the_capacity() -> None:
    layer = Growing(WIDTH)
    x = torch.randn(2, 7, WIDTH)
    y, state = layer.forward_chunk(x[:, :3], layer.init_state(2))
    torch.testing.assert_close(
        torch.cat([y, layer.forward_chunk(x[:, 3:], state)[0]], dim=1), layer(x)
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_may_have_no_rows(name: str) -> None:
    layer = make(name)
    x = torch.randn(0, 5, WIDTH)
    with torch.no_grad():
        assert layer(x).shape == (0, 5, WIDTH)
        for state in (layer.init_state(0), select_rows(warm(layer), [])):
            y, state = layer.forward_chunk(x, state)
            assert y.shape == (0, 5, WIDTH)
            y, state = layer.step(x[:, 0], state)
            assert y.shape == (0, WIDTH)
            assert all(len(leaf) == 0 for leaf in pytree.tree_leaves(state))
        assert layer.step_(x[:, 0], layer.init_state(0, capacity=1)).shape == (0, WIDTH)
        joined = cat_states([state, warm(layer)])
        wanted, _ = layer.step(torch.ones(2, WIDTH), joined)
    assert wanted.shape == (2, WIDTH)


def test_a_layer_need_not_serve_inputs_without_tokens() -> None:
    class Latest(SequenceLayer[tuple[Tensor]]):
        """The inputs, and the latest one as a state: there is none in an empty chunk."""

        def init_state(self, batch_size: int, *, capacity: int = 0) -> tuple[Tensor]:
            return (torch.zeros(batch_size, self.d_model),)

        def forward_chunk(self, x: Tensor, state: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
            return x, (x[:, -1],)

    layer, state = Latest(WIDTH), (torch.ones(2, WIDTH),)
    for starts in (None, torch.zeros(2, 0, dtype=torch.bool)):
        x = torch.zeros(2, 0, WIDTH)
        y, (after,) = layer.forward_chunk(x, state, starts=starts)
        assert layer(x, starts=starts).shape == y.shape == (2, 0, WIDTH)
        assert after is not state[0]
        assert after.equal(state[0])


@pytest.mark.parametrize("name", KINDS)
def test_rows_join_a_running_batch(name: str) -> None:
    """As on a server: one row has read 5 tokens, another 2, and both go on in place together."""
    layer = make(name).double()
    first, second, rest = (layer.example_input(1, length) for length in (5, 2, 4))
    with torch.no_grad():
        states = [layer.forward_chunk(x, layer.init_state(1))[1] for x in (first, second)]
        joined = cat_states(states, layer=layer, capacity=9)
        y = torch.stack([layer.step_(x.repeat(2, 1), joined) for x in rest.unbind(1)], dim=1)
        wanted = [layer.forward_chunk(rest, state)[0] for state in states]
    torch.testing.assert_close(y, torch.cat(wanted), rtol=1e-8, atol=1e-9)


def test_states_join_only_with_what_is_needed() -> None:
    with pytest.raises(InputError, match="at least one state, got none"):
        cat_states([])
    with pytest.raises(InputError, match=r"to make room: pass layer=\.\.\."):
        cat_states([warm(Attention(WIDTH))], capacity=4)


@pytest.mark.parametrize("name", ["diagonal_ssm", "shift_ssm"])
def test_a_layer_that_changes_the_width_cannot_stand_in_a_model(name: str) -> None:
    assert make(name).d_output == WIDTH
    wide = LAYERS["diagonal_ssm"](WIDTH, n_outputs=2)
    assert wide.d_output == wide(torch.randn(1, 3, WIDTH)).shape[-1] == 2 * WIDTH
    message = "DiagonalSSM maps 8 channels to 16, but a layer of a model must keep the width"
    for build in (lambda: Stack(wide), lambda: Residual(wide, nn.Identity())):
        with pytest.raises(InputError, match=message):
            build()
    for wrapper in ("ladder", "staircase"):
        with pytest.raises(InputError, match=message):
            WRAPPERS[wrapper](wide)
    for block in ("sequential", "plain"):
        with pytest.raises(InputError, match="set n_outputs=1"):
            LanguageModel(
                ModelConfig("diagonal_ssm(n_outputs=2)", vocab_size=5, d_model=8, block=block)
            )


def test_a_state_of_another_window_is_refused(tmp_path: Any) -> None:
    """Shapes alone do not show it: both keep keys and values of four positions."""
    options = {"variant": "mf", "n_states": 2, "d_ssm": 2, "n_heads": 2}
    torch.manual_seed(0)
    four = BlockState(WIDTH, window=4, includes_self=False, **options)
    five = BlockState(WIDTH, window=5, includes_self=True, **options)
    five.load_state_dict(four.state_dict())
    save_state(tmp_path / "state", warm(four), four)
    shapes = [[t.shape for t in pytree.tree_leaves(warm(layer))] for layer in (four, five)]
    assert shapes[0] == shapes[1]
    with pytest.raises(InputError, match="saved by a model with another configuration"):
        load_state(tmp_path / "state", five)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("state", "told"), [({}, "a dict"), ([], "a list"), (None, "a NoneType"), ((0,), "a int")]
)
def test_a_layer_whose_state_is_no_tuple_of_tensors_is_told(state: Any, told: str) -> None:
    class Odd(SequenceLayer[Any]):
        def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
            return state

        def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
            return x, state

    layer = Odd(WIDTH)
    with pytest.raises(InputError, match=f"Odd.init_state makes {told}"):
        layer.forward_chunk(torch.zeros(1, 2, WIDTH), state)
    assert "a (named) tuple of states" in check_layer(layer).diagnosis
