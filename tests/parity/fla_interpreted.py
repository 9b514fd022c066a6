"""Triton's interpreter for the kernels of flash-linear-attention, which it runs on the CPU.

Import it before fla, in a process of its own with ``TRITON_INTERPRET=1``: it changes Triton. Each
kernel is run with the first of its settings, and nothing is timed.
"""

import sys
from pathlib import Path
from typing import Any


def import_fla(folder: Path) -> None:
    """Make the package of a checkout importable, without its tests beside it.

    Raises:
        ImportError: If it, Triton or einops cannot be imported.
    """
    from importlib.machinery import ModuleSpec
    from importlib.util import module_from_spec, spec_from_file_location

    import triton.language as tl
    from triton.runtime.autotuner import Autotuner

    begin, gather = Autotuner.__init__, tl.gather

    def init(
        tuner: Any, fn: Any, names: Any, configs: Any, key: Any, *args: Any, **kw: Any
    ) -> None:
        begin(tuner, fn, names, configs[:1], [n for n in key if n in names], *args, **kw)

    Autotuner.__init__ = init
    Autotuner.do_bench = property(lambda _: None)
    Autotuner._bench = lambda *_, **__: [0.0] * 3
    # fla keeps this function, which the interpreter replaces only for a while
    tl.gather = lambda *args, **kw: tl.gather(*args, **kw)
    root = folder / "fla"
    spec = spec_from_file_location(
        "fla", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert isinstance(spec, ModuleSpec)
    assert spec.loader
    sys.modules["fla"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    tl.gather = gather
