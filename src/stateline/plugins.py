"""Importing code from outside the package, and the tables of names that it can extend."""

import hashlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeVar, get_type_hints

from stateline.errors import InputError, reason

ClassT = TypeVar("ClassT", bound=type)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONSTANTS = ("true", "false", "none")
_imported: dict[str, None] = {}


def import_code(spec: str, *, record: bool = True) -> ModuleType:
    """Import a Python file or a module, so that its classes are registered.

    The file's folder, or for a module the current folder, is appended to ``sys.path``. Importing
    the same file or module again changes nothing.

    Args:
        spec: Path of a ``.py`` file, or the dotted name of a module.
        record: Whether runs need this code: it is then imported in workers, and listed in the
            folders of runs.

    Raises:
        InputError: If there is no such file or module, or if the code in it fails: the message
            names the file and the line, and quotes the original error.
    """
    is_file = spec.endswith(".py") or "/" in spec or os.sep in spec
    name = os.path.abspath(os.path.expanduser(spec)) if is_file else spec
    try:
        module = _import_file(Path(name)) if is_file else _import_module(name)
    except (Exception, SystemExit) as error:
        text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"cannot import {spec}: {_place(error)}{kind}{text}") from error
    if record:
        _imported[name] = None
    return module


def imported() -> tuple[str, ...]:
    """Absolute paths and module names that ``import_code`` has imported so far, in order."""
    return tuple(_imported)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError("there is no such file" if not path.exists() else "it is not a file")
    folder, name = str(path.parent), path.stem
    if folder not in sys.path:
        sys.path.append(folder)
    if not _is_of(name, path):  # another module has that name
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("give a file whose name ends in .py, or the name of a module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_of(name: str, path: Path) -> bool:
    """Whether ``import name`` would import the file ``path``."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # also for a module without a spec, such as __main__
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin) == path


def _import_module(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    if not all(_NAME.fullmatch(part) for part in name.split(".")):
        raise InputError("give the path of a .py file, or the name of a module")
    return import_module(name)


def _place(error: BaseException) -> str:
    """Where in the user's code an error was raised, as ``file:line: ``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    libraries = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(libraries) and "site-packages" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


class Registry(MutableMapping[str, ClassT]):
    """A table from names to classes that installed packages and the user's code can extend.

    A package adds classes by entry points of the table's group. They are loaded when a name is
    not in the table, or when the table is listed. Assigning an item does what ``register`` does.

    Args:
        kind: What the classes are, for messages: ``"layer"``.
        group: Entry-point group, such as ``"stateline.layers"``.
        base: The class that all must be derived from.
        first: Name of the first argument of every constructor; all others are keyword-only.
        classes: The package's own classes.
    """

    def __init__(
        self, kind: str, group: str, base: type, first: str, classes: Mapping[str, ClassT]
    ) -> None:
        self.kind, self.group, self.base, self.first = kind, group, base, first
        self._classes = dict(classes)
        self._loaded = False
        self._other: Registry[ClassT] | None = None

    def share_names(self, other: "Registry[ClassT]") -> None:
        """Refuse names that the other table has, in both tables."""
        self._other, other._other = other, self

    def register(self, name: str, cls: ClassT) -> None:
        """Add a class.

        Registering a class again, or a newer definition of it, replaces the older one.

        Args:
            name: The name that patterns use: letters, digits and underscores.
            cls: The class. Its constructor must take the table's first argument, and everything
                else by keyword only, with annotations; a layer's options must have defaults.

        Raises:
            InputError: If the name is malformed or taken by another class, or if the class cannot
                be constructed from the keywords of a pattern.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() in _CONSTANTS:
            raise InputError(
                f"the name of a {self.kind} must consist of letters, digits and underscores, "
                f"not begin with a digit, and not be true, false or none, got {name!r}"
            )
        other = self._classes.get(name) or (self._other and self._other._classes.get(name))
        if other is not None and _path(other) != _path(cls):
            raise InputError(
                f"the name {name!r} is taken by {_path(other)}: register {_path(cls)} under another"
            )
        self._check(f"{self.kind} {name!r}", cls)
        self._classes[name] = cls

    def _check(self, owner: str, cls: object) -> None:
        """Check that a class can be constructed from the keywords of a pattern."""
        if not inspect.isclass(cls) or not issubclass(cls, self.base):
            raise InputError(f"{owner} must be a subclass of {self.base.__name__}, got {cls!r}")
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
            raise InputError(f"{owner} must define {missing}: {cls.__name__} does not")
        parameters = list(inspect.signature(cls).parameters.values())
        if not parameters or parameters[0].name != self.first:
            raise InputError(f"the constructor of {owner} must take {self.first} first")
        for option in parameters[1:]:
            _check_option(owner, self.first, option)
        try:
            get_type_hints(cls.__init__)
        except Exception as error:
            raise InputError(
                f"the annotations of the constructor of {owner} cannot be resolved: {error}"
            ) from error

    def __getitem__(self, name: str) -> ClassT:
        if name not in self._classes:
            self._load()
        return self._classes[name]

    def __setitem__(self, name: str, cls: ClassT) -> None:
        self.register(name, cls)

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._classes)

    def __len__(self) -> int:
        self._load()
        return len(self._classes)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}, {list(self)})"

    def _load(self) -> None:
        """Register the classes of installed packages, once."""
        if self._loaded:
            return
        self._loaded = True  # set first, since the loaded code may list this table
        for point in entry_points(group=self.group):
            try:
                self.register(point.name, point.load())
            except Exception as error:
                self._loaded = False
                package = f" of the package {point.dist.name}" if point.dist else ""
                raise InputError(
                    f"cannot load the {self.kind} {point.name!r}{package} ({point.value}): "
                    f"{type(error).__name__}: {reason(error)}; repair or uninstall it"
                ) from error


def _check_option(owner: str, first: str, option: inspect.Parameter) -> None:
    if option.kind is not option.KEYWORD_ONLY:
        raise InputError(
            f"the constructor of {owner} must take {option.name} by keyword only: "
            f"write a * after {first}"
        )
    if option.default is option.empty:
        raise InputError(f"the constructor of {owner} must have a default for {option.name}")


def _path(cls: object) -> str:
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"


def command_line(command: str, arguments: Sequence[str]) -> str:
    """The line for a shell that runs a command with its arguments and the imported code.

    Example:
        >>> command_line("compare", ["h3*2", "lstm"])
        "stateline compare 'h3*2' lstm"
    """
    imports = [word for name in imported() for word in ("--import", name)]
    return shlex.join(["stateline", *imports, command, *arguments])
