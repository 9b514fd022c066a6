"""Long texts: memory does not grow where the state does not."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stateline.generate import Session, prefill
from stateline.layers import nbytes
from stateline.models.language_model import LanguageModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "stream_memory.py"


def test_the_example_tells_memory_at_ten_points_of_reading_and_of_writing(
    build: Callable[..., LanguageModel], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("stream_memory", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = build("h3(d_state=8)")
    example.main(model, tokens=20_000, steps=30)
    shown = capsys.readouterr().out
    places = re.findall(r"([\d,]+) tokens +([\d.]+) MiB", shown)
    assert [place.replace(",", "") for place, _ in places] == [
        *[str(2_000 * n) for n in range(1, 11)],
        *[str(3 * n) for n in range(1, 11)],
    ]
    assert all(float(size) > 10 for _, size in places)
    assert shown.count(f"the state has {nbytes(model.init_state(1)):,} bytes") == 2


@pytest.mark.parametrize("pattern", ["h3(d_state=8)", "lstm s4d(d_state=8)", "ladder(h3 lstm)"])
def test_room_is_made_for_growing_states_alone(
    build: Callable[..., LanguageModel], pattern: str
) -> None:
    model = build(pattern)
    session = Session(model, prefill(model, torch.tensor([[1, 2, 3]])), room=5)
    sizes = set()
    for _ in range(12):
        session.step()
        sizes.add(nbytes(session._state))
    assert len(sizes) == 1
