from pathlib import Path

import pytest

from stateline.tasks import Text


@pytest.fixture
def text(tmp_path: Path) -> Text:
    """A text whose rows last for several batches: 4 rows in segments of 16 bytes."""
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(97 + n * n % 23 for n in range(800)))
    return Text(path=str(file), length=16, batch_size=4)
