"""The README does what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_quickstart_runs_and_is_about_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "tensor([[" in printed
    assert "the law holds" in printed


def test_it_fits_two_screens() -> None:
    assert len(README.split()) <= 900


@pytest.mark.slow
def test_its_commands_run(tmp_path: Path) -> None:
    commands = re.findall(r"^stateline (.*)", README, flags=re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        quick = " --seeds 1 --steps 20" if command.startswith("compare") else ""
        given = [sys.executable, "-m", "stateline", *shlex.split(command + quick)]
        subprocess.run(given, cwd=tmp_path, check=True)


def test_links_to_files_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
