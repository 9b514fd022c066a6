"""Layers and tasks outside the package: importing them, registering them, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from stateline import (
    LAYERS,
    TASKS,
    WRAPPERS,
    InputError,
    SequenceLayer,
    make_task,
    plugins,
    register_layer,
    register_task,
)
from stateline.cli import main
from stateline.layers import H3, Ladder
from stateline.plugins import import_code, imported
from stateline.runs.folder import check_imports
from stateline.tasks import Copying

LAYER = """
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stateline import SequenceLayer, register_layer


class MeanState(NamedTuple):
    mean: Tensor


class Mean(SequenceLayer[MeanState]):
    def __init__(self, d_model: int, *, keep: float = 0.5) -> None:
        super().__init__(d_model)
        self.keep, self.out_proj = keep, nn.Linear(d_model, d_model)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> MeanState:
        return MeanState(self.out_proj.weight.new_zeros(batch_size, self.d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_chunk(x, self.init_state(len(x)))[0]

    def forward_chunk(self, x: Tensor, state: MeanState) -> tuple[Tensor, MeanState]:
        mean, means = state.mean, []
        for t in range(x.shape[1]):
            mean = torch.lerp(x[:, t], mean, self.keep)
            means.append(mean)
        return self.out_proj(torch.stack(means, dim=1)), MeanState(mean)


register_layer("user_mean", Mean)
"""


@contextmanager
def a_folder(folder: Path) -> Iterator[None]:
    """A folder of the user's own; what is registered or imported in it is gone afterwards."""
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for table in (LAYERS, TASKS, WRAPPERS):
            patch.setattr(table, "_classes", dict(table._classes))
        patch.setattr(plugins, "_imported", {})
        patch.setattr(sys, "path", list(sys.path))
        patch.chdir(folder)
        yield
    for name in set(sys.modules) - modules:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def restored(tmp_path: Path) -> Iterator[None]:
    with a_folder(tmp_path):
        yield


@pytest.fixture
def layers_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_layers.py"
    file.write_text(LAYER)
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that needs a layer of a file, and the file."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "my_layers.py").write_text(LAYER)
    task = "copying(n_letters=3, max_len=3, context_len=12, batch_size=2)"
    training = ["--task", task, "--train.steps", "1", "--model.d_model", "4"]
    with a_folder(folder):
        own = ["--import", "my_layers.py", "--out", "run"]
        assert main(["train", "user_mean", *training, *own]) == 0
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "check user_mean --d_model 4",
        "info user_mean(keep=0.25)*2",
        "info ladder(user_mean)",
        "train user_mean --task copying --train.steps 1 --dry_run",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_layer_of_a_file_has_a_name_in_every_command(
    layers_file: Path, command: str, first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    given, own = command.split(), ["--import", layers_file.name]
    assert main([*own, *given] if first else [*given, *own]) == 0
    assert imported() == (str(layers_file),)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command",
    [
        "generate {} --prompt 1 --max_new_tokens 1",
        "evaluate {} my_layers.py",
        "evaluate {} --tasks boolq",
        "probe {}",
        "export {} new",
        "check {}",
        "capacity {} --batches 1 --length 2",
        "convert {} new",
    ],
)
@pytest.mark.parametrize("place", ["run", "run/checkpoints/step-00000001"])
def test_a_run_that_needs_own_code_names_it_and_never_imports_it(
    trained: Path,
    command: str,
    place: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(trained)
    given = command.format(place).split()
    assert main(given) == 2
    line = f"the model in {place} needs your own code: add --import {trained / 'my_layers.py'}"
    assert capsys.readouterr().err == f"stateline: error: {line}\n"
    assert imported() == ()


def test_the_code_of_a_run_may_have_moved(layers_file: Path) -> None:
    Path("imports.json").write_text(f'["/gone/{layers_file.name}"]')
    with pytest.raises(InputError, match=f"add --import /gone/{layers_file.name}$"):
        check_imports(Path())
    import_code(str(layers_file))
    check_imports(Path())


@pytest.mark.slow
def test_workers_import_the_users_code_and_the_results_record_it(layers_file: Path) -> None:
    start = "import sys; from stateline.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "compare", "user_mean*2", "h3*2"]
    command += ["--import", layers_file.name, "--tasks", "copying", "--steps", "20"]
    command += ["--protocol", "quick"]
    done = subprocess.run([*command, "--workers", "2"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(Path("runs/compare/results.json").read_text())
    assert results["command"].startswith(f"stateline --import {layers_file} compare 'user_mean*2'")
    assert [run["imports"] for run in results["runs"]] == [[str(layers_file)]] * 2
    assert [run["stopped"] for run in results["runs"]] == ["finished"] * 2


def test_a_recipe_names_the_code_that_it_needs(
    layers_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(
        f"import: [{layers_file.name}]\npattern: user_mean\ntask: copying\n"
    )
    assert main(["train", "recipe.yaml", "--dry_run"]) == 0
    assert "user_mean on copying" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "check", "data", "report"])
def test_help_shows_the_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--import FILE_OR_MODULE" in capsys.readouterr().out


def test_a_file_is_imported_once_and_finds_the_files_beside_it(layers_file: Path) -> None:
    Path("second.py").write_text("import my_layers\n")
    module = import_code("second.py")
    assert module.my_layers is import_code(str(layers_file)) is import_code("my_layers")
    assert "user_mean" in LAYERS


def test_a_file_named_as_a_module_of_python_hides_nothing(tmp_path: Path) -> None:
    import json

    (tmp_path / "json.py").write_text("MINE = True\n")
    assert import_code("json.py").MINE
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1 +", r"cannot import own.py: .*own.py:1: SyntaxError: invalid syntax"),
        ("\ndef f():\n    1 / 0\nf()", r"own.py:3: ZeroDivisionError: division by zero"),
        ("import nowhere_at_all", r"own.py:1: ModuleNotFoundError: No module named 'nowhere_at"),
        ("raise ValueError('two\\nlines')", r"own.py:1: ValueError: two lines"),
        ("raise SystemExit(3)", r"own.py:1: SystemExit: 3"),
        (
            "from stateline import register_layer\nregister_layer('h3', int)",
            r"own.py:2: the name 'h3' is taken by stateline.layers.mixers.h3.H3",
        ),
    ],
)
def test_a_mistake_in_the_users_file_is_one_line_with_its_place(source: str, message: str) -> None:
    Path("own.py").write_text(source)
    with pytest.raises(InputError, match=message) as caught:
        import_code("own.py")
    assert "\n" not in str(caught.value)
    assert "own" not in sys.modules
    assert imported() == ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py", "there is no such file"),
        ("folder.py", "it is not a file"),
        ("./folder", "cannot import ./folder"),
        ("no_such_module", "No module named 'no_such_module'"),
        (".", "give the path of a .py file, or the name of a module"),
        ("", "give the path"),
        ("nul\0.py", "cannot import"),
    ],
)
def test_what_is_no_code_is_refused(spec: str, message: str) -> None:
    Path("folder.py").mkdir()
    with pytest.raises(InputError, match=message):
        import_code(spec)


