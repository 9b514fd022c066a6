"""The code of a self-contained folder: one file with the sources that a model needs."""

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from stateline.errors import InputError
from stateline.models.language_model import LanguageModel

CODE = "modeling_stateline.py"
"""The file that transformers loads: a copy of the one here, followed by sources."""

_SOURCE = Path(__file__).parents[2]
_ROOTS = ("stateline.hf.config", "stateline.hf.model")
_LEFT_OUT = re.compile(r"stateline\.(generate|hf|ops\.numba_common|ops\.\w+\.numba_\w+)")
"""Modules left out of the bundle: convenience imports, and numba kernels, which PyTorch's kernels
replace."""


def bundled_code(model: LanguageModel) -> str:
    """The file that loads a model without the package.

    Raises:
        InputError: If the model has parts that do not belong to the package or to PyTorch.
    """
    for module in model.modules():
        home = type(module).__module__
        if home.partition(".")[0] not in ("stateline", "torch"):
            raise InputError(
                "a self-contained folder can hold layers of stateline only, got "
                f"{type(module).__name__} of {home}: use --remote_code, or neither"
            )
    text = Path(__file__).with_name(CODE).read_text(encoding="utf-8")
    return text + "".join(_section(name) for name in sorted(_needed()))


def _needed() -> set[str]:
    """Modules that are imported when the roots are, and packages that hold them."""
    found, waiting = set[str](), list(_ROOTS)
    while waiting:
        name = waiting.pop()
        if name in found or _path(name) is None:
            continue
        found.add(name)
        waiting.append(name.rpartition(".")[0])
        waiting += _imported(name)
    return found


def _imported(name: str) -> Iterator[str]:
    """Modules that a module imports at once, and the backends of an op."""
    source = _read(name)
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
    if "Op(__name__" in source and (path := _path(name)) is not None:
        files = ("pytorch.py", "reference.py", "*_backend.py")
        found = (f"{name}.{file.stem}" for each in files for file in path.parent.glob(each))
        yield from (module for module in found if not _LEFT_OUT.fullmatch(module))


def _path(name: str) -> Path | None:
    place = _SOURCE.joinpath(*name.split("."))
    candidates = (place.with_suffix(".py"), place / "__init__.py")
    inside = name.partition(".")[0] == "stateline"
    return next((path for path in candidates if inside and path.is_file()), None)


def _read(name: str) -> str:
    """The source of a module; empty for what is left out."""
    path = _path(name)
    return "" if path is None or _LEFT_OUT.fullmatch(name) else path.read_text(encoding="utf-8")


def _section(name: str) -> str:
    """A module as comments, which :mod:`stateline.hf.modeling_stateline` reads."""
    path, source = _path(name), _read(name)
    package = " package" if path is not None and path.name == "__init__.py" else ""
    digest = hashlib.sha256(source.encode()).hexdigest()
    lines = "".join(f"# {line}\n" if line else "#\n" for line in source.split("\n")[:-1])
    return f"\n#: {name} {digest}{package}\n{lines}"
