"""Commands work on the folder of a model of every published format: all on every fourth format."""

import math
import re
from pathlib import Path

import pytest

from stateline.cli import main
from stateline.files import read_json_object
from tests.models.published import FOLDERS, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.cpu, pytest.mark.usefixtures("unannotated")]


@pytest.mark.parametrize(("name", "whole"), [(n, i % 4 == 0) for i, n in enumerate(FOLDERS)])
def test_commands_work_on_every_format(
    name: str, whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours, text = tmp_path / "theirs", str(tmp_path / "ours"), tmp_path / "text.txt"
    FOLDERS[name](theirs)
    tiny_tokenizer(theirs)
    text.write_text("abcdefgh" * 4)
    assert main(["convert", str(theirs), ours]) == 0
    assert f"recognised {name}: " in capsys.readouterr().out

    def said(*arguments: str) -> str:
        code = main([*arguments])
        found = capsys.readouterr()
        assert code == 0, found.err
        return found.out

    for folder in (str(theirs), ours):
        assert "parameters" in said("info", folder)
        written = said("generate", folder, "--prompt", "abc", "--max_new_tokens", "4")
        assert re.fullmatch(r"abc.+\n", written), written
    if not whole:  # the others see our model alone, however it was loaded
        return
    score = re.search(r"\b31 +([0-9.]+)", said("evaluate", ours, str(text)))
    assert score
    assert 0 < float(score[1]) < 50
    assert "the law holds" in said("check", ours)
    task = "copying(max_len=3)"
    assert "accuracy" in said("capacity", ours, "--task", task, "--batches", "1", "--length", "3")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"task: {task}\ntrain:\n  steps: 1\n  lr: 1.0e-9\n")
    said("train", str(recipe), "--init", ours, "--out", str(tmp_path / "run"))
    record = read_json_object(tmp_path / "run" / "result.json", "result")
    assert math.isfinite(record["curve"][0]["loss"])
