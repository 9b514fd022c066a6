"""The tokenizer in a GGUF file, as transformers makes it."""

import contextlib
import io
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from stateline.data.huggingface import GENERATION
from stateline.errors import InputError, needed, reason
from stateline.files import write_text
from stateline.models.convert.gguf import GGUF
from stateline.models.convert.table import TOKENS


def gguf_tokenizer(path: Path) -> Path | None:
    """A folder with the files of the tokenizer, which is removed at the end of the process.

    Args:
        path: The GGUF file.

    Returns:
        The folder; ``None`` if the file has no tokenizer.

    Raises:
        InputError: If the file is damaged, or transformers is missing or cannot make the tokenizer.
    """
    kept = _written(path.absolute())
    return None if kept is None else Path(kept.name)


@cache
def _written(path: Path) -> "TemporaryDirectory[str] | None":
    model = GGUF(path)
    if not model.tokenizer:
        return None
    transformers = needed("transformers", f"the tokenizer in {path}", "hf")
    kept = TemporaryDirectory()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a bar of progress
            made = transformers.AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True
            )
            made.save_pretrained(kept.name)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # transformers raises many types, and Rust panics
        raise InputError(
            f"transformers cannot read the tokenizer {model.tokenizer!r:.40} in {path}: "
            f"{reason(error):.300}"
        ) from error
    tokens = {name: model.settings[name] for name in TOKENS if name in model.settings}
    write_text(Path(kept.name, GENERATION), json.dumps(tokens) + "\n")
    return kept
