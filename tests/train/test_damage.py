"""A damaged checkpoint is named before model, optimizer or metrics are touched."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stateline.errors import InputError
from stateline.files import sha256
from stateline.models.checkpoint import load_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Text
from stateline.train.config import TrainConfig
from stateline.train.folder import check_run_folder, found
from stateline.train.loop import train
from stateline.train.metrics import METRICS

Change = Callable[[dict[str, Any]], object]
MANIFEST = "manifest.json"


def run(text: Text, folder: Path, until: int = 99) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3 attention(position=rope)", vocab_size=256, d_model=8))
    config = TrainConfig(
        steps=8, eval_every=0, log_every=1, save_every=2, keep=3, carry_state=True, carry_cap=48
    )
    done = [int(path.name[5:]) for path in found(folder)]
    steps = iter(range(max(done, default=0) + 1, 100))
    train(model, text, config, folder=folder, interrupted=lambda: next(steps) >= until)
    return model


@pytest.fixture
def folder(text: Text, tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 2 and 4."""
    run(text, tmp_path, until=4)
    return tmp_path


def newest(folder: Path) -> Path:
    return found(folder)[-1]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def refused(text: Text, folder: Path) -> str:
    """The message of a run that cannot continue; nothing in the folder changes."""
    before, random = contents(folder), torch.get_rng_state()
    with pytest.raises(InputError) as caught:
        run(text, folder)
    assert contents(folder) == before
    assert "\n" not in str(caught.value)
    torch.set_rng_state(random)
    return str(caught.value)


def rehash(path: Path) -> None:
    """Write the manifest anew, as someone would who changes a checkpoint on purpose."""
    hashes = {f.name: sha256(f) for f in path.iterdir() if f.name != MANIFEST}
    (path / MANIFEST).write_text(json.dumps({"sha256": hashes}))


def tensors_changed(path: Path, name: str, change: Change) -> None:
    tensors = load_file(path / name)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / name)


def record_changed(path: Path, change: Change) -> None:
    record = json.loads((path / "training.json").read_text())
    change(record)
    (path / "training.json").write_text(json.dumps(record))


def first(tensors: dict[str, Tensor], ending: str) -> str:
    return next(
        name for name in sorted(tensors) if name.endswith(ending) and tensors[name].ndim > 1
    )