def test_import_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "h3", "--import"]) == 2
    assert "--import needs the path" in capsys.readouterr().err


class Plain(H3):
    pass


def without_options(d_model: int) -> None:
    pass


class Positional(H3):
    def __init__(self, d_model: int, size: int = 1) -> None:
        super().__init__(d_model)


class NoDefault(H3):
    def __init__(self, d_model: int, *, size: int) -> None:
        super().__init__(d_model)


class OtherName(H3):
    def __init__(self, width: int) -> None:
        super().__init__(width)


class Abstract(SequenceLayer[None]):
    pass


@pytest.mark.parametrize(
    ("name", "cls", "message"),
    [
        ("my layer", Plain, "must consist of letters, digits and underscores"),
        ("3d", Plain, "must consist of letters, digits and underscores"),
        ("None", Plain, "not be true, false or none"),
        ("h3", Plain, "the name 'h3' is taken by stateline.layers.mixers.h3.H3"),
        ("ladder", Plain, "the name 'ladder' is taken by"),
        ("own", int, "layer 'own' must be a subclass of SequenceLayer, got <class 'int'>"),
        ("own", None, "layer 'own' must be a subclass of SequenceLayer, got None"),
        ("own", Abstract, "must define forward_chunk, init_state: Abstract does not"),
        ("own", Positional, "must take size by keyword only"),
        ("own", NoDefault, "must have a default for size"),
        ("own", OtherName, "must take d_model first"),
    ],
)
def test_a_layer_that_no_pattern_can_build_is_refused(name: str, cls: type, message: str) -> None:
    with pytest.raises(InputError, match=message):
        register_layer(name, cls)
    assert cls not in LAYERS.values()


def test_a_newer_definition_replaces_the_older_one() -> None:
    def define() -> type:
        class Own(H3):
            pass

        return Own

    first, second = define(), define()
    register_layer("own", first)
    register_layer("own", second)
    assert LAYERS["own"] is second


def test_a_layer_that_takes_a_core_is_a_wrapper() -> None:
    class Twice(Ladder):
        pass

    register_layer("twice", Twice)
    assert WRAPPERS["twice"] is Twice
    assert "twice" not in LAYERS


def test_a_task_is_registered_and_made() -> None:
    class Short(Copying):
        title: ClassVar[str] = "Short"
        training: ClassVar[Mapping[str, float | str]] = {"steps": 1}

    assert register_task("short")(Short) is Short
    assert isinstance(make_task("short(max_len=8)"), Short)
    with pytest.raises(InputError, match="must be a subclass of Task"):
        register_task("layer", H3)


def give(points: list[EntryPoint]) -> Callable[..., list[EntryPoint]]:
    return lambda group: [point for point in points if point.group == group]


def test_installed_packages_add_names_by_entry_points(
    layers_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(layers_file.parent)
    layers_file.write_text(LAYER.rpartition("register_layer")[0])
    point = EntryPoint("packaged", "my_layers:Mean", "stateline.layers")
    monkeypatch.setattr(plugins, "entry_points", give([point]))
    monkeypatch.setattr(LAYERS, "_loaded", False)
    assert "my_layers" not in sys.modules
    assert LAYERS["h3"] is H3
    assert "my_layers" not in sys.modules, "loaded although nothing was missing"
    assert LAYERS["packaged"](4)(torch.zeros(1, 2, 4)).shape == (1, 2, 4)
    assert "packaged" in list(LAYERS)


def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("packaged", "nowhere_at_all:Mean", "stateline.layers")
    monkeypatch.setattr(plugins, "entry_points", give([point]))
    monkeypatch.setattr(LAYERS, "_loaded", False)
    with pytest.raises(InputError, match=r"cannot load the layer 'packaged' .* No module named"):
        list(LAYERS)
