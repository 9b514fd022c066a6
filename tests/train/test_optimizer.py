import gc
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close

from stateline.errors import InputError
from stateline.layers import LAYERS, MoE
from stateline.layers.linear import Linear
from stateline.models.config import ModelConfig
from stateline.models.factory import meta_model
from stateline.models.language_model import LanguageModel
from stateline.train.config import TrainConfig
from stateline.train.optimizer import (
    OPTIMIZERS,
    Adafactor,
    Muon,
    learning_rate_share,
    make_optimizer,
    moments_like,
    parameter_groups,
    set_learning_rate,
)

PATTERN = "h3 attention(bias=true) s4d lstm"
SSM_NAMES = {"log_dt", "log_decay", "frequency", "b"}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(ModelConfig(PATTERN, vocab_size=10, d_model=8))


def grouped(model: LanguageModel, config: TrainConfig | None = None) -> dict[str, dict]:
    return {group["name"]: group for group in parameter_groups(model, config or TrainConfig())}


def names_in(model: LanguageModel, group: str) -> set[str]:
    members = {id(parameter) for parameter in grouped(model)[group]["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in members}


def test_every_parameter_is_in_one_group_once(model: LanguageModel) -> None:
    members = [id(p) for group in parameter_groups(model, TrainConfig()) for p in group["params"]]
    assert sorted(members) == sorted(id(parameter) for parameter in model.parameters())


def test_weights_have_the_rate_of_the_first_pattern_that_fits_their_names(
    model: LanguageModel,
) -> None:
    rates = "embedding.*=1e-5 stack.layers.1.*=1e-2 stack.layers.*=3e-3"
    config = TrainConfig(lr=1e-3, rates=rates)
    peaks = {id(p): g["peak"] for g in parameter_groups(model, config) for p in g["params"]}
    for name, parameter in model.named_parameters():
        wanted = {"embedding": 1e-5, "stack": 3e-3}.get(name.partition(".")[0], 1e-3)
        wanted = 1e-2 if name.startswith("stack.layers.1.") else wanted
        assert peaks[id(parameter)] == wanted, name
    with pytest.raises(InputError, match="rates='none' fits no weight"):
        parameter_groups(model, TrainConfig(rates="none=1"))
    for wrong in ("embedding.*", "embedding.*=-1", "=1", "embedding.*=nan"):
        with pytest.raises(InputError, match="rates must be patterns of names with a positive"):
            TrainConfig(rates=wrong)


def test_a_core_that_stands_in_several_places_is_optimised_once() -> None:
    ladder = LanguageModel(ModelConfig("ladder(h3, passes=3)", vocab_size=10, d_model=8))
    members = [p for group in parameter_groups(ladder, TrainConfig()) for p in group["params"]]
    assert len(members) == len({id(parameter) for parameter in members})


def test_a_matrix_that_two_modules_share_is_optimised_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    (group,) = parameter_groups(nn.Sequential(first, second), TrainConfig())
    assert len(group["params"]) == 1


def test_steps_transitions_and_inputs_of_state_spaces_are_a_group(model: LanguageModel) -> None:
    found = names_in(model, "ssm")
    assert {name.rpartition(".")[2] for name in found} == SSM_NAMES
    everywhere = {n for n, _ in model.named_parameters() if n.rpartition(".")[2] in SSM_NAMES}
    assert found == everywhere


def test_vectors_do_not_decay_and_matrices_do(model: LanguageModel) -> None:
    vectors, matrices = names_in(model, "no_decay"), names_in(model, "decay")
    assert {model.get_parameter(name).ndim for name in vectors} == {1}
    assert {"norm.weight", "norm.bias", "stack.layers.2.layer.qkv.bias"} <= vectors
    assert {"embedding.weight", "stack.layers.2.layer.qkv.weight"} <= matrices
    assert all(model.get_parameter(name).ndim > 1 for name in matrices)


@pytest.mark.parametrize("name", [*LAYERS, "mamba3(out_norm=true)"])
def test_norms_and_biases_of_no_layer_decay(name: str) -> None:
    """Also those of heads, which are matrices; tables of biases by distance are no biases."""
    model = meta_model(ModelConfig(name, 11, d_model=16))
    names = {parameter: own for own, parameter in model.named_parameters()}
    decayed = [g["params"] for g in parameter_groups(model, TrainConfig()) if g["weight_decay"]]
    ends = [names[parameter].rpartition(".")[2] for own in decayed for parameter in own]
    assert not [
        own for own in ends if own.endswith(("bias", "norm_weight")) and own != "bucket_bias"
    ]


def test_only_the_group_that_decays_has_a_weight_decay(model: LanguageModel) -> None:
    groups = grouped(model, TrainConfig(weight_decay=0.3))
    decay = {name: group["weight_decay"] for name, group in groups.items()}
    assert decay == {"decay": 0.3, "no_decay": 0.0, "ssm": 0.0}


@pytest.mark.parametrize(
    ("lr", "own", "wanted"),
    [(1e-2, None, 1e-3), (1e-4, None, 1e-4), (1e-2, 5e-3, 5e-3), (1e-4, 5e-3, 5e-3)],
)
def test_state_spaces_learn_at_most_at_a_thousandth_unless_told(
    model: LanguageModel, lr: float, own: float | None, wanted: float
) -> None:
    config = TrainConfig(lr=lr, ssm_lr=own)
    peaks = {name: group["peak"] for name, group in grouped(model, config).items()}
    assert peaks == {"decay": lr, "no_decay": lr, "ssm": wanted}


def test_a_model_without_state_spaces_has_no_such_group() -> None:
    plain = LanguageModel(ModelConfig("attention", vocab_size=10, d_model=8))
    assert set(grouped(plain)) == {"decay", "no_decay"}


def test_all_groups_follow_the_schedule_each_to_its_own_height(model: LanguageModel) -> None:
    config = TrainConfig(lr=1e-2, warmup_steps=10)
    optimizer = make_optimizer(model, config)
    assert set_learning_rate(optimizer, config, 4) == 0.5
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"decay": 5e-3, "no_decay": 5e-3, "ssm": 5e-4}


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_the_learning_rate_rises_linearly_and_is_never_zero(schedule: str) -> None:
    config = TrainConfig(steps=100, warmup_steps=4, schedule=schedule)
    shares = [learning_rate_share(config, step) for step in range(100)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[4:] == sorted(shares[4:], reverse=True)
    assert min(shares) > 0


def test_the_learning_rate_falls_also_in_a_short_training() -> None:
    assert learning_rate_share(TrainConfig(steps=12, schedule="wsd"), 11) == 0.5


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.5, 1 / 80),
        ("cosine", 0.55, 0.1 + 0.45 * (1 - math.cos(math.pi / 80))),
        ("wsd", 1.0, 1 / 10),
    ],
)
def test_the_learning_rate_falls_as_the_schedule_says(
    schedule: str, middle: float, last: float
) -> None:
    config = TrainConfig(steps=100, warmup_steps=20, schedule=schedule)
    assert learning_rate_share(config, 60) == pytest.approx(middle)
    assert learning_rate_share(config, 99) == pytest.approx(last)