def put(ending: str, value: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        name = first(tensors, ending)
        tensors[name] = value(tensors[name])

    return change


def swapped(tensors: dict[str, Tensor]) -> None:
    """Two moments of different shapes change their names."""
    names = [name for name in tensors if name.endswith("exp_avg")]
    one = names[0]
    other = next(name for name in names if tensors[name].shape != tensors[one].shape)
    tensors[one], tensors[other] = tensors[other], tensors[one]


def without(ending: str) -> Change:
    return lambda tensors: tensors.pop(first(tensors, ending))


NAN = float("nan")
IN_TENSORS: list[tuple[Change, str]] = [
    (put("exp_avg", lambda t: t.flatten()), "its moments .* are torch.float32 of shape"),
    (put("exp_avg", lambda t: torch.cat([t, t])), "its moments .* are torch.float32 of shape"),
    (put("exp_avg", lambda t: t.double()), "its moments .* are torch.float64 of shape"),
    (swapped, "its moments .* of shape .*, not torch.float32 of shape"),
    (without("exp_avg"), "its moments lack"),
    (lambda t: t.update({"moments/x/step": torch.zeros(())}), "which the model does not have"),
    (lambda t: t.update({"strange": torch.zeros(2)}), "has 'strange', which no checkpoint has"),
    (lambda t: t.pop("random"), "'random' is missing"),
    (lambda t: t.update(random=t["random"].float()), "its random state 'random' are torch.float32"),
    (lambda t: t.update(random=t["random"][:-8]), "its random state 'random' are torch.uint8"),
    (lambda t: t.pop("carried/0"), "its carried state must have"),
    (lambda t: t.update({"carried/99": torch.zeros(4)}), "its carried state must have"),
    (lambda t: t.update({"carried/0": t["carried/0"].int()}), "of its carried state, its .* is"),
    (lambda t: t.update({"carried/0": t["carried/0"] - 99}), "of its carried state, its .* is neg"),
    (lambda t: t.update({"carried/0": t["carried/0"][:3]}), "of its carried state, .* has the sha"),
    (lambda t: t.update({"carried/1": t["carried/1"] * NAN}), "of its carried state, .* holds NaN"),
]


@pytest.mark.parametrize(("change", "message"), IN_TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    text: Text, folder: Path, change: Change, message: str
) -> None:
    tensors_changed(newest(folder), "training.safetensors", change)
    rehash(newest(folder))
    told = refused(text, folder)
    assert re.search(rf"step-00000004 is damaged: .*{message}", told)
    assert told.endswith("remove it to go on from step-00000002, which is whole")


def test_a_record_without_its_configuration_is_another_run(text: Text, folder: Path) -> None:
    record_changed(newest(folder), lambda record: record.update(train=None))
    rehash(newest(folder))
    assert "comes from a run with other " in refused(text, folder)


WEIGHTS: list[tuple[Change, str]] = [
    (put("weight", lambda t: t.half()), "its weights .* are torch.float16 of shape"),
    (put("weight", lambda t: t[:1]), "its weights .* are torch.float32 of shape"),
    (without("weight"), "its weights lack"),
]


@pytest.mark.parametrize(("change", "message"), WEIGHTS)
def test_weights_that_do_not_fit_are_refused(
    text: Text, folder: Path, change: Change, message: str
) -> None:
    tensors_changed(newest(folder), "model.safetensors", change)
    rehash(newest(folder))
    assert re.search(message, refused(text, folder))


def progress(**values: Any) -> Change:
    return lambda record: record["progress"].update(values)


RECORDS: list[tuple[Change, str]] = [
    (progress(steps=5), "its progress is of step 5"),
    (progress(more=1), "its progress is incomplete"),
    (lambda record: record.pop("progress"), "'progress' is missing"),
    (lambda record: record.pop("train"), "'train' is missing"),
    (lambda record: record.pop("environment"), "'environment' is missing"),
]


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(("change", "message"), RECORDS)
def test_a_record_that_does_not_fit_is_refused(
    text: Text, folder: Path, change: Change, message: str
) -> None:
    record_changed(newest(folder), change)
    rehash(newest(folder))
    assert message in refused(text, folder)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "hashes.json", "training.json", "training.safetensors"],
)
def test_a_file_with_one_bit_flipped_is_refused(text: Text, folder: Path, name: str) -> None:
    file = newest(folder) / name
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    told = refused(text, folder)
    assert f"step-00000004 is damaged: {name} is not as it was written" in told
    assert told.endswith("remove it to go on from step-00000002, which is whole")


def test_the_model_of_a_checkpoint_is_checked_where_the_files_of_training_are_gone(
    folder: Path,
) -> None:
    for file in (*newest(folder).glob("training*"), newest(folder) / MANIFEST):
        file.unlink()
    load_model(newest(folder))
    weights = newest(folder) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged or was changed"):
        load_model(newest(folder))


def test_if_no_checkpoint_is_whole_the_message_says_so(text: Text, folder: Path) -> None:
    for path in found(folder):
        (path / "training.safetensors").write_bytes(b"")
    assert refused(text, folder).endswith("no older one is whole: remove all to begin again")


@pytest.mark.parametrize("manifest", ["", "{}", '{"sha256": {}}', '{"sha256": 3}'])
def test_a_checkpoint_whose_files_are_not_listed_is_refused(
    text: Text, folder: Path, manifest: str
) -> None:
    (newest(folder) / MANIFEST).write_text(manifest)
    told = refused(text, folder)
    assert "step-00000004 is damaged: " in told
    assert told.endswith("remove it to go on from step-00000002, which is whole")


def test_a_checkpoint_that_is_a_pipe_is_refused(text: Text, folder: Path) -> None:
    (newest(folder) / "training.json").unlink()
    os.mkfifo(newest(folder) / "training.json")
    with pytest.raises(InputError, match=r"training.json: it is a pipe; give a regular file"):
        run(text, folder)


@pytest.mark.parametrize("name", [METRICS, "checkpoints"])
def test_a_folder_that_cannot_be_written_to_is_found_before_training(
    text: Text, tmp_path: Path, name: str
) -> None:
    place = tmp_path / name
    place.mkdir() if name == METRICS else place.write_text("")
    with pytest.raises(InputError, match="cannot write"):
        check_run_folder(tmp_path)
    with pytest.raises(InputError, match="cannot write"):
        run(text, tmp_path)


def test_checking_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    check_run_folder(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []
