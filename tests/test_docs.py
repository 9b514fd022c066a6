"""The code and the commands in the documentation work.

The ``python`` blocks of a page are run in order, in an empty folder. A ``text`` block right after
one is its expected output, where ``...`` matches anything.
"""

import doctest
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import stateline
from stateline.cli import COMMANDS, Parser, _underscored, train
from stateline.cli.parser import take_imports
from stateline.layers import LAYERS, WRAPPERS
from stateline.pattern import format_pattern, parse_pattern
from stateline.tasks import TASKS, make_task

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if "_build" not in path.parts
}

_PYTHON = re.compile(
    r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def commands() -> Iterator[tuple[str, str]]:
    """Every console line that starts with ``stateline``, with its page."""
    for page, text in {**PAGES, "README": (ROOT / "README.md").read_text("utf-8")}.items():
        for block in _CONSOLE.findall(text):
            lines = block.replace("\\\n", " ").splitlines()
            yield from ((page, line) for line in lines if line.startswith("stateline "))


def parse(name: str, arguments: list[str]) -> Any:
    """Parse the arguments of a command without running it."""
    arguments, _ = take_imports(arguments)
    return parser_of(name).parse_args([_underscored(argument) for argument in arguments])


def tasks_of(name: str, given: Any) -> Iterator[str]:
    """The tasks of a command that need no files, without settings of training and seeds."""
    texts = given.tasks if name == "compare" else [given.get("task")]
    for text in filter(None, texts or ()):
        item = parse_pattern(text)[0]
        own = inspect.signature(TASKS[item.name]).parameters if item.name in TASKS else {}
        if own and "path" not in item.keywords:
            keywords = {key: value for key, value in item.keywords.items() if key in own}
            yield format_pattern((item._replace(repeat=1, keywords=keywords),))


@cache
def parser_of(name: str) -> Parser:
    parser = Parser(prog=f"stateline {name}")
    importlib.import_module(f"stateline.cli.{name}").add_arguments(parser)
    return parser


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages may turn gradients off, add to the path, and register layers and tasks."""
    for table in (LAYERS, TASKS):
        monkeypatch.setattr(table, "_classes", dict(table._classes))
    path, enabled = sys.path.copy(), torch.is_grad_enabled()
    yield
    sys.path[:] = path
    torch.set_grad_enabled(enabled)


def pages_with_code() -> Iterator[Any]:
    for page, text in PAGES.items():
        if _PYTHON.search(text):
            slow = page in ("commands/compare", "how-to/lora")  # trains two models; imports PEFT
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(page, marks=marks, id=page)


@pytest.mark.parametrize("page", list(pages_with_code()))
def test_the_code_of_a_page_runs_and_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page", "EXAMPLES": ROOT / "examples"}
    for code, shown in _PYTHON.findall(PAGES[page]):
        exec(compile(code, f"{page}.md", "exec"), names)
        printed = capsys.readouterr().out
        assert doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS), printed


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_a_command_that_is_shown_can_be_given(page: str, line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    if name in ("COMMAND", "--help", "--version"):
        return
    assert name in COMMANDS
    for task in tasks_of(name, parse(name, arguments)):
        make_task(task)


def test_a_recipe_that_is_shown_can_be_read(tmp_path: Path) -> None:
    recipes = re.findall(r"^```yaml\n(.*?)^```$", PAGES["commands/train"], re.DOTALL | re.MULTILINE)
    assert recipes
    for number, text in enumerate(recipes):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        parser = Parser(default_config_files=[path])
        train.add_arguments(parser)
        assert parser.parse_args([str(path)]).pattern


def test_every_command_has_its_page() -> None:
    assert {page for page in PAGES if page.startswith("commands/")} == {
        "commands/index",
        *(f"commands/{name}" for name in COMMANDS),
    }


def test_every_page_of_a_command_shows_its_options_and_an_example() -> None:
    for name in COMMANDS:
        page = PAGES[f"commands/{name}"]
        assert f"```{{command-options}} {name}\n" in page
        assert any(line.startswith(f"stateline {name}") for line in page.splitlines()), name


def test_every_layer_has_its_page() -> None:
    assert {page for page in PAGES if page.startswith("layers/")} == {
        "layers/index",
        *(f"layers/{name}" for name in [*LAYERS, *WRAPPERS]),
    }


@pytest.mark.parametrize("name", [*LAYERS, *WRAPPERS])
def test_the_page_of_a_layer_has_its_equation_state_cost_and_use(name: str) -> None:
    page, kind = PAGES[f"layers/{name}"], {**LAYERS, **WRAPPERS}[name]
    assert f".. autoclass:: stateline.layers.{kind.__name__}\n" in page
    assert f"```{{layer-cost}} {name}\n" in page
    for heading in ("State", "Cost per token", "When to choose it"):
        assert f"\n## {heading}\n" in page
    assert ":math:" in (kind.__doc__ or "") or ".. math::" in (kind.__doc__ or "")


def test_every_extra_is_described() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    table = PAGES["quickstart"].partition("| extra |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(extras["optional-dependencies"])


def test_every_task_is_described() -> None:
    for kind in TASKS.values():
        assert f".. autoclass:: stateline.tasks.{kind.__name__}\n" in PAGES["tasks"]


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("papers/")])
def test_what_a_page_says_is_not_there_yet_is_not_there(page: str) -> None:
    _, _, rest = PAGES[page].partition("\n## Not yet\n")
    named = set(re.findall(r"`(\w+)`(?!\])", rest.partition("\n## ")[0]))
    assert named & {*LAYERS, *WRAPPERS, *TASKS, *COMMANDS} == set()


def test_no_page_names_a_place_outside_the_repository() -> None:
    assert [page for page, text in PAGES.items() if "/work/" in text or "shared/" in text] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := [n for n in ("sphinx", "myst_nb", "furo") if not importlib.util.find_spec(n)]:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'stateline[docs]'")
    folder = tmp_path_factory.mktemp("docs")
    command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html"]
    places = ["-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]
    done = subprocess.run(
        [sys.executable, *command, *places], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.slow
def test_the_reference_holds_every_public_name(built: Path) -> None:
    api = "".join(page.read_text(encoding="utf-8") for page in (built / "api").glob("*.html"))
    assert [name for name in stateline.__all__ if f'id="stateline.{name}"' not in api] == []


@pytest.mark.slow
def test_the_pages_load_nothing_from_a_network(built: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe)[^>]+src=\"https?:|<link[^>]+href=\"https?:")
    assert [page.name for page in built.rglob("*.html") if loads.search(page.read_text())] == []


@pytest.mark.slow
def test_formulas_are_mathml(built: Path) -> None:
    page = (built / "layers" / "attention.html").read_text(encoding="utf-8")
    assert '<div class="formula"><math' in page


@pytest.mark.slow
def test_options_come_from_the_parser(built: Path) -> None:
    page = (built / "commands" / "compare.html").read_text(encoding="utf-8")
    assert "width of the first model, which the others match" in page


def prose(text: str) -> Iterator[str]:
    """The paragraphs and points of a page, without code, directives and tables."""
    text = re.sub(r"^ *(```|:::).*?^ *\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )", text):
        if not part.lstrip().startswith("|"):
            yield part


GUIDES = {
    page: text
    for page, text in PAGES.items()
    if not page.startswith(("papers/", "layers/", "gallery/"))
}
"""The pages that a user reads from beginning to end."""


def test_the_documentation_is_short() -> None:
    assert sum(len(text.split()) for text in GUIDES.values()) <= 28_000


@pytest.mark.parametrize("page", sorted(GUIDES))
def test_a_paragraph_is_short(page: str) -> None:
    assert [part for part in prose(GUIDES[page]) if len(part.split()) > 90] == []


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (("W&B", "wandb", "MLflow"), "how-to/track"),
        (("schedule of your own",), "how-to/own-loop"),
        (("torchrun --nnodes 2", "sbatch"), "how-to/cluster"),
    ],
)
def test_what_users_look_for_is_there(words: tuple[str, ...], page: str) -> None:
    assert [word for word in words if word not in PAGES[page]] == []
    assert page in PAGES["index"]


def test_the_release_is_named_alike_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert len((ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()) <= 40


def test_contributing_is_one_screen() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()) <= 70