def test_without_a_warm_up_training_starts_at_the_top() -> None:
    assert learning_rate_share(TrainConfig(warmup_steps=0), 0) == 1.0


def test_the_betas_reach_the_optimizer(model: LanguageModel) -> None:
    optimizer = make_optimizer(model, TrainConfig(beta1=0.8, beta2=0.95))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all(group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)


def test_a_short_run_warms_up_for_half_of_it_at_most() -> None:
    config = TrainConfig(steps=30, warmup_steps=100, schedule="constant")
    assert learning_rate_share(config, 13) == pytest.approx(14 / 15)
    assert [learning_rate_share(config, step) for step in (14, 15, 29)] == [1.0, 1.0, 1.0]


def test_a_cosine_that_ends_before_the_run_stays_at_a_tenth() -> None:
    config = TrainConfig(steps=100, warmup_steps=20, schedule_steps=60)
    whole = TrainConfig(steps=60, warmup_steps=20)
    for step in range(60):
        assert learning_rate_share(config, step) == learning_rate_share(whole, step)
    assert [learning_rate_share(config, step) for step in (60, 99)] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("linear", [1, 0.6, 0.6, 0.2, 0.2]),
        ("cosine", [1, 0.6, 0.6, 0.2, 0.2]),
        ("wsd", [1, 1, 0.6, 0.2, 0.2]),
    ],
)
def test_a_schedule_falls_to_its_final_share(schedule: str, wanted: list[float]) -> None:
    settings = {"warmup_steps": 0, "schedule_steps": 80, "final_share": 0.2}
    own = {"decay_steps": 40} if schedule == "wsd" else {}
    config = TrainConfig(steps=100, schedule=schedule, **settings, **own)
    steps = (0, 40, 60 if schedule == "wsd" else 40, 80, 99)
    assert [learning_rate_share(config, step) for step in steps] == pytest.approx(wanted)


