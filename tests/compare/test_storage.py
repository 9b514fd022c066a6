"""Results in a storage: which files are copied, when, and what a lost writer leaves."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stateline.compare.storage import Mirror, results_folder
from stateline.errors import InputError
from stateline.files import sha256
from stateline.train.folder import MANIFEST

pytest.importorskip("fsspec")

FILES = "config.json", "model.safetensors", "training.safetensors", "training.json"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/storage"


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step-{step:08}"
    path.mkdir(parents=True)
    for name in FILES:
        if name.endswith(".json"):
            (path / name).write_text("{}")
        else:
            save_file({"x": torch.zeros(1)}, path / name)
    hashes = {file.name: sha256(file) for file in path.iterdir()}
    (path / MANIFEST).write_text(json.dumps({"sha256": hashes}))
    return path


def test_what_is_written_comes_back_elsewhere(tmp_path: Path, url: str) -> None:
    (tmp_path / "one").mkdir()
    checkpoint(tmp_path / "one", 10)
    (tmp_path / "one" / "result.json").write_text("{}")
    Mirror(url, tmp_path / "one").push()
    Mirror(url, tmp_path / "two").fetch()
    for name in ("result.json", "checkpoints/step-00000010/config.json"):
        read, written = (tmp_path / place / name for place in ("two", "one"))
        assert read.read_text() == written.read_text()


def test_what_is_removed_here_is_removed_there(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url, tmp_path / "one")
    old = checkpoint(tmp_path / "one", 10)
    mirror.push()
    for file in old.iterdir():
        file.unlink()
    checkpoint(tmp_path / "one", 20)
    mirror.push()
    Mirror(url, tmp_path / "two").fetch()
    names = [path.name for path in (tmp_path / "two" / "checkpoints").iterdir()]
    assert names == ["step-00000020"]


def test_only_changed_files_are_copied_and_the_results_last(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copied = tmp_path / "one", list[str]()
    mirror = Mirror(url, folder)
    put = mirror.storage.put_file
    monkeypatch.setattr(
        mirror.storage, "put_file", lambda path, to: (copied.append(Path(path).name), put(path, to))
    )
    checkpoint(folder, 10)
    (folder / "result.json").write_text("{}")
    (folder / ".draft").write_text("not yet")
    mirror.push()
    assert sorted(copied[:-2]) == sorted(FILES)
    assert copied[-2:] == ["manifest.json", "result.json"]
    copied.clear()
    mirror.push()
    assert copied == []
    (folder / "result.json").write_text("{} ")
    mirror.push()
    assert copied == ["result.json"]


@pytest.mark.parametrize("missing", ["manifest.json", "config.json"])
def test_half_of_a_checkpoint_is_left_out(tmp_path: Path, url: str, missing: str) -> None:
    checkpoint(tmp_path / "storage", 10)
    (checkpoint(tmp_path / "storage", 20) / missing).unlink()
    Mirror(url, tmp_path / "two").fetch()
    names = [path.name for path in (tmp_path / "two" / "checkpoints").iterdir()]
    assert names == ["step-00000010"]


def test_a_folder_is_used_where_it_is(tmp_path: Path) -> None:
    with results_folder(str(tmp_path)) as place:
        assert place == (tmp_path, None)


def test_results_are_saved_even_if_the_work_fails(tmp_path: Path, url: str) -> None:
    def stopped() -> None:
        with results_folder(url) as (folder, _):
            (folder / "results.json").write_text(json.dumps([1]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with results_folder(url) as (folder, _):
        assert json.loads((folder / "results.json").read_text()) == [1]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nothing://bucket", "cannot use nothing://bucket: .*; give another place"),
        ("file:///proc/none", "cannot use file:///proc/none: .*; give another place"),
    ],
)
def test_a_storage_that_cannot_be_used_is_named(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=message):
        Mirror(place, tmp_path).push()
