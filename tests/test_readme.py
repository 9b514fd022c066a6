"""The README does what it says."""

import re
from pathlib import Path

import pytest

from stateline.cli import COMMANDS
from stateline.layers import LAYERS, WRAPPERS
from stateline.tasks import TASKS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_quickstart_runs_and_is_about_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "tensor([[" in printed
    assert "the law holds" in printed


def test_the_table_of_layers_is_complete() -> None:
    table = README[README.index("## Layers") : README.index("Tasks:")]
    named = set(re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE))
    names = {name for cell in named for name in re.findall(r"`(\w+)", cell)}
    assert names == {*LAYERS, *WRAPPERS}


def test_every_task_is_named() -> None:
    line = README[README.index("Tasks:") :].split("\n\n")[0]
    assert {name for name in TASKS if f"`{name}`" in line} == set(TASKS)


def test_every_command_is_shown() -> None:
    assert set(re.findall(r"^stateline (\w+)", README, flags=re.MULTILINE)) == set(COMMANDS)


def test_links_to_files_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