def test_variants_of_the_warm_up() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, warmup_from_zero=True, schedule="linear")
    assert [learning_rate_share(config, step) for step in (0, 5, 10)] == [0, 0.5, 1]
    overlapping = TrainConfig(steps=100, warmup_steps=10, warmup_overlaps=True, schedule="linear")
    assert [learning_rate_share(overlapping, step) for step in (9, 10, 99)] == [1, 0.9, 0.01]


def test_vectors_decay_if_asked_to(model: LanguageModel) -> None:
    config = TrainConfig(decay_vectors=True)
    decayed = {id(p) for p in grouped(model, config)["decay"]["params"]}
    assert id(model.norm.weight) in decayed
    assert grouped(model, config)["ssm"]["weight_decay"] == 0.0


def test_everything_decays_if_asked_to(model: LanguageModel) -> None:
    groups = grouped(model, TrainConfig(decay_all=True))
    assert {name: group["weight_decay"] for name, group in groups.items()} == dict.fromkeys(
        ("decay", "no_decay", "ssm"), 0.1
    )


def test_adafactor_has_the_rates_of_the_groups(model: LanguageModel) -> None:
    config = TrainConfig(optimizer="adafactor", lr=1e-2, warmup_steps=0)
    optimizer = make_optimizer(model, config)
    assert isinstance(optimizer, torch.optim.Adafactor)
    set_learning_rate(optimizer, config, 0)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"decay": 1e-2, "no_decay": 1e-2, "ssm": 1e-3}
    for settings in ({"parallel": "fsdp"}, {"shard": 2}):
        with pytest.raises(InputError, match="adafactor works with whole parameters"):
            TrainConfig(optimizer="adafactor", **settings)


def test_momentum_averages_the_changes_of_adafactor() -> None:
    """Of a gradient that stays, so that the change of the first step is known from PyTorch's."""
    plain, averaged = (nn.Parameter(torch.full((2, 3), 1.0)) for _ in range(2))
    groups = [{"params": [averaged]}]
    mine = Adafactor(groups, lr=0.1, beta1=0.75)
    theirs = torch.optim.Adafactor([plain], lr=0.1)
    wanted, mean = averaged.detach().clone(), torch.zeros(2, 3)
    for _ in range(3):
        with torch.no_grad():
            plain.copy_(wanted)  # Adafactor's change depends on the size of the parameter
        plain.grad = averaged.grad = torch.full((2, 3), 0.5)
        theirs.step()
        mine.step()
        mean = 0.75 * mean + 0.25 * (plain.detach() - wanted)
        wanted = wanted + mean
        assert_close(averaged.detach(), wanted)


