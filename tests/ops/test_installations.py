"""The kernels where processes are started, folders cannot be written, or numba is missing."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import stateline

SOURCE = Path(stateline.__file__).parents[1]

COMPUTE = """
import torch
from stateline.ops import DiagonalWeights, diagonal_ssm

def result(_=None):
    g = torch.Generator().manual_seed(0)
    n = lambda *shape: torch.randn(shape, generator=g).requires_grad_()
    u, b, c, log_a = n(3, 150, 40), n(40, 5, 2), n(40, 5, 2), n(40, 5, 2)
    weights = DiagonalWeights(log_a.square() * -0.2, b, c)
    y = diagonal_ssm(u, weights, backend="numba")[0].square().sum()
    return [y.item(), *(t.double().sum().item() for t in torch.autograd.grad(y, [u, b, c, log_a]))]
"""

STARTED = """
import multiprocessing, sys, warnings
warnings.simplefilter("ignore")
from compute import result

if __name__ == "__main__":
    wanted = result()
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(result, range(4)) == [wanted] * 4)
"""

LOGGED = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from compute import result
result(), result()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("numba")
    (tmp_path / "compute.py").write_text(COMPUTE)
    return tmp_path


def python(folder: Path, code: str, *arguments: str, **environment: str) -> tuple[str, str]:
    """What a script in a folder prints and logs."""
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_started_processes_compute_the_same(folder: Path, method: str) -> None:
    assert python(folder, STARTED, method)[0] == "True"


@pytest.mark.slow
def test_compiling_is_said_once_and_not_again_from_the_cache(folder: Path) -> None:
    _, first = python(folder, LOGGED, NUMBA_CACHE_DIR=str(folder / "kernels"))
    _, second = python(folder, LOGGED, NUMBA_CACHE_DIR=str(folder / "kernels"))
    assert first.count("compiling new CPU kernels") == 1
    assert "compiling" not in second


@pytest.mark.slow
def test_without_any_folder_to_write_every_process_compiles(folder: Path) -> None:
    """A read-only installation whose user has no home folder."""
    code = """
from numba.core import caching
for locator in caching.CompileResultCacheImpl._locator_classes:
    locator.from_function = classmethod(lambda *_: None)
""" + LOGGED.replace("result(), result()", "print(len(result()))")
    printed, logged = python(folder, code)
    assert printed == "5"
    assert logged.count("compiled again in every process") == 1


def without(missing: Sequence[str], code: str, *arguments: str) -> str:
    """What code prints where some packages cannot be imported; it must end well."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
    done = subprocess.run(
        [sys.executable, "-c", blocked + code, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.slow
def test_the_tests_of_ops_pass_without_kernels() -> None:
    code = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    tests = str(Path(__file__).parent)
    options = "-q", "-rs", "-p", "no:cacheprovider", "-n", "0"
    printed = without(["numba", "triton"], code, *options, tests)
    reasons = re.findall(r"SKIPPED .*?: (.*)", printed)
    assert any("numba" in reason for reason in reasons)
    assert not [reason for reason in reasons if not re.search("(?i)numba|triton|cuda", reason)]


LAYER_BY_LAYER = """
import torch
from stateline import LanguageModel, ModelConfig
from stateline.cli import main
from stateline.generate.session_state import prefill
from stateline.generate.session import Session
from stateline.layers import LAYERS

tokens = torch.randint(7, (2, 12))
for name in LAYERS:
    model = LanguageModel(ModelConfig(name, vocab_size=7, d_model=16))
    model(tokens).square().sum().backward()
    session = Session(model.eval(), prefill(model, tokens))
    session.step(), session.step()
    print("trained and decoded", name)
print("all", len(LAYERS), "layers")
sys.exit(main(["check", "--backends"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("missing", [["numba"], ["triton"], ["numba", "triton"]])
def test_all_layers_train_and_decode_without(missing: list[str]) -> None:
    printed = without(missing, LAYER_BY_LAYER)
    assert f"all {printed.count('trained and decoded')} layers" in printed
    for name in missing:
        assert f"import failed: {name} is not installed: pip install {name}" in printed
