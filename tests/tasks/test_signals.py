"""Tasks on files of the user's own: layouts, targets, splits, and what is refused."""

import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stateline import InputError, TrainConfig
from stateline.evaluate import evaluate
from stateline.models.factory import make_model
from stateline.tasks import Signals, make_task
from stateline.tasks.objective import Classes, Values
from stateline.train.loop import train

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 9, 2)).astype(np.float32)
LABELS = np.array(["up", "down", "up"] * 4)
LEVELS = X.mean(axis=1) * 100 + 7


def write_csv(path: Path, columns: dict[str, object]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write_columns(path: Path, columns: dict[str, Any]) -> None:
    if path.suffix == ".csv":
        write_csv(path, columns)
        return
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table(columns), path)


def write_sequence(path: Path, x: np.ndarray) -> str:
    """One sequence in the format of the path's ending."""
    if path.suffix == ".npy":
        np.save(path, x)
    elif path.suffix == ".npz":
        np.savez(path, x=x)
    elif path.suffix == ".csv":
        write_csv(path, {"a": x[:, 0], "b": x[:, 1]})
    else:
        pa = pytest.importorskip("pyarrow")
        pa.parquet = pytest.importorskip("pyarrow.parquet")
        pa.parquet.write_table(pa.table({"a": x[:, 0], "b": x[:, 1]}), path)
    return path.name


def labelled_files(folder: Path, suffix: str, **columns: object) -> Path:
    names = [write_sequence(folder / f"{row}{suffix}", x) for row, x in enumerate(X)]
    write_csv(folder / "labels.csv", {"file": names, **columns})
    return folder


def class_folders(folder: Path, suffix: str) -> Path:
    for row, (x, label) in enumerate(zip(X, LABELS, strict=True)):
        (folder / label).mkdir(exist_ok=True)
        write_sequence(folder / label / f"{row}{suffix}", x)
    return folder


def raw(task: Signals) -> np.ndarray:
    """All inputs, sorted, as they were before normalisation, which was switched off."""
    rows = [*task.training_rows.inputs, *task.held_out_rows.inputs]
    return np.sort(np.stack(rows), axis=0)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".csv", ".parquet"])
@pytest.mark.parametrize("layout", ["table", "folders"])
def test_a_file_per_sequence_is_read_in_every_format(
    tmp_path: Path, suffix: str, layout: str
) -> None:
    if layout == "table":
        labelled_files(tmp_path, suffix, label=LABELS)
    else:
        class_folders(tmp_path, suffix)
    task = Signals(path=str(tmp_path), normalise=False, batch_size=4)
    assert isinstance(task.objective, Classes)
    assert task.objective.names == ("down", "up")
    np.testing.assert_array_equal(raw(task), np.sort(X, axis=0))
    for x, label in zip(*task.training_rows, strict=True):
        row = next(n for n in range(12) if np.array_equal(X[n], x))
        assert task.objective.names[label] == LABELS[row]


def test_one_npz_file_holds_all_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=X, y=LEVELS)
    task = Signals(path=str(tmp_path / "all.npz"), loss="l2", normalise=False, batch_size=4)
    assert (task.n_channels, task.train_length, task.metric) == (2, 9, "l2")
    np.testing.assert_array_equal(raw(task), np.sort(X, axis=0))
    tokens, targets = task.train_batch(0)
    assert tokens.shape == (4, 9, 2)
    assert targets.shape == (4, 9, 2)
    assert targets[:, :-1].isnan().all()
    torch.testing.assert_close(targets[:, -1], tokens.mean(dim=1) * 100 + 7, rtol=0, atol=1e-4)


def test_one_csv_file_has_a_position_per_column(tmp_path: Path) -> None:
    columns: dict[str, object] = {f"t{place}": X[:, place, 0] for place in range(9)}
    write_csv(tmp_path / "all.csv", {**columns, "label": LABELS, "id": range(12)})
    names = ",".join(columns)
    task = Signals(path=str(tmp_path / "all.csv"), columns=names, normalise=False, batch_size=4)
    np.testing.assert_array_equal(raw(task), np.sort(X[:, :, :1], axis=0))


def test_one_parquet_file_has_a_channel_per_list(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"a": X[:, :, 0].tolist(), "b": X[:, :, 1].tolist(), "label": LABELS}
    parquet.write_table(pa.table(table), tmp_path / "all.parquet")
    task = Signals(path=str(tmp_path / "all.parquet"), normalise=False, batch_size=4)
    np.testing.assert_array_equal(raw(task), np.sort(X, axis=0))