@pytest.mark.parametrize("shape", [(3, 4), (5,)])
def test_adafactor_follows_its_equations_at_every_rate(shape: tuple[int, ...]) -> None:
    """Also where PyTorch's would take 1/sqrt(t): from the fifth step on."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    optimizer = Adafactor([{"params": [weight], "weight_decay": 0.1}], lr=0.5)
    wanted, mean = weight.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    for step in range(1, 9):
        gradient = weight.grad = torch.randn(shape, dtype=torch.float64)
        optimizer.step()
        mean = mean.lerp(gradient.square(), step**-0.8)
        size = mean
        if len(shape) > 1:  # means of rows and of columns are kept in place of the whole
            size = mean.mean(1, keepdim=True) * mean.mean(0) / mean.mean()
        update = gradient / size.sqrt()
        update = update / max(1.0, update.square().mean().sqrt().item())
        wanted = wanted * (1 - 0.5 * 0.1)
        wanted = wanted - 0.5 * max(1e-3, wanted.square().mean().sqrt().item()) * update
        assert_close(weight.detach(), wanted)


def test_momentum_begins_with_the_first_gradient() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = Adafactor([{"params": [weight]}], lr=0.1, beta1=0.75)
    optimizer.step()
    assert weight.equal(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    assert not weight.equal(torch.ones(2, 3))


def test_every_optimizer_of_the_table_can_be_chosen() -> None:
    assert get_args(TrainConfig.__annotations__["optimizer"]) == tuple(OPTIMIZERS)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_table_says_what_each_optimizer_keeps(kind: str) -> None:
    trained = LanguageModel(ModelConfig(PATTERN, vocab_size=10, d_model=8))
    optimizer = make_optimizer(trained, TrainConfig(optimizer=kind))
    trained(torch.tensor([[1, 2, 3]])).square().sum().backward()
    optimizer.step()
    for name, likes in moments_like(trained, optimizer, TrainConfig(optimizer=kind)).items():
        kept = optimizer.state[trained.get_parameter(name)]
        assert {k: (x.shape, x.dtype) for k, x in kept.items()} == {
            k: (x.shape, x.dtype) for k, x in likes.items()
        }


def test_muon_updates_the_linear_maps_of_blocks_and_nothing_else(model: LanguageModel) -> None:
    groups = grouped(model, TrainConfig(optimizer="muon", lr=1e-2, muon_lr=3e-2))
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {names[parameter] for parameter in groups["matrices"]["params"]}
    assert {"stack.layers.2.layer.qkv.weight", "stack.layers.1.layer.in_proj.weight"} <= found
    assert all(name.endswith("proj.weight") or "qkv" in name for name in found)
    assert "embedding.weight" not in found
    peaks = {name: group["peak"] for name, group in groups.items()}
    assert peaks == {"decay": 1e-2, "matrices": 3e-2, "no_decay": 1e-2, "ssm": 1e-3}
    assert {name for name, group in groups.items() if group["weight_decay"]} == {
        "decay",
        "matrices",
    }
    with pytest.raises(InputError, match="muon_lr is for optimizer=muon, got optimizer=adamw"):
        TrainConfig(muon_lr=0.1)


def test_muon_moves_matrices_by_the_polar_factor_of_the_momentum() -> None:
    """From zero, the singular values of the first update lie around 0.2 sqrt(width) lr."""
    torch.manual_seed(0)
    linear = nn.Linear(32, 32, bias=False)
    made = nn.Module()
    made.stack = nn.Sequential(linear)
    nn.init.zeros_(linear.weight)
    config = TrainConfig(optimizer="muon", lr=1.0, warmup_steps=0)
    optimizer = make_optimizer(made, config)
    set_learning_rate(optimizer, config, 0)
    linear(torch.randn(64, 32)).mul(torch.randn(64, 32)).sum().backward()
    optimizer.step()
    sizes = torch.linalg.svdvals(linear.weight.detach()) / (0.2 * 32**0.5)
    assert sizes.min() > 0.3  # of Newton and Schulz, whose five steps end between 0.5 and 1.5
    assert sizes.max() < 1.6


class Maps(nn.Module):
    """Linear maps in the place of a model's layers."""

    def __init__(self, *maps: Linear) -> None:
        super().__init__()
        self.stack = nn.ModuleList(maps)


