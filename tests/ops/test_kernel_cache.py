"""Kernels on disk: what they compute does not depend on who compiled them, damage is mended."""

import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from stateline.ops.numba_common import jit

pytestmark = pytest.mark.slow  # compiles in processes of its own

ROTATE = """
import logging, torch
logging.basicConfig(level="INFO", format="%(message)s")
from stateline.ops import rotary
print(rotary(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 2), torch.zeros(1, 2, 2)).sum().item())
"""
"""One small kernel."""

FILTER = """
import hashlib, torch
from stateline.ops import DiagonalWeights, diagonal_ssm
g = torch.Generator().manual_seed(0)
u, a, b, c = (torch.randn(*s, generator=g) for s in ((3, 150, 40), *[(40, 5, 2)] * 3))
y, _ = diagonal_ssm(u, DiagonalWeights(-a.square(), b, c))
print(hashlib.sha256(y.numpy().tobytes()).hexdigest())
"""
"""Kernels that use each other, and in which products and sums may be fused."""


def python(code: str, folder: Path, largest_file: int = -1, **environment: str) -> tuple[str, str]:
    """What a fresh interpreter, with kernels in a folder, prints and logs."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), **environment},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_process_that_compiles_computes_the_bits_of_one_that_finds_kernels(
    tmp_path: Path,
) -> None:
    compiled, _ = python(FILTER, tmp_path)
    assert list(tmp_path.rglob("*.nbc"))
    assert python(FILTER, tmp_path)[0] == compiled


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("kept", [0, 20])
def test_damaged_kernels_are_compiled_again(tmp_path: Path, ending: str, kept: int) -> None:
    python(ROTATE, tmp_path)
    for file in tmp_path.rglob(f"*.{ending}"):
        os.truncate(file, kept)
    result, log = python(ROTATE, tmp_path)
    assert float(result) == 8
    assert f"are damaged: {'EOFError' if not kept else 'UnpicklingError'}" in log
    assert python(ROTATE, tmp_path) == (result, "")


def test_a_full_disk_costs_the_cache_and_not_the_result(tmp_path: Path) -> None:
    result, log = python(ROTATE, tmp_path, largest_file=100)
    assert float(result) == 8
    assert "CPU kernels are compiled again in every process: cannot write" in log
    assert str(tmp_path) in log


def test_processors_do_not_share_kernels(tmp_path: Path) -> None:
    python(ROTATE, tmp_path)
    mine = len(list(tmp_path.rglob("*.nbc")))
    python(ROTATE, tmp_path, NUMBA_CPU_NAME="generic")
    assert len(list(tmp_path.rglob("*.nbc"))) == 2 * mine


def test_vectors_are_as_wide_as_the_processor_asked_for() -> None:
    code = "from stateline.ops.numba_common.vector import LANES; print(LANES)"
    widths = {"": 4, "+avx,+avx2,-avx512f": 8, "+avx,+avx512f": 16}
    for features, lanes in widths.items():
        environment = {"NUMBA_CPU_NAME": "x", "NUMBA_CPU_FEATURES": features}
        assert int(python(code, Path(os.devnull), **environment)[0]) == lanes


def test_kernels_are_compiled_again_when_a_file_that_they_import_changes(tmp_path: Path) -> None:
    plain, importing = tmp_path / "plain.py", tmp_path / "importing.py"
    plain.write_bytes(b"import math\n")
    importing.write_bytes(b"from stateline.ops.numba_common.blocks import dot\n")
    own = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (plain, importing)]
    assert jit._sources(str(plain)) == own[0]
    assert jit._sources(str(importing)) != own[1]