def test_the_next_input_is_the_target(tmp_path: Path) -> None:
    np.save(tmp_path / "all.npy", X)
    spec = f"signals(path={tmp_path / 'all.npy'}, target=next, loss=l1, batch_size=4)"
    task = make_task(spec)
    assert isinstance(task, Signals)
    tokens, targets = task.train_batch(0)
    torch.testing.assert_close(targets[:, :-1], tokens[:, 1:], rtol=0, atol=0.2)
    assert not targets.isnan().any()
    config = task.model_config("s4d", {"d_model": 8})
    assert (config.n_outputs, getattr(config, "pooling", "")) == (2, "last")


def test_a_target_at_every_position_stands_in_the_file(tmp_path: Path) -> None:
    for row, x in enumerate(X):
        write_csv(
            tmp_path / f"{row}.csv", {"a": x[:, 0], "level": x[:, 1], "phase": np.arange(9) % 3}
        )
    values = Signals(path=str(tmp_path), target="level", loss="l2", columns="a", batch_size=4)
    assert isinstance(values.objective, Values)
    assert values.train_batch(0).targets.shape == (4, 9, 1)
    classes = Signals(path=str(tmp_path), target="phase", columns="a,level", batch_size=4)
    assert classes.train_batch(0).targets.tolist() == [[0, 1, 2] * 3] * 4


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
@pytest.mark.parametrize(
    ("first", "step"),
    [(1_700_000_000, 1), (1_700_000_000_000_000_000, 1), (1_700_000_000.0, 1e-3), (101_325, 0.01)],
)
def test_numbers_keep_their_digits_until_they_are_normalised(
    tmp_path: Path, suffix: str, first: float, step: float
) -> None:
    """Timestamps in seconds and nanoseconds, and pressures: inputs and targets."""
    places = np.random.default_rng(0).permutation(64)
    x = first + step * places.reshape(8, 8)
    y = first + step * np.arange(8)
    path = tmp_path / f"all{suffix}"
    if suffix == ".npz":
        np.savez(path, x=x, y=y)
    else:
        columns = {f"t{place}": x[:, place].tolist() for place in range(8)}
        write_csv(path, {**columns, "label": y.tolist()})
    task = Signals(path=str(path), loss="l1", batch_size=4)
    rows = [*zip(task.training_rows.inputs, task.training_rows.labels, strict=True)]
    rows += zip(task.held_out_rows.inputs, task.held_out_rows.labels, strict=True)
    inputs = np.concatenate([x for x, _ in rows]).ravel()
    assert len(np.unique(inputs)) == 64
    assert len(np.unique([label for _, label in rows])) == 8
    spread = inputs[np.argsort(inputs)]
    np.testing.assert_allclose(np.diff(spread), np.ptp(inputs) / 63, rtol=1e-3)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("layout", ["channels", "targets", "files"])
def test_whole_numbers_beside_others_are_not_rounded(
    tmp_path: Path, layout: str, suffix: str
) -> None:
    """Nanoseconds beside fractions: as channels, as targets, or in another file."""
    first, steps = 1_700_000_000_000_000_000, np.random.default_rng(0).permutation(64)
    for row, own in enumerate(steps.reshape(8, 8).tolist()):
        times = [first + step for step in own]
        if layout == "files" and row == 0:
            times = [first + step / 1024 for step in own]  # float64, which has 256 of them
        write_columns(tmp_path / f"{row}{suffix}", {"time": times, "level": np.arange(8) / 7})
    named = {"target": "time,level", "columns": "level"} if layout == "targets" else {}
    task = Signals(path=str(tmp_path), loss="l1", batch_size=2, **({"target": "next"} | named))
    parts = task.training_rows, task.held_out_rows
    rows = [row for part in parts for row in (part.labels if named else part.inputs)]
    found = np.unique(np.concatenate(rows)[:, 0].astype(np.float64))
    known = {step for own in steps.reshape(8, 8) for step in own[: 8 if named else 7]}
    if layout == "files":
        known = {0} | {step for own in steps.reshape(8, 8)[1:] for step in own[:7]}
    wanted = np.array(sorted(known)) / np.ptp([*known])
    np.testing.assert_allclose((found - found[0]) / np.ptp(found), wanted, atol=1e-6)


@pytest.mark.parametrize("which", ["x", "y"])
@pytest.mark.parametrize(("first", "step"), [(1_700_000_000, 1), (2**24, 1), (101_325, 0.01)])
def test_numbers_that_float32_would_round_are_normalised_or_refused(
    tmp_path: Path, which: str, first: float, step: float
) -> None:
    data = {"x": np.arange(64.0).reshape(8, 8), "y": np.arange(8.0)}
    np.savez(tmp_path / "all.npz", **data | {which: first + step * data[which]})
    given: dict[str, Any] = {"path": str(tmp_path / "all.npz"), "loss": "l1", "batch_size": 2}
    Signals(**given)
    with pytest.raises(InputError, match=r"needs more digits than float32 has.*: normalise"):
        Signals(**given, normalise=False)


