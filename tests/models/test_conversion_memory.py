"""Weights are in memory once while they are converted, both ways, also those of many experts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.published import transformers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the peak of a process"),
]

MB = 1 << 20
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_local_experts": 32,
}
"""302 MB of experts in one layer."""

MEASURED = """
import json, re, sys
from pathlib import Path
import torch
from stateline.models.convert import table

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

table.SHARD_BYTES = 32 << 20
source, target = sys.argv[1:]
table.published_config(Path(source))  # imports and reads the names
before = peak()
model = table.load_pretrained(source)
read = peak()
table.write_pretrained(model, target, "mixtral")
written = peak()
weights = sum(p.nbytes for p in model.parameters())
print(json.dumps([weights, read - before, written - before]))
"""


def test_a_layer_with_many_experts_is_in_memory_once_both_ways(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("mixtral", **SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "hf"), str(tmp_path / "back")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    weights, read, written = json.loads(done.stdout)
    print(f"MB: {weights / MB:.0f} of weights, read {read / MB:.0f}, back {written / MB:.0f}")  # noqa: T201
    assert weights > 300e6
    assert read < weights + 40 * MB
    assert written < weights + 100 * MB  # a shard of 32 MiB, and its bytes
