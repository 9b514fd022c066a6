"""Two processes learn what one learns, and a checkpoint does not depend on their number."""

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.ops import use_backend
from stateline.tasks import Copying
from stateline.train.batches import Batches
from stateline.train.checkpoint import Save
from stateline.train.config import TrainConfig
from stateline.train.folder import found
from stateline.train.loop import ALONE, train
from stateline.train.metrics import METRICS
from stateline.train.optimizer import make_optimizer
from stateline.train.processes import Processes, join_processes, own_rows, shard
from stateline.train.segment import Segment
from tests.tasks.small_data import answers
from tests.train.held import forked, held

SCRIPT = Path(__file__).with_name("several.py")
_spec = importlib.util.spec_from_file_location("several", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
several = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(several)


def torchrun(home: Path, until: int) -> None:
    """Two processes train on, with DDP and FSDP, on joined and on packed documents."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(SCRIPT), str(home), str(until)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One process throughout; and two, then one, then two again, each for three steps."""
    alone, shared = (tmp_path_factory.mktemp(name) for name in ("alone", "shared"))
    for home in (alone, shared):
        (home / "text").mkdir()
        for number in range(50):
            text = bytes(97 + n * n % 23 for n in range(number, number + 12 + number % 17))
            (home / "text" / f"{number}.txt").write_bytes(text)
    for documents in ("join", "pack"):
        several.run(alone, f"ddp-{documents}", 9, ALONE)
    torchrun(shared, 3)
    for mode in several.MODES:
        several.run(shared, mode, 6, ALONE)
    torchrun(shared, 9)
    return {"alone": alone, **{mode: shared / mode for mode in several.MODES}}


def alike(homes: dict[str, Path], mode: str) -> Path:
    """The run of one process on the same documents."""
    return homes["alone"] / f"ddp-{mode.split('-')[1]}"


def lines(folder: Path, name: str) -> dict[int, float]:
    """A column of the metrics, by step."""
    found = map(json.loads, (folder / METRICS).read_text().splitlines())
    return {line["step"]: line[name] for line in found if line[name] is not None}


@pytest.mark.slow
@pytest.mark.parametrize("mode", several.MODES)
@pytest.mark.parametrize(("what", "count"), [("loss", 9), ("metric", 3)])
@pytest.mark.slow
def test_losses_and_scores_are_those_of_one_process(
    homes: dict[str, Path], mode: str, what: str, count: int
) -> None:
    alone = lines(alike(homes, mode), what)
    assert len(alone) == count
    assert lines(homes[mode], what) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", several.MODES)
def test_checkpoints_hold_what_those_of_one_process_hold(homes: dict[str, Path], mode: str) -> None:
    ours, alone = (held(found(home)[-1]) for home in (homes[mode], alike(homes, mode)))
    assert ours.keys() == alone.keys()
    for name, wanted in alone.items():
        assert ours[name].shape == wanted.shape
        # by norm: AdamW makes whole steps of rounding errors where a gradient is next to nothing
        error = (ours[name].double() - wanted.double()).norm()
        assert error <= 1e-3 * wanted.double().norm(), name


def test_rows_that_cannot_be_shared_out_are_refused() -> None:
    message = "the rows of every batch must be a multiple of the 3 processes, got 4"
    with pytest.raises(InputError, match=message):
        Processes(rank=0, count=3).rows(4)
    with pytest.raises(InputError, match=message):  # before the first update
        Batches(Copying(batch_size=4), TrainConfig(), Processes(rank=0, count=3))


def test_every_row_goes_to_one_process() -> None:
    shares = [range(12)[Processes(rank, 3).rows(12)] for rank in range(3)]
    assert [row for share in shares for row in share] == list(range(12))


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_processes("cpu") as processes:
        assert (processes.rank, processes.count, processes.main) == (0, 1, True)


def test_a_number_of_processes_without_a_way_to_find_them_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with (
        pytest.raises(InputError, match="but MASTER_ADDR, MASTER_PORT is not set: start them with"),
        join_processes("cpu"),
    ):
        pass


class Disagreeing(Processes):
    """Two processes, of which the other was given something else."""

    other: ClassVar[dict[str, Any]] = {}

    def share(self, value: Any) -> list[Any]:
        changed = {name: {**value[name], **new} for name, new in self.other.items()}
        return [{**value, **changed}, value]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"train": {"lr": 0.5}}, r"lr \(0.5 in process 0, 0.001 in process 1\)"),
        ({"train": {"save_every": 7}}, r"save_every \(7 in process 0, 500 in process 1\)"),
        ({"run": {"data": "b"}}, r"data \(b in process 0, a in process 1\)"),
        ({"folder": {"newest checkpoint": "step-00000002"}}, "newest checkpoint"),
    ],
)
def test_processes_with_different_runs_are_refused(
    other: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their copies of the model would drift apart, or one would wait for another forever."""
    monkeypatch.setattr(Disagreeing, "other", other)
    model, task = LanguageModel(ModelConfig("lstm", 11, d_model=8)), Copying(batch_size=4)
    with pytest.raises(InputError, match=message):
        train(
            model,
            task,
            TrainConfig(steps=1),
            folder=tmp_path,
            run={"data": "a"},
            processes=Disagreeing(rank=1, count=2),
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with (
        pytest.raises(InputError, match="device cuda was asked for, but"),
        join_processes("cuda"),
    ):
        pass


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.cpu  # where gloo works
@pytest.mark.usefixtures("group")
def test_what_autocast_rounds_is_gathered_rounded_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3 s5 mamba2 attention", 11, d_model=16))
    wanted = copy.deepcopy(model)
    segment = Segment(model, torch.bfloat16)
    shard(model, init_device_mesh("cpu", (1,)), segment.dtype)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            path = f"{name}.weight"
            module.register_forward_hook(
                lambda m, *_, path=path: seen.update({path: m.weight.detach().clone()})
            )
    tokens = torch.randint(11, (2, 8))
    alone = Segment(wanted, torch.bfloat16)
    with use_backend(pointwise="torch"):  # which sharded weights take
        for _ in range(2):  # the second time into memory that was freed
            ours, theirs = segment(tokens)[0], alone(tokens)[0]
            assert ours.equal(theirs)
            ours.square().sum().backward()
            theirs.square().sum().backward()
    assert {name for name in seen if "qkv" in name}
    for name, weight in seen.items():
        assert weight.equal(wanted.get_parameter(name).detach().bfloat16().float())
    for name, parameter in model.named_parameters():
        gradient, alike = parameter.grad, wanted.get_parameter(name).grad
        assert isinstance(gradient, DTensor)
        assert isinstance(parameter, DTensor)
        assert gradient.to_local().equal(alike), name
        assert parameter.to_local().equal(wanted.get_parameter(name)), name


@pytest.mark.cpu  # where gloo works
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("pattern", ["staircase(lstm, chunk_len=4)", "feedback(attention)"])
def test_how_often_parameters_are_gathered_does_not_depend_on_the_documents(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one process would wait for another whose rows hold other documents."""
    model = LanguageModel(ModelConfig(pattern, 11, d_model=8))
    wanted = copy.deepcopy(model)
    shard(model, init_device_mesh("cpu", (1,)))
    gathers = Mock(side_effect=FSDPParamGroup.unshard)
    monkeypatch.setattr(FSDPParamGroup, "unshard", lambda *given: gathers(*given))
    tokens, counts = torch.randint(11, (2, 24)), list[int]()
    for borders in ([], [], [0], [7], [5, 6, 17]):
        starts = torch.zeros(2, 24, dtype=torch.bool)
        starts[:, borders] = True
        gathers.reset_mock()
        ours = model.forward_chunk(tokens, model.init_state(2), starts=starts)[0]
        assert ours.equal(wanted.forward_chunk(tokens, wanted.init_state(2), starts=starts)[0])
        ours.square().sum().backward()
        counts.append(gathers.call_count)
    assert len(set(counts[1:])) == 1  # FSDP learns the order of the layers from the first pass


@pytest.mark.cpu  # where gloo works
@pytest.mark.usefixtures("group")
def test_moments_of_what_fsdp_has_gathered_are_kept(tmp_path: Path) -> None:
    """FSDP leaves the outermost parameters gathered after a call without gradients."""
    model = LanguageModel(ModelConfig("attention", 11, d_model=8))
    names = {name for name, _ in model.named_parameters()}
    shard(model, init_device_mesh("cpu", (1,)))
    optimizer = make_optimizer(model, TrainConfig())
    tokens = torch.tensor([[1, 2, 3]])
    model(tokens).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(tokens)
    saved = Save(tmp_path, model, optimizer, None, {"progress": {"steps": 1}}, ALONE)
    saved.commit(1)
    kept = {name.split("/")[1] for name in held(saved.path) if name.startswith("moments/")}
    assert kept == names


@pytest.mark.parametrize(
    ("settings", "shards"),
    [({}, 1), ({"parallel": "fsdp"}, 8), ({"shard": 4}, 4), ({"parallel": "fsdp", "shard": 1}, 1)],
)
def test_shards_lie_between_ddp_and_fsdp(settings: dict[str, Any], shards: int) -> None:
    assert Processes(count=8).shards(TrainConfig(**settings)) == shards
    assert Processes().shards(TrainConfig(**settings)) == 1


def test_a_number_of_shards_that_leaves_processes_over_is_refused() -> None:
    with pytest.raises(InputError, match="must divide the number of processes, which is 8, got 3"):
        Processes(count=8).shards(TrainConfig(shard=3))


@pytest.mark.cpu
def test_weights_that_fsdp_pads_are_gathered_as_they_are() -> None:
    dist.init_process_group("fake", FakeStore(), rank=0, world_size=2)
    try:
        model = LanguageModel(ModelConfig("mamba(dt_rank=3)", 11, d_model=8))
        shard(model, init_device_mesh("cpu", (2,)), torch.bfloat16)
        rounded = {
            name: hasattr(module.weight._local_tensor, "fsdp_pre_all_gather")
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
    finally:
        dist.destroy_process_group()
    (padded,) = (name for name, is_rounded in rounded.items() if not is_rounded)
    assert padded.endswith("x_proj")  # of 35 rows
    assert len(rounded) > 1


@pytest.mark.cpu
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("rows", [8, 7, 5, 1])
def test_rows_that_are_no_multiple_of_the_processes_have_their_places(rank: int, rows: int) -> None:
    dist.init_process_group("fake", FakeStore(), rank=rank, world_size=4)
    try:
        whole, mesh = torch.arange(3 * rows).view(rows, 3), init_device_mesh("cpu", (4,))
        own, first = own_rows(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    finally:
        dist.destroy_process_group()
    assert own.flatten().equal(whole.flatten()[first : first + own.numel()])
    assert first + own.numel() <= whole.numel()
    assert len(own) == len(dict(enumerate(whole.chunk(4))).get(rank, []))


def test_copies_of_the_model_are_counted_before_their_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, sharded = Mock(), Mock()
    monkeypatch.setattr("stateline.train.processes.init_device_mesh", mesh)
    monkeypatch.setattr("stateline.train.processes.shard", sharded)
    segment = Segment(LanguageModel(ModelConfig("lstm", 11, d_model=8)), torch.bfloat16)
    for shards in (2, 8):
        assert Processes(count=8).wrap(segment, shards) is segment
    assert [call.args for call in mesh.mock_calls] == [("cpu", (4, 2)), ("cpu", (8,))]
    sharded.assert_called_with(segment.model, mesh.return_value, torch.bfloat16)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """``torch.distributed`` with the other of two processes, and the store of torchrun."""
    mock, of_torchrun = Mock(), (dist.HashStore(), 0, 2)
    monkeypatch.setattr("stateline.train.processes.dist", mock)
    monkeypatch.setattr("stateline.train.processes.rendezvous", lambda _: iter([of_torchrun]))
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    mock.get_rank.return_value, mock.get_world_size.return_value = 0, 2
    return mock


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("error", ["out of memory", "[../third_party/gloo/transport/tcp] closed"])
def test_only_a_lost_connection_is_the_end_of_another_process(error: str) -> None:
    expected = RuntimeError if error == "out of memory" else InputError
    with pytest.raises(expected) as caught, join_processes("cpu"):
        raise RuntimeError(error)
    assert caught.type is expected


def test_processes_that_torchrun_starts_again_do_not_find_the_addresses_of_those_that_ended(
    started: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restarts in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        with join_processes("cpu"):
            store = started.init_process_group.call_args.kwargs["store"]
            assert not store.check(["address"])
            store.set("address", "localhost:1")


def test_each_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateline.train.processes.resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with (
        pytest.raises(InputError, match="a GPU for each process, and there are 1: start fewer"),
        join_processes("cuda"),
    ):
        pass
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_processes("cuda") as processes:
        assert processes.device == torch.device("cuda", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "muon", "pattern": "gated_delta_net moe"},
        # two experts: of one, the router has no gradient but roundings, which Adam makes large
        {"pattern": "h3 moe(experts=4, top_k=2, balance=0, correction=true, correction_rate=1)"},
        {"optimizer": "muon", "shard": 1},
        {"optimizer": "muon", "shard": 4},
        {"precision": "bfloat16"},
        {"examples": True, "segment_len": None},
        {"examples": True, "shard": 1, "eval_every": 3, "checkpoint_activations": True},
    ],
    ids=str,
)
def test_four_processes_with_two_sharded_copies_or_one_or_four_learn_what_one_learns(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    answers(tmp_path)
    assert forked("mesh", tmp_path, json.dumps(settings)) == [[0], [0, 0, 0, 0]]
    alone, mesh = (lines(tmp_path / name, "loss") for name in ("alone", "mesh"))
    assert len(alone) == 6
    # Muon multiplies in bfloat16: roundings of the gradient there are 2**-8 of the update
    rounded = {"optimizer", "precision"} & settings.keys()
    assert mesh == pytest.approx(alone, rel=2**-8 if rounded else 1e-5)