@pytest.mark.parametrize("by_head", [False, True])
def test_muon_changes_maps_that_are_one_matrix_one_by_one(by_head: bool) -> None:
    torch.manual_seed(0)
    fused = Linear(6, [8, 4, 4], bias=False, heads=[2, 1, 1])
    rows = [4, 4, 4, 4] if by_head else [8, 4, 4]
    apart = [Linear(6, n, bias=False) for n in rows]
    gradient = torch.randn(16, 6)
    fused.weight.grad = gradient.clone()
    for own, weight, grad in zip(
        apart, fused.weight.detach().split(rows), gradient.split(rows), strict=True
    ):
        own.weight.data.copy_(weight)
        own.weight.grad = grad.clone()
    config = TrainConfig(optimizer="muon", lr=0.1, muon_heads=by_head)
    for made in (Maps(fused), Maps(*apart)):
        make_optimizer(made, config).step()
    assert_close(fused.weight, torch.cat([own.weight for own in apart]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("by_head", [False, True])
def test_muon_changes_maps_whose_heads_take_turns_one_by_one(by_head: bool) -> None:
    torch.manual_seed(0)
    fused = Linear(6, [24, 4], bias=False, heads=[2, 1], turns=[3, 1])  # q k v q k v, then another
    gradient = torch.randn(28, 6)
    head = [list(range(first, first + 4)) for first in range(0, 24, 4)]
    rows = head if by_head else [head[place] + head[place + 3] for place in range(3)]
    rows = [*rows, [24, 25, 26, 27]]
    apart = [Linear(6, len(own), bias=False) for own in rows]
    fused.weight.grad = gradient.clone()
    for linear, own in zip(apart, rows, strict=True):
        linear.weight.data.copy_(fused.weight.detach()[own])
        linear.weight.grad = gradient[own]
    config = TrainConfig(optimizer="muon", lr=0.1, muon_heads=by_head)
    for made in (Maps(fused), Maps(*apart)):
        make_optimizer(made, config).step()
    for linear, own in zip(apart, rows, strict=True):
        assert_close(fused.weight[own], linear.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "pattern", ["lightning_attention(n_heads=2)", "latent_attention(n_heads=2, position=none)"]
)
def test_muon_knows_which_rows_are_keys(pattern: str) -> None:
    """What reaches the values alone changes no map of the keys, of which zeros have no polar part.

    So with gradients of the values' rows alone, the other rows stay as they are.
    """
    model = LanguageModel(ModelConfig(pattern, vocab_size=10, d_model=8))
    name, place = ("qkv", 2) if "lightning" in pattern else ("up_proj", 1)
    linear = next(m for n, m in model.named_modules() if n.endswith(f".{name}"))
    assert isinstance(linear, Linear)
    before, turns = linear.weight.detach().clone(), linear.part_turns[0]
    values = torch.zeros(2, turns, len(before) // 2 // turns, dtype=torch.bool)
    values[:, place] = True
    linear.weight.grad = torch.randn_like(before) * values.flatten()[:, None]
    make_optimizer(model, TrainConfig(optimizer="muon", lr=0.1, weight_decay=0.0)).step()
    moved = (linear.weight - before).abs().amax(dim=1) > 1e-6
    assert moved.equal(values.flatten())


@pytest.mark.parametrize("name", ["attention", "h3", "gated_delta_net", "mamba2", "mlstm", "mamba"])
def test_every_map_of_a_fused_matrix_is_known_to_muon(name: str) -> None:
    model = LanguageModel(ModelConfig(name, vocab_size=10, d_model=16))
    (group,) = [
        group
        for group in parameter_groups(model, TrainConfig(optimizer="muon", muon_heads=True))
        if group["name"] == "matrices"
    ]
    fused = [maps for maps in group["maps"] if len(maps) > 1]
    assert fused
    for parameter, maps in zip(group["params"], group["maps"], strict=True):
        assert not maps or sum(each.rows for each in maps) == len(parameter)


def test_muon_leaves_matrices_without_a_gradient_as_they_are() -> None:
    used, unused = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = Muon([used, unused], lr=0.1)
    used.grad = torch.ones(4, 4)
    optimizer.step()
    assert unused.equal(torch.ones(4, 4))
    assert not used.equal(unused)


def test_muon_of_a_model_without_hidden_matrices_is_adamw() -> None:
    plain, other = (nn.Linear(4, 4) for _ in range(2))
    other.load_state_dict(plain.state_dict())
    for layer, kind in ((plain, "adamw"), (other, "muon")):
        optimizer = make_optimizer(layer, TrainConfig(optimizer=kind))
        layer(torch.ones(4)).sum().backward()
        optimizer.step()
    assert other.weight.equal(plain.weight)


def test_muon_keeps_nothing_of_a_step_but_the_momentum() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer = Muon([weight], lr=0.1)
    gc.collect()  # what earlier tests left
    counts = []
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        counts.append(sum(type(found) is torch.Tensor for found in gc.get_objects()))
    assert counts[0] == counts[1] == counts[2]


def test_muon_updates_each_expert_as_a_matrix_of_its_own() -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("lstm moe", 11, d_model=8))
    groups = grouped(model, TrainConfig(optimizer="muon"))
    layer = next(module for module in model.modules() if isinstance(module, MoE))
    others = {parameter for group in groups.values() for parameter in group["params"]}
    assert {layer.in_weight, layer.out_weight} <= set(groups["matrices"]["params"]) <= others
    stack = layer.in_weight
    alone = [nn.Parameter(expert.detach().clone()) for expert in stack]
    ours = Muon([stack], lr=0.1, weight_decay=0.1)
    pytorch = torch.optim.Muon(alone, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for expert, gradient in zip(alone, stack.grad, strict=True):
            expert.grad = gradient.clone()
        ours.step()
        pytorch.step()
    torch.testing.assert_close(stack.detach(), torch.stack(alone).detach())


@pytest.mark.cpu  # where gloo works
def test_muon_of_a_sharded_matrix_is_that_of_the_whole_one(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        for shape in ((16, 48), (48, 16), (1, 8), (3, 16, 8)):
            whole = nn.Parameter(torch.randn(shape))
            sharded = nn.Module()
            sharded.weight = nn.Parameter(whole.detach().clone())
            fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
            muons = [Muon([p], lr=0.1, weight_decay=0.1) for p in (whole, sharded.weight)]
            for _ in range(3):
                whole.grad = torch.randn(shape)
                gradient = distribute_tensor(whole.grad, *placed(sharded.weight))
                sharded.weight.grad = gradient
                for muon in muons:
                    muon.step()
            torch.testing.assert_close(sharded.weight.full_tensor(), whole.detach())
    finally:
        torch.distributed.destroy_process_group()


class Distributed(nn.Module):
    """As DistributedDataParallel, without its processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def hugging_face(model: LanguageModel) -> nn.Module:
    pytest.importorskip("transformers")
    from stateline import hf

    return hf.wrap(model)


WRAPPERS: dict[str, Callable[[LanguageModel], nn.Module]] = {
    "AveragedModel": AveragedModel,
    "DataParallel": nn.DataParallel,
    "DDP": Distributed,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "transformers": hugging_face,
    "PEFT": lambda model: pytest.importorskip("peft").get_peft_model(
        hugging_face(model), pytest.importorskip("peft").LoraConfig(target_modules="all-linear")
    ),
}


def grouped_names(model: nn.Module, config: TrainConfig) -> dict[tuple[str, float], set[str]]:
    """Names of the parameters of each group, without those of wrappers and adapters."""
    names = {
        p: re.sub(r"^(module|_orig_mod|base_model|model)\.|\.base_layer", "", name)
        for name, p in model.named_parameters()
    }
    return {
        (group["name"], group["weight_decay"]): {
            names[p].removeprefix("model.").removeprefix("model.")  # of PEFT and of transformers
            for p in group["params"]
            if "lora_" not in names[p]
        }
        for group in parameter_groups(model, config)
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_models_inside_wrappers_have_the_groups_of_the_model(wrapper: str, optimizer: str) -> None:
    model = LanguageModel(ModelConfig("mamba h3 attention", vocab_size=10, d_model=16))
    config = TrainConfig(optimizer=optimizer)  # type: ignore[arg-type]
    wanted = grouped_names(model, config)
    assert len(wanted) == 3 + (optimizer == "muon")
    assert grouped_names(WRAPPERS[wrapper](model), config) == wanted


@pytest.mark.cpu  # where gloo works
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_sharded_model_has_the_groups_of_the_whole_one(optimizer: str, tmp_path: Path) -> None:
    model = LanguageModel(ModelConfig("mamba h3 attention", vocab_size=10, d_model=16))
    config = TrainConfig(optimizer=optimizer)  # type: ignore[arg-type]
    wanted = grouped_names(model, config)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert grouped_names(model, config) == wanted
    finally:
        torch.distributed.destroy_process_group()


def placed(tensor: DTensor) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements
