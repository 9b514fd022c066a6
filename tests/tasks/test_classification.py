"""Tasks that classify sequences on disk, on small data written here; and on real ones, if any."""

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stateline.errors import InputError
from stateline.tasks import IGNORE, RowsTask, generator, make_task
from stateline.tasks.base import epoch_rows
from tests.tasks.small_data import (
    WRITERS,
    listops,
    sequential_image,
    spoken_digits,
    task_on,
    write_wave,
)


def make(name: str, folder: Path, **keywords: object) -> RowsTask:
    task = make_task(task_on(name, folder, **keywords))
    assert isinstance(task, RowsTask)
    return task


def classes(task: RowsTask) -> Any:
    return task.objective.describe()["classes"]


@pytest.fixture(params=sorted(WRITERS.keys() - {"signals"}))
def task(request: pytest.FixtureRequest, tmp_path: Path) -> RowsTask:
    return make(request.param, tmp_path)


def test_every_row_has_one_target_its_class_at_its_end(task: RowsTask) -> None:
    lengths = {len(row) for row in task.training_rows.inputs}
    for index in range(3):
        tokens, targets = task.train_batch(index)
        assert tokens.shape[:2] == targets.shape
        for row, expected in zip(tokens, targets, strict=True):
            (place,) = (expected != IGNORE).nonzero()[0].tolist()
            assert place + 1 in lengths
            assert not row[place + 1 :].any()  # filled up behind the target


def test_the_order_of_an_epoch_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order of ten million rows takes half a second."""
    drawn: list[tuple[Any, ...]] = []

    def counted(*key: Any) -> np.random.Generator:
        drawn.append(key)
        return generator(*key)

    monkeypatch.setattr("stateline.tasks.base.generator", counted)
    batches = [epoch_rows(7, 12345, 100, index) for index in (0, 1, 122, 123)]
    assert drawn == [(7, "train", 0), (7, "train", 1)]
    assert not set(batches[0]) & set(batches[1])


def test_an_epoch_trains_on_every_row_once(task: RowsTask) -> None:
    rows = task.training_rows
    batches = len(rows.inputs) // task.batch_size
    seen = [row.tobytes() for index in range(batches) for row in _rows(task, index)]
    assert len(seen) == batches * task.batch_size
    known = [row.tobytes() for row in rows.inputs]
    assert all(seen.count(row) <= known.count(row) for row in seen)


def _rows(task: RowsTask, index: int) -> list[np.ndarray]:
    tokens, targets = (tensor.numpy() for tensor in task.train_batch(index))
    ends = (targets != IGNORE).argmax(axis=1) + 1
    return [row[:end] for row, end in zip(tokens, ends, strict=True)]


def test_all_held_out_rows_are_scored_once(task: RowsTask) -> None:
    rows = task.held_out_rows
    classes = [
        target
        for _, targets in task.scored_batches()
        for target in targets[targets != IGNORE].tolist()
    ]
    assert sorted(classes) == sorted(rows.labels)


def test_no_row_is_trained_on_and_scored(task: RowsTask) -> None:
    if task.name == "listops":
        pytest.skip("its small files are all the same")
    training, scored = (
        {row.tobytes() for row in rows.inputs} for rows in (task.training_rows, task.held_out_rows)
    )
    assert not training & scored


def test_its_model_has_its_input_and_its_classes(task: RowsTask) -> None:
    config = task.model_config("s4d", {"d_model": 8, "pooling": None, "tie_embeddings": True})
    assert (config.n_channels == 0) == (config.vocab_size > 1)
    assert config.n_classes == len(classes(task))
    assert config.pooling == "mean"
    assert task.model_config("s4d", {"pooling": "last"}).pooling == "last"


def test_pooling_is_refused_where_nothing_is_classified() -> None:
    with pytest.raises(InputError, match="pooling is for tasks with one target per sequence"):
        make_task("copying").model_config("s4d", {"pooling": "mean"})


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_data_that_are_not_there_are_described(name: str, tmp_path: Path) -> None:
    for spec, got in [(name, "got no path"), (f'{name}(path="{tmp_path}/no")', "there is nothing")]:
        with pytest.raises(InputError, match=f"the task {name} reads .*{got}"):
            make_task(spec)


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_folder_of_something_else_is_described(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"the task {name} .* reads "):
        make_task(f'{name}(path="{tmp_path}")')


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs at least batch_size=99 rows to train on"):
        make("listops", tmp_path, batch_size=99)


def test_numbers_are_scaled_by_those_that_are_trained_on(tmp_path: Path) -> None:
    rows = make("sequential_image", tmp_path, frame=1).training_rows.inputs
    numbers = np.concatenate(rows)
    assert numbers.mean() == pytest.approx(0, abs=1e-6)
    assert numbers.std() == pytest.approx(1, abs=1e-6)


def test_a_frame_holds_so_many_numbers_in_their_order(tmp_path: Path) -> None:
    fine, coarse = (make("spoken_digits", tmp_path, frame=n) for n in (1, 4))
    assert coarse.n_channels == 4
    for one, other in zip(fine.held_out_rows.inputs, coarse.held_out_rows.inputs, strict=True):
        assert np.array_equal(one.ravel(), other.ravel()[: len(one)])
        assert not other.ravel()[len(one) :].any()
        assert len(other) == -(-len(one) // 4)


def test_a_frame_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wants frame to be int of at least 1, got 0"):
        make("spoken_digits", tmp_path, frame=0)


def test_digits_are_split_by_the_number_of_the_recording(tmp_path: Path) -> None:
    test, valid = (make("spoken_digits", tmp_path, held_out=name) for name in ("test", "valid"))
    assert len(test.training_rows.inputs) == 16  # numbers 5 and 10
    assert len(valid.training_rows.inputs) == 8  # number 10
    assert len(test.held_out_rows.inputs) == len(valid.held_out_rows.inputs) == 8
    assert classes(test) == tuple("0123456789")


def test_sound_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_wave(spoken_digits(tmp_path) / "recordings" / "1_ann_4.wav", np.arange(8), channels=2)
    with pytest.raises(InputError, match=r"cannot read .*1_ann_4.wav: it must have one channel"):
        make_task(f'spoken_digits(path="{tmp_path}", batch_size=4)')


@pytest.mark.parametrize("content", [b"", b"RIFF", b"no sound at all, but text of some length"])
def test_a_damaged_recording_is_named(tmp_path: Path, content: bytes) -> None:
    (spoken_digits(tmp_path) / "recordings" / "1_ann_4.wav").write_bytes(content)
    with pytest.raises(InputError, match=r"the task spoken_digits cannot read .*1_ann_4.wav"):
        make_task(f'spoken_digits(path="{tmp_path}", batch_size=4)')


def test_words_are_split_by_the_lists(tmp_path: Path) -> None:
    task = make("speech_commands", tmp_path)
    assert classes(task) == ("go", "up")
    assert [len(task.training_rows.inputs), len(task.held_out_rows.inputs)] == [8, 2]


def test_an_index_serves_for_the_lists(tmp_path: Path) -> None:
    lists = make("speech_commands", tmp_path)
    folder = tmp_path / "speech_commands"
    files = [file.relative_to(folder).as_posix() for file in folder.glob("[!_]*/*.wav")]
    split = {"4": "valid", "5": "test"}
    with (folder / "index.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "split"])
        writer.writerows([name, split.get(Path(name).stem, "train")] for name in files)
    for name in ("validation_list.txt", "testing_list.txt"):
        (folder / name).unlink()
    index = make_task(f'speech_commands(path="{folder}", batch_size=4)')
    assert index.describe() == lists.describe()


def test_segments_are_split_by_number(tmp_path: Path) -> None:
    assert len(make("eeg", tmp_path).held_out_rows.inputs) == 5
    assert len(make("eeg", tmp_path, held_out_from=2).held_out_rows.inputs) == 10


def test_seizures_are_one_class_of_two(tmp_path: Path) -> None:
    task = make("eeg", tmp_path, target="seizure")
    assert classes(task) == ("no seizure", "seizure")
    assert sum(task.held_out_rows.labels) == 1


def test_a_segment_with_a_sample_that_is_no_number_is_named(tmp_path: Path) -> None:
    task = task_on("eeg", tmp_path)
    (tmp_path / "eeg" / "S" / "S002.txt").write_text("1\nnan\n3\n")
    with pytest.raises(InputError, match=r"cannot read .*S002.txt: .* not a finite number"):
        make_task(task)


def test_expressions_lose_their_parentheses(tmp_path: Path) -> None:
    task = make("listops", tmp_path)
    assert task.held_out_rows.inputs[7].tolist() == [11, 7, 3, 14]  # [MAX 7 3 ]
    assert task.held_out_rows.labels[7] == 7


def test_an_unknown_word_of_an_expression_is_named(tmp_path: Path) -> None:
    (listops(tmp_path) / "basic_val.tsv").write_text("Source\tTarget\n( [AVG 1 ) ]\t1\n")
    with pytest.raises(InputError, match=r"cannot read .*basic_val.tsv: '\[AVG'"):
        make_task(f'listops(path="{tmp_path}", batch_size=4, held_out=valid)')


def test_texts_are_split_by_fold_and_cut(tmp_path: Path) -> None:
    task = make("byte_text", tmp_path, max_len=10)
    assert [len(task.training_rows.inputs), len(task.held_out_rows.inputs)] == [12, 4]
    assert task.train_length == 10
    assert bytes(task.held_out_rows.inputs[0].tolist()) == b"badbadbadb"


def test_a_table_has_its_own_split(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text('label,text,is_valid\nneg,"no, never",False\npos,yes,False\npos,yes!,True\n')
    task = make_task(f'byte_text(path="{path}", batch_size=2, held_out=valid)')
    assert isinstance(task, RowsTask)
    assert [bytes(row.tolist()) for row in task.training_rows.inputs] == [b"no, never", b"yes"]
    assert task.held_out_rows.labels == [1]


def test_the_reviews_lie_in_folders(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            (tmp_path / split / label).mkdir(parents=True)
            (tmp_path / split / label / "0_1.txt").write_text(f"{split} {label}")
    task = make_task(f'byte_text(path="{tmp_path}", batch_size=2)')
    assert isinstance(task, RowsTask)
    assert bytes(task.held_out_rows.inputs[1].tolist()) == b"test pos"
    assert classes(task) == ("neg", "pos")


def test_images_are_read_row_by_row(tmp_path: Path) -> None:
    task = make("sequential_image", tmp_path)
    first = task.held_out_rows.inputs[0][:, 0]
    assert len(first) == 6
    assert np.allclose(np.diff(first), np.diff(first)[0])  # as written: 2 more at each pixel


def test_without_training_images_the_test_is_split(tmp_path: Path) -> None:
    task = make("sequential_image", tmp_path)
    assert [len(task.training_rows.inputs), len(task.held_out_rows.inputs)] == [16, 2]


def test_with_training_images_the_test_is_whole(tmp_path: Path) -> None:
    sequential_image(tmp_path / "sequential_image", "train", 24)
    task = make("sequential_image", tmp_path)
    assert [len(task.training_rows.inputs), len(task.held_out_rows.inputs)] == [22, 20]


def test_permuted_pixels_are_the_same_pixels_in_one_order_for_all(tmp_path: Path) -> None:
    plain, permuted = (
        make("sequential_image", tmp_path, permuted=word).held_out_rows.inputs
        for word in ("false", "true")
    )
    orders = [
        [one.tolist().index(value) for value in two.tolist()]
        for one, two in zip(plain, permuted, strict=True)
    ]
    assert orders[0] == orders[1] != sorted(orders[0])
    assert sorted(orders[0]) == list(range(6))


def test_the_order_of_pixels_is_the_same_for_all_seeds(tmp_path: Path) -> None:
    spec = task_on("sequential_image", tmp_path, permuted="true")
    hashes = [make_task(spec, seed=seed).describe()["sha256"] for seed in (0, 1, 2)]
    assert len(set(hashes)) == 1


def test_images_and_classes_of_two_numbers_are_refused(tmp_path: Path) -> None:
    folder = sequential_image(tmp_path, count=8)
    short = sequential_image(tmp_path / "short", count=7)
    shutil.copy(short / "t10k-labels-idx1-ubyte.gz", folder)
    with pytest.raises(InputError, match="the images and the classes of t10k are not of one"):
        make_task(f'sequential_image(path="{folder}")')


def test_records_of_cifar_are_a_class_and_the_pixels(tmp_path: Path) -> None:
    for name, count in {"train": 6, "valid": 2, "test": 3}.items():
        records = np.zeros((count, 1025), np.uint8)
        records[:, 0], records[:, 1:] = np.arange(count), np.arange(1024) % 251
        (tmp_path / f"{name}_gray.bin").write_bytes(records.tobytes())
    task = make_task(f'sequential_image(path="{tmp_path}", batch_size=4)')
    assert isinstance(task, RowsTask)
    assert task.held_out_rows.labels == [0, 1, 2]
    assert task.train_length == 1024
    assert classes(task)[8] == "ship"


def test_other_data_have_another_fingerprint(tmp_path: Path) -> None:
    first = make("listops", tmp_path).describe()["sha256"]
    file = tmp_path / "listops" / "basic_train.tsv"
    changed = file.read_text().replace("\t9", "\t8")
    file.write_text(changed)
    again = make_task(f'listops(path="{tmp_path}/listops", batch_size=4)')
    assert again.describe()["sha256"] != first


REAL = {
    "spoken_digits": ("audio/fsdd", 1800, 200),
    "eeg": ("eeg/bonn", 340, 85),
    "listops": ("lra/listops-1000", 600, 100),
    "sequential_image": ("lra/cifar10-gray", 3000, 500),
}


@pytest.mark.parametrize("name", REAL)
def test_real_data_are_read_whole(data: Path, name: str) -> None:
    place, training, held_out = REAL[name]
    if not (data / place).exists():
        pytest.skip(f"no {place} in {data}")
    task = make_task(f'{name}(path="{data / place}")')
    assert isinstance(task, RowsTask)
    assert [len(task.training_rows.inputs), len(task.held_out_rows.inputs)] == [training, held_out]
