"""What Mamba, Mamba-2, linear attention and Gated DeltaNet compute."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import GatedDeltaNet, LinearAttention, Mamba, Mamba2
from stateline.layers.mixers.linear_attention import EPS
from stateline.layers.mixers.short_conv import ShortConv
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters
from stateline.train.config import TrainConfig
from stateline.train.optimizer import parameter_groups

WIDTH = 8
X = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def convolved(conv: ShortConv, x: Tensor) -> Tensor:
    """By PyTorch's convolution, whose filters begin with the oldest input."""
    taps = conv.kernel.shape[1]
    weight = conv.kernel.flip(-1)[:, None]
    y = F.conv1d(F.pad(x.mT, (taps - 1, 0)), weight, conv.bias, groups=conv.d_model)
    return F.silu(y.mT)


def test_a_short_conv_is_a_depthwise_convolution_and_silu() -> None:
    conv = ShortConv(WIDTH, taps=3)
    torch.testing.assert_close(conv(X), convolved(conv, X))


def test_mamba_is_its_equations() -> None:
    layer = Mamba(WIDTH, d_state=3, dt_rank=2)
    u, z = (X @ layer.in_proj.weight.T).chunk(2, dim=-1)
    u = convolved(layer.conv, u)
    r, b, c = (u @ layer.x_proj.weight.T).split([2, 3, 3], dim=-1)
    dt = F.softplus(r @ layer.dt_weight.T + layer.dt_bias)
    h, outputs = torch.zeros(2, 16, 3), []
    for t in range(7):
        h = (dt[:, t, :, None] * -layer.a_log.exp()).exp() * h
        h = h + (dt * u)[:, t, :, None] * b[:, t, None]
        outputs.append((h * c[:, t, None]).sum(dim=-1) + layer.skip * u[:, t])
    gated = torch.stack(outputs, dim=1) * F.silu(z)
    torch.testing.assert_close(layer(X), gated @ layer.out_proj.weight.T)


def test_mamba2_is_its_equations() -> None:
    layer = Mamba2(WIDTH, d_state=3, d_head=4, n_groups=2)
    z, mixed, dt = (X @ layer.in_proj.weight.T).split([16, 28, 4], dim=-1)
    u, b, c = convolved(layer.conv, mixed).split([16, 6, 6], dim=-1)
    u, b, c = u.unflatten(-1, (4, 4)), b.unflatten(-1, (2, 3)), c.unflatten(-1, (2, 3))
    dt = F.softplus(dt + layer.dt_bias)
    state, outputs = torch.zeros(2, 4, 3, 4), []
    for t in range(7):
        write, read = (v[:, t, [0, 0, 1, 1]] for v in (b, c))  # two heads share a group
        state = (dt[:, t] * -layer.a_log.exp()).exp()[..., None, None] * state
        state = state + write[..., None] * (dt[:, t, :, None] * u[:, t])[..., None, :]
        y = (read[..., None] * state).sum(dim=-2) + layer.skip[:, None] * u[:, t]
        outputs.append(y.flatten(1))
    gated = (torch.stack(outputs, dim=1) * F.silu(z)).unflatten(-1, (2, 8))
    normed = gated / (gated.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    wanted = (normed.flatten(-2) * layer.norm_weight) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(X), wanted)


def test_linear_attention_is_a_weighted_mean_of_the_values_so_far() -> None:
    layer = LinearAttention(WIDTH, n_heads=2)
    q, k, v = layer.qkv(X).unflatten(-1, (3, 2, 4)).unbind(dim=2)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = torch.einsum("bihd,bjhd->bhij", q, k).tril()
    weights = weights / (weights.sum(dim=-1, keepdim=True) + EPS)
    heads = torch.einsum("bhij,bjhd->bihd", weights, v)
    torch.testing.assert_close(layer(X), layer.out_proj(heads.flatten(2)))


def test_linear_attention_survives_queries_that_find_nothing() -> None:
    layer = LinearAttention(WIDTH, feature="relu")
    with torch.no_grad():
        layer.qkv.weight[:WIDTH] = 0
    assert not layer(X).any()