@pytest.mark.parametrize("layout", ["folders", "files", "column"])
def test_the_split_of_the_data_is_kept(tmp_path: Path, layout: str) -> None:
    rows = {"train": slice(0, 7), "valid": slice(7, 9), "test": slice(9, 12)}
    if layout == "column":
        split = np.repeat(["train", "valid", "test"], [7, 2, 3])
        labelled_files(tmp_path, ".npy", label=LABELS, split=split)
    for part, which in rows.items():
        if layout == "files":
            np.savez(tmp_path / f"{part}.npz", x=X[which], y=LABELS[which])
        elif layout == "folders":
            (tmp_path / part).mkdir()
            names = [
                write_sequence(tmp_path / part / f"{row}.npy", X[row]) for row in range(12)[which]
            ]
            write_csv(tmp_path / part / "labels.csv", {"file": names, "label": LABELS[which]})
    for held_out in ("valid", "test"):
        task = Signals(path=str(tmp_path), held_out=held_out, normalise=False, batch_size=4)
        np.testing.assert_array_equal(np.stack(task.training_rows.inputs), X[:7])
        np.testing.assert_array_equal(np.stack(task.held_out_rows.inputs), X[rows[held_out]])


def test_a_share_is_held_out_by_name_and_not_by_order(tmp_path: Path) -> None:
    labelled_files(tmp_path, ".npy", label=LABELS)
    before = Signals(path=str(tmp_path), normalise=False, batch_size=2, share=0.4)
    table = tmp_path / "labels.csv"
    header, *lines = table.read_text().splitlines()
    table.write_text("\n".join([header, *lines[::-1]]) + "\n")
    after = Signals(path=str(tmp_path), normalise=False, batch_size=2, share=0.4)
    kept = {row.tobytes() for row in before.held_out_rows.inputs}
    assert kept == {row.tobytes() for row in after.held_out_rows.inputs}
    assert 1 <= len(kept) < 12


