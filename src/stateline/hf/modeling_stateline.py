"""Loads the model of this folder with ``trust_remote_code=True``.

The package stateline need not be installed: the sources that the model needs follow below as
comments, each file after its name and its SHA-256. Where the package is installed, it is used
instead. The code needs torch, transformers, safetensors, numpy and jaxtyping.

Stateline is under the Apache License, Version 2.0.
"""

import hashlib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

_HEADING = "#: "
"""Begins the line before a source, with its module, its hash, and ``package`` for a package."""


class _Sources(MetaPathFinder, InspectLoader):
    """Imports the modules below."""

    def __init__(self, text: str) -> None:
        self.sources: dict[str, str] = {}
        self.packages: set[str] = set()
        for part in text.split(f"\n{_HEADING}")[1:]:
            heading, *lines = part.rstrip("\n").split("\n")
            name, digest, *kind = heading.split(" ")
            source = "".join(f"{line[2:]}\n" for line in lines)
            if hashlib.sha256(source.encode()).hexdigest() != digest:
                raise ImportError(f"the source of {name} in {__file__} is damaged: get it again")
            self.sources[name] = source
            self.packages |= {name} if kind else set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of a module that is below; ``None`` for any other."""
        del path, target
        if fullname not in self.sources:
            return None
        return spec_from_loader(fullname, self, is_package=fullname in self.packages)

    def get_source(self, fullname: str) -> str:
        """The text of a module."""
        return self.sources[fullname]

    def is_package(self, fullname: str) -> bool:
        """Whether a module is a package."""
        return fullname in self.packages


if "stateline" not in sys.modules and find_spec("stateline") is None:
    sys.meta_path.append(_Sources(Path(__file__).read_text(encoding="utf-8")))


_Config = import_module("stateline.hf.config").StatelineConfig
_Model = import_module("stateline.hf.model").StatelineForCausalLM


class StatelineConfig(_Config):  # type: ignore[misc, valid-type]
    """The settings of the model."""

    __init__ = _Config.__init__  # transformers makes one from the fields of a class without its own


class StatelineForCausalLM(_Model):  # type: ignore[misc, valid-type]
    """The model."""

    config_class = StatelineConfig