def test_gated_delta_net_is_its_equations() -> None:
    layer = GatedDeltaNet(WIDTH, n_heads=2)
    mixed, z, a, b = (X @ layer.in_proj.weight.T).split([32, 16, 2, 2], dim=-1)
    q, k, v = (
        t.unflatten(-1, (2, -1)) for t in convolved(layer.conv, mixed).split([8, 8, 16], dim=-1)
    )
    q, k = (t / (t.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q = q / 4**0.5
    alpha, beta = (-layer.a_log.exp() * F.softplus(a + layer.dt_bias)).exp(), b.sigmoid()
    state, outputs = torch.zeros(2, 2, 8, 4), []  # the paper's: (value, key)
    for t in range(7):
        key, rate = k[:, t], beta[:, t, :, None, None]
        kept = torch.eye(4) - rate * key[..., :, None] * key[..., None, :]
        written = rate * v[:, t, :, :, None] * key[..., None, :]
        state = alpha[:, t, :, None, None] * state @ kept + written
        outputs.append((state @ q[:, t, :, :, None])[..., 0])
    y = torch.stack(outputs, dim=1)
    normed = y / (y.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
    wanted = (normed.flatten(2) * F.silu(z)) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(X), wanted)


def test_what_was_written_to_a_key_is_replaced() -> None:
    """In linear attention, the same key would hold the sum of both values."""
    layer = GatedDeltaNet(WIDTH, d_conv=1)
    with torch.no_grad():
        layer.a_log.fill_(-50.0)  # nothing decays
        layer.in_proj.weight[-4:] = 100.0  # for positive inputs, beta is one
        layer.in_proj.weight[WIDTH : 2 * WIDTH] *= 100  # the epsilon of unit length is negligible
        first = layer.forward_chunk(torch.ones(1, 1, WIDTH), layer.init_state(1))[1]
        again = layer.forward_chunk(torch.ones(1, 5, WIDTH), layer.init_state(1))[1]
    torch.testing.assert_close(first.s, again.s)


def test_steps_begin_log_uniform_from_a_thousandth_to_a_tenth() -> None:
    for layer in (Mamba(256), Mamba2(512, d_head=1), GatedDeltaNet(512, n_heads=512)):
        dt = F.softplus(layer.dt_bias.detach()).log()
        low, high = math.log(1e-3), math.log(0.1)
        assert low - 1e-3 <= dt.min() < low + 0.3
        assert high - 0.3 < dt.max() <= high + 1e-3
        assert abs(dt.mean() - (low + high) / 2) < 0.3


def test_the_states_of_mamba_begin_with_decays_1_to_n() -> None:
    wanted = -torch.arange(1.0, 17.0).expand(16, 16)
    torch.testing.assert_close(Mamba(WIDTH).transition(), wanted)


def test_a_model_leaves_the_beginning_of_the_steps_alone() -> None:
    model = LanguageModel(ModelConfig("mamba", vocab_size=5, d_model=64))
    weight = model.get_parameter("stack.layers.0.layer.dt_weight")
    assert 0.4 < weight.abs().max() <= 0.5  # the root of the rank, 4, in the denominator


def test_mamba_has_as_many_parameters_as_the_published_one() -> None:
    """state-spaces/mamba-130m: 24 layers of width 768, 50,280 tokens."""
    config = ModelConfig("mamba*24", vocab_size=50_280, d_model=768, norm="rms")
    assert count_parameters(config) == 129_135_360


@pytest.mark.parametrize("kind", [Mamba, Mamba2, GatedDeltaNet])
def test_decays_are_not_decayed(kind: type[Mamba | Mamba2 | GatedDeltaNet]) -> None:
    layer = kind(WIDTH)
    groups = {group["name"]: group["params"] for group in parameter_groups(layer, TrainConfig())}
    assert any(parameter is layer.a_log for parameter in groups["no_decay"])


@pytest.mark.parametrize("kind", [Mamba, Mamba2])
def test_skip_connections_are_not_decayed_even_where_vectors_are(
    kind: type[Mamba | Mamba2],
) -> None:
    """As in the official code, whose D has no weight decay."""
    layer, config = kind(WIDTH), TrainConfig(decay_vectors=True)
    groups = {group["name"]: group["params"] for group in parameter_groups(layer, config)}
    assert any(parameter is layer.skip for parameter in groups["no_decay"])


def test_the_default_head_divides_every_width() -> None:
    assert [Mamba2(width).d_head for width in (8, 64, 100, 148, 768)] == [16, 64, 50, 37, 64]


@pytest.mark.usefixtures("unannotated")
def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="got d_head=3, n_groups=1 and expand"):
        Mamba2(WIDTH, d_head=3)
    with pytest.raises(InputError, match="n_heads must divide d_model, got n_heads=3"):
        LinearAttention(WIDTH, n_heads=3)
    with pytest.raises(InputError, match="set normalise=False"):
        LinearAttention(WIDTH, feature="identity")
    with pytest.raises(InputError, match=r"feature to be one of elu, .* got 'elo'"):
        LinearAttention(WIDTH, feature="elo")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"expand_v \* d_key must be at least 1, got expand_v=0"):
        GatedDeltaNet(WIDTH, expand_v=0.01)
