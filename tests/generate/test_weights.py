"""Weights that change, or are freed, while a session lives: the right numbers, or an error."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrize

from stateline.errors import InputError
from stateline.generate import prefill
from stateline.generate.session import Session
from stateline.layers import LAYERS
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.train.processes import shard

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])
PATTERN = "h3 s4d shift_ssm mamba2 attention"


def make(pattern: str = PATTERN, seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(ModelConfig(pattern, 11, d_model=16)).eval()


def trained(model: LanguageModel) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(PROMPT).square().sum().backward()
    optimizer.step()


@torch.no_grad()
def multiplied(model: LanguageModel) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


@torch.no_grad()
def one_multiplied(model: LanguageModel) -> None:
    model.get_parameter("stack.layers.0.layer.diagonal.c").mul_(3.0)


def loaded(model: LanguageModel) -> None:
    model.load_state_dict(make(seed=1).state_dict())


def assigned(model: LanguageModel) -> None:
    model.load_state_dict(make(seed=1).state_dict(), assign=True)


def data_replaced(model: LanguageModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def rounded(model: LanguageModel) -> None:
    """There and back: often the new weights lie where the old ones lay."""
    model.bfloat16().float()


def parameter_replaced(model: LanguageModel) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() * 1.5))


def module_replaced(model: LanguageModel) -> None:
    for link, other in zip(model.stack.links, make(seed=1).stack.links, strict=True):
        link.layer = other.layer


def parametrized(model: LanguageModel) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            parametrize.register_parametrization(module, name, Half())


def lora(model: LanguageModel) -> None:
    settings = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    peft.inject_adapter_in_model(settings, model)


def lora_merged(model: LanguageModel) -> None:
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )
    tuned.merge_adapter()


WAYS = [
    *(multiplied, one_multiplied, trained, loaded, assigned, data_replaced, rounded),
    *(parameter_replaced, module_replaced, parametrized, lora, lora_merged),
]


@pytest.mark.parametrize("change", WAYS, ids=lambda way: way.__name__)
def test_weights_that_change_under_a_session_count_from_its_next_step(
    change: Callable[[LanguageModel], None],
) -> None:
    model = make()
    session = Session(model, prefill(model, PROMPT))
    stays = Session(copy.deepcopy(model), prefill(model, PROMPT))
    for _ in range(3):
        session.step()
        stays.step()
    change(model)
    fresh = Session(model, session.state())
    for _ in range(3):
        found, wanted, old = (s.step().logits for s in (session, fresh, stays))
        assert found.equal(wanted)
        assert not found.isclose(old, rtol=1e-3).all()  # or the change would not show


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16])
def test_a_cast_under_a_session_is_refused(change: Callable[[nn.Module], nn.Module]) -> None:
    model = make("h3 attention")
    session = Session(model, prefill(model, PROMPT))
    session.step()
    change(model)
    with pytest.raises(InputError, match=r"cast or moved .* prefill again"):
        session.step()


def test_a_move_under_a_session_is_refused() -> None:
    model = make("h3 attention")
    session = Session(model, prefill(model, PROMPT))
    session.step()
    model.to("meta")
    with pytest.raises(InputError, match=f"now, got torch.int64 on {PROMPT.device}; prefill again"):
        session.step()


def test_graphs_of_old_weights_are_not_replayed() -> None:
    """On memory of their own, as CUDA graphs are: each holds the weights that it was made with."""
    model = make("attention")

    def record(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        weights, logits = copy.deepcopy(model.state_dict()), call()

        def replay() -> None:
            now = copy.deepcopy(model.state_dict())
            model.load_state_dict(weights)
            logits.copy_(call())
            model.load_state_dict(now)

        return replay, logits

    session = Session(model, prefill(model, PROMPT))
    session.use_graphs(record)
    session.step()
    loaded_other = make("attention", seed=1).state_dict()
    model.load_state_dict(loaded_other)
    fresh = Session(model, session.state())
    torch.testing.assert_close(session.step().logits, fresh.step().logits)


def replaced(module: nn.LayerNorm) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 1.5)


def moved(module: nn.LayerNorm) -> None:
    module.weight.data = module.weight.data * 1.5


@pytest.mark.parametrize("change", [replaced, moved])
def test_a_graph_is_recorded_again_after_any_weight_got_other_memory(
    change: Callable[[nn.LayerNorm], None],
) -> None:
    """Here a graph runs the step, so that it would see the new weight; a CUDA graph would not."""
    model, recorded = make("attention"), 0

    def record(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        nonlocal recorded
        recorded += 1
        logits = call()
        return lambda: logits.copy_(call()), logits

    session = Session(model, prefill(model, PROMPT))
    session.use_graphs(record)
    for wanted in (1, 1, 2, 2):
        session.step()
        assert recorded == wanted
        if session.state().length == PROMPT.shape[1] + 2:
            change(model.get_submodule("stack.layers.0.norm"))  # type: ignore[arg-type]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.cpu
@pytest.mark.usefixtures("group")
def test_a_sharded_model_decodes_as_the_whole_one() -> None:
    """One process is enough: FSDP frees the weights of a block after every call of it."""
    whole, prompt = make(), PROMPT.cpu()
    sharded = copy.deepcopy(whole)
    shard(sharded, init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        sharded(prompt)  # FSDP on one process fails if its first call is in inference mode
    ours, wanted = (Session(model, prefill(model, prompt)) for model in (sharded, whole))
    for _ in range(6):
        assert ours.step().logits.equal(wanted.step().logits)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "numba", "torch"])
def test_on_two_processes_every_mixer_decodes_as_the_whole_one(backend: str) -> None:
    patterns = [
        *LAYERS,
        "h3 attention",
        "ladder(h3 s4d, passes=2)",
        "staircase(s4d, chunk_len=2, passes=2)",
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(Path(__file__).with_name("sharded.py"))
    done = subprocess.run(
        [*launch, script, backend, *patterns], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == dict.fromkeys(patterns, 0.0)
