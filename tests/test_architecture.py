"""Imports only go down; complex numbers stay where they belong; help needs no PyTorch."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import stateline
from stateline import tasks
from stateline.layers import LAYERS, WRAPPERS

SOURCE = Path(stateline.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}

PARTS = [
    "__main__",
    "cli",
    "reports",
    "probe",
    "papers",
    "compare",
    "serve",
    "server_check",
    "hf_check",
    "hf",
    "runs",
    "bench",
    "capacity",
    "train",
    "evaluate",
    "generate",
    "tasks",
    "data",
    "models",
    "layers",
    "ops",
    "devices",
    "charts",
    "plugins",
    "settings",
    "pattern",
    "workers",
    "allocator",
    "files",
    "errors",
]
"""From top to bottom: a part may import itself and what stands below."""

FORBIDDEN = {("reports", "compare")}
"""What may not be imported although it stands below: a report shows results, whoever made them."""

COMPLEX = {"complex", "complex32", "complex64", "complex128", "chalf", "cfloat", "cdouble"}
COMPLEX |= {"view_as_complex", "view_as_real", "is_complex", "polar", "conj", "conj_physical"}
COMPLEX |= {"fft", "rfft", "irfft", "hfft", "ihfft", "ifft"}


def part_of(module: str) -> str:
    """``stateline.layers.state`` is of the part ``layers``; the package itself is no part."""
    _, _, inside = module.partition(".")
    return inside.partition(".")[0]


@cache
def nodes(source: str) -> list[ast.AST]:
    """All parts of some code."""
    return list(ast.walk(ast.parse(source)))


def imported(path: str, source: str) -> Iterator[str]:
    """Modules of ours that a file imports, wherever in the file; ``path`` is below stateline."""
    package = ["stateline", *path.split("/")[:-1]]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*home, *([node.module] if node.module else [])])
            whole = module == "stateline"
            yield from (f"stateline.{alias.name}" if whole else module for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            first = node.args[0]
            yield str(first.value) if isinstance(first, ast.Constant) else ""


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def violations(path: str, source: str) -> list[str]:
    """Imports of a file that do not go down."""
    own = part_of("stateline." + path.removesuffix(".py").replace("/", "."))
    ours = {name for name in imported(path, source) if name.split(".")[0] == "stateline"}
    found = [] if own in PARTS else [f"{path} is of the part {own!r}, which nobody knows"]
    for module in sorted(ours):
        part = part_of(module)
        down = own in PARTS and part in PARTS and PARTS.index(part) >= PARTS.index(own)
        if not down or (own, part) in FORBIDDEN:
            found.append(f"{path} imports {module}")
    return found


def test_imports_go_down() -> None:
    inside = FILES.keys() - {"__init__.py"}
    assert [found for path in sorted(inside) for found in violations(path, FILES[path])] == []


def module_of(path: str) -> str:
    """``layers/state.py`` is ``stateline.layers.state``; a folder is its ``__init__.py``."""
    return "stateline." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_files(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Files of ours that each file imports, wherever in it; packages are left out."""
    homes = {module_of(path): path for path in files if not path.endswith("__init__.py")}
    return {
        path: {homes[module] for module in imported(path, source) if module in homes} - {path}
        for path, source in files.items()
    }


def mutual(files: Mapping[str, str]) -> list[tuple[str, str]]:
    """Pairs of files that import each other."""
    arrows = imported_files(files)
    return [(a, b) for a in sorted(files) for b in sorted(arrows[a]) if a < b and a in arrows[b]]


def test_no_two_files_import_each_other() -> None:
    assert mutual(FILES) == []


def test_mixers_do_not_import_wrappers() -> None:
    guilty = {
        path: used
        for path, used in imported_files(FILES).items()
        if path.startswith("layers/mixers/") and any("/wrappers/" in one for one in used)
    }
    assert guilty == {}


def test_files_that_import_each_other_are_noticed() -> None:
    early = {"layers/a.py": "from stateline.layers.b import x", "layers/b.py": ""}
    assert mutual(early) == []
    late = "def f():\n    from stateline.layers.a import y"
    assert mutual({**early, "layers/b.py": late}) == [("layers/a.py", "layers/b.py")]


def test_the_package_itself_imports_nothing_of_ours_before_it_is_used() -> None:
    tree = ast.parse(FILES["__init__.py"])
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [node.module for node in at_once if isinstance(node, ast.ImportFrom)] == [
        "importlib",
        "typing",
    ]


