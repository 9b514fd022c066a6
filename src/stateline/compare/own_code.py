"""The user's own layers and tasks in other processes: in workers, and on the nodes of clusters."""

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from stateline.errors import InputError
from stateline.layers import LAYERS, WRAPPERS
from stateline.plugins import import_code, imported
from stateline.runs.results import RunRecord
from stateline.tasks import TASKS

_TABLES: Mapping[str, Any] = {"layer": LAYERS, "wrapper": WRAPPERS, "task": TASKS}


class OwnCode(NamedTuple):
    """What another process must import and register.

    Attributes:
        imports: Files and modules, for ``import_code``.
        classes: Pickled references to the classes that were registered, by table and name.
        main: True if some of the classes are defined in the main module.
    """

    imports: tuple[str, ...]
    classes: bytes
    main: bool

    def restore(self) -> None:
        """In another process: import and register everything."""
        for name in self.imports:
            import_code(name)
        for (kind, name), cls in pickle.loads(self.classes).items():
            if _TABLES[kind].get(name) is not cls:
                _TABLES[kind][name] = cls


def own_code() -> OwnCode:
    """The code outside the package that this process has imported and registered.

    Raises:
        InputError: If a registered class cannot be imported by another process.
    """
    found = {
        (kind, name): cls
        for kind, table in _TABLES.items()
        for name, cls in table.items()
        if cls.__module__.partition(".")[0] != "stateline"
    }
    for (kind, name), cls in found.items():
        try:
            pickle.dumps(cls)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"the {kind} {name!r} cannot be imported by a worker process: move its class "
                "to the top level of a file, or train with --workers 0 (workers=0 in Python): "
                f"{error}"
            ) from error
    main = any(cls.__module__ == "__main__" for cls in found.values())
    return OwnCode(imported(), pickle.dumps(found), main)


def code_for_nodes() -> OwnCode:
    """The user's own code that the nodes of a cluster must import.

    Raises:
        InputError: If they cannot import it.
    """
    code = own_code()
    if code.main:
        raise InputError(
            "the nodes of a cluster cannot import the main script, which defines a layer or a "
            "task: move the class to a file of its own and give it with --import"
        )
    return code


def run_on_node(run: Callable[[], RunRecord], code: OwnCode, threads: int) -> RunRecord | str:
    """On a node: run a job; the message of an InputError is returned as text."""
    torch.set_num_threads(threads)
    try:
        code.restore()
        return run()
    except InputError as error:
        return str(error)


def from_node(found: RunRecord | str) -> RunRecord:
    """The result of :func:`run_on_node`.

    Raises:
        InputError: If the job could not be run.
    """
    if isinstance(found, str):
        raise InputError(found)
    return found
