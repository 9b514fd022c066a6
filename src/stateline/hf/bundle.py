"""The code of a self-contained folder: one file with the sources that a model needs."""

import ast
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
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

_LISTS = {
    "stateline.data": r"\w+",
    "stateline.layers": r"(mixers|wrappers)\.\w+",
    "stateline.ops": r"(?!op$)\w+",
    "stateline.runs": r"\w+",
}
"""Packages that list modules, of which a model needs some."""


def bundled_code(model: LanguageModel) -> str:
    """The file that loads a model without the package.

    Raises:
        InputError: If the model has parts that do not belong to the package or to PyTorch.
    """
    homes = {type(module).__module__: module for module in model.modules()}
    for home, module in homes.items():
        if home.partition(".")[0] not in ("stateline", "torch"):
            raise InputError(
                "a self-contained folder can hold layers of stateline only, got "
                f"{type(module).__name__} of {home}: use --remote_code, or neither"
            )
    text = Path(__file__).with_name(CODE).read_text(encoding="utf-8")
    needed = _needed(homes)
    return text + "".join(_section(name, needed) for name in sorted(needed))


def _needed(homes: Iterable[str]) -> set[str]:
    """Modules that are imported when the roots and these are, and packages that hold them."""
    found, waiting = set[str](), [*_ROOTS, *homes]
    while waiting:
        name = waiting.pop()
        if name in found or _path(name) is None:
            continue
        found.add(name)
        waiting.append(name.rpartition(".")[0])
        waiting += _imported(name)
    return found


def _imported(name: str) -> Iterator[str]:
    """Modules that a module imports at once, and the backends of an op.

    Of a list, such as all layers, only what others take from it.
    """
    source = _read(name)
    for module, names in _imports(source):
        if module in _LISTS:
            listed = [home for home, given in _imports(_read(module)) if {*given} & {*names}]
            yield from (module, *listed)
        elif name not in _LISTS or not _is_listed(name, module):
            yield module
            yield from (f"{module}.{each}" for each in names)
    if "Op(__name__" in source and (path := _path(name)) is not None:
        files = ("pytorch.py", "reference.py", "*_backend.py")
        found = (f"{name}.{file.stem}" for each in files for file in path.parent.glob(each))
        yield from (module for module in found if not _LEFT_OUT.fullmatch(module))


def _imports(source: str) -> Iterator[tuple[str, list[str]]]:
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module, [alias.name for alias in statement.names]


def _is_listed(package: str, module: str) -> bool:
    """Whether a package lists what a module defines, but does not use it."""
    return re.fullmatch(rf"{re.escape(package)}\.{_LISTS[package]}", module) is not None


def _without(name: str, needed: Collection[str]) -> str:
    """The source of a list without the modules that are not needed, and without their names."""
    lines, dropped = _read(name).splitlines(keepends=True), set[str]()
    found = (each for each in ast.parse("".join(lines)).body if isinstance(each, ast.ImportFrom))
    for statement in found:
        module = statement.module or ""
        if _is_listed(name, module) and module not in needed:
            dropped |= {alias.name for alias in statement.names}
            end = statement.end_lineno or statement.lineno
            lines[statement.lineno - 1 : end] = [""] * (end - statement.lineno + 1)
    entry = re.compile(r'\s+(?:"\w+": (\w+)|"(\w+)"),\n')
    entries = ((line, entry.fullmatch(line)) for line in lines)
    return "".join(line for line, its in entries if not its or not {*its.groups()} & dropped)


def _path(name: str) -> Path | None:
    place = _SOURCE.joinpath(*name.split("."))
    candidates = (place.with_suffix(".py"), place / "__init__.py")
    inside = name.partition(".")[0] == "stateline"
    return next((path for path in candidates if inside and path.is_file()), None)


def _read(name: str) -> str:
    """The source of a module; empty for what is left out."""
    path = _path(name)
    return "" if path is None or _LEFT_OUT.fullmatch(name) else path.read_text(encoding="utf-8")


def _section(name: str, needed: Collection[str]) -> str:
    """A module as comments, which :mod:`stateline.hf.modeling_stateline` reads."""
    path, source = _path(name), _without(name, needed) if name in _LISTS else _read(name)
    package = " package" if path is not None and path.name == "__init__.py" else ""
    digest = hashlib.sha256(source.encode()).hexdigest()
    lines = "".join(f"# {line}\n" if line else "#\n" for line in source.split("\n")[:-1])
    return f"\n#: {name} {digest}{package}\n{lines}"