def test_every_part_exists() -> None:
    assert {path.split("/")[0].removesuffix(".py") for path in FILES} - {"__init__"} == set(PARTS)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ops/a.py", "import stateline.layers"),
        ("ops/a.py", "from stateline.layers import state"),
        ("ops/a.py", "def late():\n    from stateline.layers.state import nbytes"),
        ("ops/a.py", "from stateline import layers"),
        ("ops/a.py", "from stateline import LAYERS"),
        ("ops/a.py", "import stateline"),
        ("ops/a.py", "from .. import layers"),
        ("ops/a.py", "from ..layers import state"),
        ("ops/fft_conv/a.py", "from ...layers import state"),
        ("ops/a.py", "from importlib import import_module\nimport_module('stateline.layers')"),
        ("errors.py", "from stateline import files"),
        ("reports/html.py", "from stateline.compare import Comparison"),
        ("generate.py", "import stateline.evaluate"),
        ("layers/a.py", "from stateline.utils import helper"),
        ("utils/a.py", "import torch"),
    ],
)
def test_an_import_that_goes_up_is_noticed(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("layers/a.py", "from stateline.ops import fft_conv\nimport torch"),
        ("layers/a.py", "from . import base\nfrom .state import nbytes\nfrom ..ops import slide"),
        ("evaluate.py", "from stateline.generate import generate"),
        ("cli/a.py", "import stateline.errors"),
    ],
)
def test_an_import_that_goes_down_is_allowed(path: str, source: str) -> None:
    assert violations(path, source) == []


KINDS_OF_TASKS = {name for name in tasks.__all__ if name == "Task" or name.endswith("Task")}
KINDS_OF_TASKS |= {kind.__name__ for kind in tasks.TASKS.values()} | {"TextTask"}


def class_tests(source: str) -> set[str]:
    """Kinds of tasks that code tells apart by their class."""
    found: set[str] = set()
    for node in nodes(source):
        asks = isinstance(node, ast.Call) and _name(node.func) in ("isinstance", "issubclass")
        compared = isinstance(node, ast.Compare) and "type(" in ast.unparse(node)
        if asks or compared or isinstance(node, ast.MatchClass):
            found |= {_name(part) for part in ast.walk(node) if isinstance(part, ast.expr)}
    return found & KINDS_OF_TASKS


def test_a_task_is_asked_what_it_is_like_and_not_for_its_class() -> None:
    outside = (path for path in FILES if not path.startswith("tasks/"))
    assert {path: found for path in outside if (found := class_tests(FILES[path]))} == {}


def test_a_class_test_on_a_task_is_noticed() -> None:
    for source in (
        "if isinstance(task, GeneratedTask | LabelledTask): pass",
        "assert isinstance(self.task, base.CorpusTask)",
        "issubclass(kind, (int, RowsTask))",
        "type(task) is Copying",
        "match task:\n    case RowsTask(): pass",
    ):
        assert class_tests(source)
    assert not class_tests("isinstance(model, LanguageModel) and task.drawn")


def complex_words(source: str) -> set[str]:
    """Names for complex numbers that code (not text) uses."""
    words = {node.attr for node in nodes(source) if isinstance(node, ast.Attribute)}
    words |= {node.name for node in nodes(source) if isinstance(node, ast.alias)}
    literals = (node.value for node in nodes(source) if isinstance(node, ast.Constant))
    return (words & COMPLEX) | {str(value) for value in literals if isinstance(value, complex)}


def test_complex_numbers_stay_inside_definitions_and_the_fft() -> None:
    allowed = {"ops/fft_conv/pytorch.py", "ops/fft_conv/triton_backend.py"}
    allowed |= {p for p in FILES if p.startswith("ops/") and p.endswith("/reference.py")}
    others = FILES.keys() - allowed
    assert {path: found for path in others if (found := complex_words(FILES[path]))} == {}


def test_complex_numbers_are_noticed() -> None:
    for source in (
        "torch.complex(a, b)",
        "x.to(torch.cfloat)",
        "from torch import complex64",
        "1j * x",
        "torch.fft.rfft(u)",
    ):
        assert complex_words(source)


WITHOUT_TORCH = """
import json, sys
from importlib import import_module

guilty = {}
def load(name, use=lambda module: None):
    use(import_module(name))
    if "torch" in sys.modules and not guilty:
        guilty[name] = "torch"

load("stateline")
load("stateline.cli")
load("stateline.reports")
from stateline.cli import COMMANDS, Parser
for command in COMMANDS:
    load(f"stateline.cli.{command}", lambda module: module.add_arguments(Parser()))
print(json.dumps([guilty, list(COMMANDS)]))
"""


def test_help_needs_no_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    guilty, commands = json.loads(done.stdout)
    assert commands
    assert guilty == {}


def test_no_layer_is_named_outside_of_layers() -> None:
    """But where published weights are read, weights are set by a proof, and heads are moved.

    What a part needs to know of a layer is an attribute or a method that every layer may have.
    """
    classes = {kind.__name__ for table in (LAYERS, WRAPPERS) for kind in table.values()}
    for path, text in FILES.items():
        if path.startswith(
            ("layers/", "models/convert/", "models/constructions/", "models/starts")
        ):
            continue
        imported = {
            alias.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stateline.lay")
            for alias in node.names
        }
        assert not imported & classes, path


def test_no_metric_is_known_by_the_end_of_its_name() -> None:
    """A task says itself that it scores a share."""
    for path, text in FILES.items():
        assert not re.search(r"metric\.(ends|starts)with", text), path
