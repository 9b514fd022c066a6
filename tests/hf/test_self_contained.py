"""A folder that holds the code of its model needs no package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stateline.cli import main
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.reports.format import short_bytes
from tests.hf.conftest import MIXED, Make

PROGRAM = """
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path[:] = [path for path in sys.path if not (Path(path) / "stateline").is_dir()]
assert find_spec("stateline") is None
import torch
from transformers import AutoModelForCausalLM

folder, again = sys.argv[1:]
x, logits, text = torch.load(f"{folder}.pt")
for place in (folder, again):
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    torch.testing.assert_close(model(x).logits, logits, rtol=1e-4, atol=1e-4)
    found = model.generate(x, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found.equal(text), found
    model.save_pretrained(again)
source = sys.modules["stateline"].__spec__.loader
assert type(source).__name__ == "_Sources", source
assert "stateline.tasks" not in sys.modules
from stateline.layers import LAYERS
for name in LAYERS:
    layer, x = LAYERS[name](8), torch.randn(1, 5, 8)
    y, state = layer.forward_chunk(x, layer.init_state(1))
    layer.step(x[:, 0], state)
    y.sum().backward()
"""


def run_without_the_package(folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "", "HOME": str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", PROGRAM, str(folder), str(home / "again")]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def exported(make: Make, tmp_path: Path) -> Path:
    kept = "attention(n_heads=2, d_head=4, position=rope)"
    heads = f"parallel({kept}, gated_delta_net(n_heads=2, d_key=4, expand_v=1), join=hymba)"
    save_model(make(f"{MIXED} rg_lru ladder(lstm, passes=2) {heads}"), tmp_path / "run")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out), "--self-contained"]) == 0
    return out


@torch.no_grad()
def test_a_self_contained_folder_works_where_the_package_is_not_installed(
    exported: Path, tmp_path: Path, make: Make
) -> None:
    import stateline.hf
    from stateline.models.checkpoint import load_model

    model, x = load_model(exported).eval(), torch.randint(1, 61, (2, 9))
    wrapped = stateline.hf.wrap(model)
    text = wrapped.generate(x, max_new_tokens=8, do_sample=False, pad_token_id=0)
    torch.save((x, model(x), text), tmp_path / "out.pt")
    done = run_without_the_package(exported, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trust_remote_code=True" in (exported / "README.md").read_text()


def test_it_holds_the_layers_of_its_model_alone(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported, first = tmp_path / "again", exported
    assert main(["export", str(first), str(exported), "--self-contained"]) == 0
    code = (exported / "modeling_stateline.py").read_text()
    named = set(re.findall(r"^#: stateline\.layers\.(?:mixers|wrappers)\.(\w+) ", code, re.M))
    assert {"h3", "rg_lru", "lstm", "ladder", "parallel"} <= named
    assert not {"rwkv7", "slstm", "s5", "staircase"} & named
    assert "RWKV7" not in code
    size = (exported / "modeling_stateline.py").stat().st_size
    assert f"the code of this model, {short_bytes(size)}" in capsys.readouterr().out


def test_its_files_can_be_read_by_all(exported: Path) -> None:
    mask = os.umask(0o077)
    os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in exported.iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o666 & ~mask}


def test_its_sources_are_those_of_the_package_and_their_hashes_are_checked(
    exported: Path, tmp_path: Path
) -> None:
    code = (exported / "modeling_stateline.py").read_text()
    source = Path(sys.modules["stateline"].__file__ or "").parent
    lines = (source / "layers" / "norm.py").read_text().splitlines()
    assert "\n".join(f"# {line}".rstrip() for line in lines) in code
    assert json.loads((exported / "config.json").read_text())["auto_map"]
    (exported / "modeling_stateline.py").write_text(
        code.replace("# import torch", "# import os", 1)
    )
    torch.save((torch.ones(1, 1), None, None), tmp_path / "out.pt")
    done = run_without_the_package(exported, tmp_path)
    assert done.returncode
    assert "is damaged: get it again" in done.stderr.splitlines()[-1]


def test_layers_from_outside_the_package_are_refused(tmp_path: Path) -> None:
    from stateline.errors import InputError
    from stateline.hf.bundle import bundled_code

    class Foreign(torch.nn.Linear):
        pass

    model = LanguageModel(ModelConfig("h3", vocab_size=11, d_model=8, tie_embeddings=False))
    model.head = Foreign(8, 11)
    with pytest.raises(InputError, match="layers of stateline only, got Foreign of tests"):
        bundled_code(model)