def test_inputs_and_values_are_normalised_by_the_training_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=X * 50 + 3, y=LEVELS)
    task = Signals(path=str(tmp_path / "all.npz"), loss="l2", batch_size=4)
    inputs = np.concatenate(task.training_rows.inputs)
    values = np.stack(task.training_rows.labels)
    for numbers in (inputs, values):
        np.testing.assert_allclose(numbers.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(numbers.std(axis=0), 1, atol=1e-5)


@pytest.mark.parametrize("loss", ["l1", "l2"])
def test_scores_are_those_of_the_formulas_in_the_original_unit(tmp_path: Path, loss: str) -> None:
    np.savez(tmp_path / "all.npz", x=X, y=LEVELS)
    task = make_task(f"signals(path={tmp_path / 'all.npz'}, loss={loss}, batch_size=2, share=0.5)")
    assert isinstance(task, Signals)
    assert isinstance(task.objective, Values)
    model = make_model(task.model_config("h3", {"d_model": 8}))
    scores = evaluate(model, task, 9)
    mean, deviation = task.objective.mean.numpy(), task.objective.deviation.numpy()
    model.eval()
    with torch.no_grad():
        x = torch.from_numpy(np.stack(task.held_out_rows.inputs))
        predicted = model(x)[:, -1].double().numpy() * deviation + mean
    true = np.stack(task.held_out_rows.labels).astype(np.float64) * deviation + mean
    error = predicted - true
    r2 = 1 - (error**2).sum(axis=0) / ((true - true.mean(axis=0)) ** 2).sum(axis=0)
    assert scores["l1"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert scores["l2"] == pytest.approx((error**2).mean(), rel=1e-5)
    assert scores["r2"] == pytest.approx(r2.mean(), rel=1e-4)
    assert (task.metric, task.higher_is_better) == (loss, False)


@pytest.mark.parametrize("loss", ["l1", "l2"])
def test_the_loss_is_over_targets_that_are_there(loss: str) -> None:
    values = Values(loss, np.zeros(1), np.ones(1), each=True)  # type: ignore[arg-type]
    targets = torch.tensor([[[1.0], [float("nan")], [-2.0]]])
    outputs = torch.zeros(1, 3, 1, requires_grad=True)
    found = values.loss(outputs, targets)
    found.backward()
    assert found.item() == (3.0 if loss == "l1" else 5.0)
    assert outputs.grad is not None
    assert outputs.grad[0, 1, 0] == 0
    assert values.asked(targets).sum() == 2


def test_a_model_learns_values(tmp_path: Path) -> None:
    x = np.repeat(np.linspace(-1, 1, 24)[:, None], 6, axis=1)
    np.savez(tmp_path / "all.npz", x=x, y=5 * x[:, 0] + 2)
    task = make_task(f"signals(path={tmp_path / 'all.npz'}, loss=l2, batch_size=8)")
    torch.manual_seed(0)
    model = make_model(task.model_config("s4d", {"d_model": 8}))
    before = evaluate(model, task, 6)["l2"]
    train(model, task, TrainConfig(steps=40, lr=1e-2))
    assert evaluate(model, task, 6)["l2"] < before / 4


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "0.npy")


def array(**arrays: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: np.savez(folder / "train.npz", **arrays)  # type: ignore[arg-type]


def text(name: str, contents: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(contents)


def objects(folder: Path) -> None:
    np.save(folder / "train.npy", np.array([{}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("write", "keywords", "message"),
    [
        (lambda _: None, "", "at least two sequences, got 0"),
        (array(x=X), "", "train.npz: it must have an array 'y', got x"),
        (array(x=X * np.nan, y=LABELS), "", r"train.npz: x must be finite, got nan at \[0, 0, 0\]"),
        (array(x=X, y=LABELS[:3]), "", "x, y and split must have as many rows"),
        (array(x=X, y=LABELS), "loss=l2", "must be numbers for the loss l1 or l2, got 'up'"),
        (array(x=X, y=LEVELS[:, 0]), "", "must be a class, got .*: for values give loss=l1"),
        (array(x=X, y=np.zeros(12, int)), "", "at least two classes, got 0"),
        (array(x=X, y=LABELS), "", "at least batch_size=16 rows to train on and 1 to score"),
        (array(x=LABELS, y=LABELS), "", "must hold real numbers, got an array of <U4"),
        (array(x=X.astype(complex), y=LABELS), "", "must hold real numbers"),
        (objects, "target=next", "cannot read .*: train.npy: "),
        (text("train.npy", "no array"), "target=next", "train.npy: "),
        (text("train.npz", "no archive"), "", "train.npz: it is not an .npz file"),
        (text("train.parquet", "no table"), "", "train.parquet: it is not a Parquet file"),
        (text("train.csv", "a,b,label\n1,2,x\n3,4\n"), "", "row 3 has 2 values, and the header 3"),
        (text("train.csv", "a,a,label\n1,2,x\n"), "", "a different name for each column"),
        (text("train.csv", "a,label\n1,x\nb,y\n"), "", "is not a number: 'b'"),
        (text("train.csv", "a,label\n1,x\ninf,y\n"), "", "must be finite"),
        (text("train.csv", "a,label\n1,x\n2,\n"), "", "row 2 has no label"),
        (text("train.csv", "a,b\n1,x\n"), "", "must have a column 'label', got a, b"),
        (text("train.csv", "a,label\n1,x\n"), "columns=c", "must have a column 'c', got a, label"),
        (text("train.csv", ""), "", "must have a column 'label', got none"),
        (text("train.csv", "\udcff"), "", "cannot read"),
        (text("labels.csv", "name,label\na,b\n"), "", "labels.csv must have a column 'file'"),
        (text("labels.csv", "file,label\nx.npy,b\n"), "", "'x.npy' must be a regular file in the"),
        (
            text("labels.csv", "file,label\n../x.npy,b\n"),
            "",
            "must be a regular file in the folder",
        ),
        (text("labels.csv", "file,label,split\n,b,\n"), "", "must be a regular file in the folder"),
        (fifo, "target=next", "at least two sequences, got 0"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_training(
    tmp_path: Path, write: Callable[[Path], object], keywords: str, message: str
) -> None:
    try:
        write(tmp_path)
    except UnicodeEncodeError:
        (tmp_path / "train.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=message) as caught:
        make_task(f"signals(path={tmp_path}{', ' + keywords if keywords else ''})")
    assert "\n" not in str(caught.value)
    assert "signals" in str(caught.value)


@pytest.mark.parametrize("path", ["nowhere", "~nobody-has-this-name/x", "a\0b", "x" * 300, "loop"])
def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="the task signals reads sequences in"):
        Signals(path=path if path[0] == "~" else f"{tmp_path}/{path}")


def test_a_device_is_no_data() -> None:
    with pytest.raises(InputError, match="it is not a regular file"):
        Signals(path="/dev/zero")


def test_sequences_must_have_as_many_channels(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    np.save(tmp_path / "b.npy", np.zeros((3, 1)))
    with pytest.raises(InputError, match=r"number of channels, got 2 in .*a.npy and 1 in .*b.npy"):
        Signals(path=str(tmp_path), target="next", loss="l2")


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "all.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"pip install 'stateline\[data\]'"):
        Signals(path=str(tmp_path / "all.parquet"))
