"""``stateline bench``: timings in turns, a busy machine noticed, and a record that reads back."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stateline.bench import memory, peaks
from stateline.bench.memory import peak_bytes
from stateline.bench.peaks import Peaks
from stateline.bench.peers import PEERS, bare_layer, find_peers, find_trained
from stateline.bench.peers_hf import LAYERS
from stateline.bench.show import read_benchmark
from stateline.bench.timing import Timing, interleave, stopwatch, use_threads, watch_load
from stateline.cli import main
from stateline.errors import InputError
from stateline.layers import LSTM
from stateline.models.config import ModelConfig

QUICK = ["--seconds", "0", "--backends", "torch", "--force", "--d_model", "8"]


@pytest.fixture
def brief_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks that are measured, but badly; and no garbage is collected before memory is measured."""
    monkeypatch.setattr("stateline.bench.timing.SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(peaks, "SECONDS", 0.0)
    monkeypatch.setattr(peaks, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(peaks, "MATRIX", {"cpu": 16})
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)


def test_candidates_take_turns_and_each_round_begins_with_another() -> None:
    called: list[str] = []
    timings = interleave({name: lambda n=name: called.append(n) for name in "abc"}, rounds=3)
    assert "".join(called) == "aabbcc" + "abc" + "bca" + "cab"
    assert [len(timing.samples) for timing in timings.values()] == [3, 3, 3]


def test_the_first_call_is_no_sample() -> None:
    calls = []
    timing = interleave({"only": lambda: calls.append(None)}, rounds=4)["only"]
    assert len(calls) == 1 + 1 + 4
    assert len(timing.samples) == 4


def test_median_and_quartiles() -> None:
    timing = Timing(9.0, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert timing.median == 3.0
    assert timing.spread == (2.0, 4.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_busy_core_is_noticed() -> None:
    burn = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with watch_load() as load:
            subprocess.run(["sleep", "1"], check=True)
    finally:
        burn.kill()
        burn.wait()
    assert load.busy


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_counts_what_a_call_frees_again() -> None:
    size = 64 << 20
    found = peak_bytes(lambda: torch.ones(size // 4).sum())
    assert found is not None
    assert 0.9 * size < found < 2 * size


def test_memory_that_pytorch_keeps_for_the_next_tensors_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 15)
    assert memory.available_bytes("cuda") == 55


def test_a_gpu_is_timed_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is not the current device."""
    streams = []

    class Event:
        def __init__(self, **_: object) -> None: ...

        def record(self, stream: object = None) -> None:
            streams.append(stream)

        def elapsed_time(self, _: object) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert stopwatch(torch.device("cuda:1"))(lambda: None, 1) == 2e-3
    assert streams == ["stream of cuda:1"] * 2


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with use_threads(2):
        pass
    assert torch.get_num_threads() == before


def test_the_floor_is_the_slower_of_traffic_and_arithmetic() -> None:
    machine = Peaks(bytes_per_second=10.0, flops_per_second=100.0)
    assert machine.floor(n_bytes=20.0, flops=100.0) == 2.0
    assert machine.floor(n_bytes=20.0, flops=500.0) == 5.0


@pytest.mark.usefixtures("brief_peaks")
@pytest.mark.parametrize(
    "arguments",
    [
        ["ops", "--only", "diagonal_ssm", "fft_conv", "--lengths", "8", "16", "--tokens", "16"],
        ["layers", "--patterns", "h3", "lstm", "--lengths", "8", "--tokens", "16"],
        ["layers", "--decode", "--patterns", "lstm", "--lengths", "4", "--tokens", "8"],
        ["train", "--patterns", "s4d", "--tasks", "copying(max_len=4, context_len=12)"],
        ["decode", "--patterns", "ssm=h3", "lstm", "--lengths", "4", "--batches", "1", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_suite_prints_and_writes_figures(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", *arguments, *QUICK, "--out", str(tmp_path)]) == 0
    found = read_benchmark(tmp_path / f"{arguments[0]}.json")
    assert found.suite == arguments[0]
    assert found.figures
    assert found.bytes_per_second > 0
    assert all(figure.seconds > 0 for figure in found.figures)
    printed = capsys.readouterr().out
    assert "…" not in printed
    channels = 8 if arguments[0] in ("ops", "layers") else 1
    assert ("per position and channel" in printed.replace("\n", " ")) is (channels > 1)
    for figure in found.figures:
        length = 1 if figure.work == "decode" else figure.length
        assert figure.positions == figure.batch * length * channels
    assert all(f"{figure.case}, {figure.work}" in printed for figure in found.figures)
    assert all(figure.candidate in printed for figure in found.figures)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateline.bench.run.measure", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "file").touch()
    assert main(["bench", "ops", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.cpu
def test_the_peak_of_half_precision_is_that_of_float32_where_this_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {"copy": 1.0, "torch.float16": 8.0, "torch.float32": 2.0}
    monkeypatch.setattr(
        peaks, "interleave", lambda calls, **_: {n: Timing(0.0, (seconds[n],)) for n in calls}
    )
    monkeypatch.setattr(peaks, "MATRIX", {"cpu": 16})
    found = peaks.measure_peaks(torch.device("cpu"), torch.float16)
    assert found.flops_per_second == 2 * 16**3 / 2.0


@pytest.mark.usefixtures("brief_peaks")
def test_errors_are_measured_against_float64(tmp_path: Path) -> None:
    arguments = ["ops", "--only", "diagonal_ssm", "--lengths", "64", "--tokens", "64"]
    assert main(["bench", *arguments, *QUICK, "--out", str(tmp_path)]) == 0
    figures = read_benchmark(tmp_path / "ops.json").figures
    assert {figure.work for figure in figures} == {"forward", "forward+backward"}
    for figure in figures:
        assert figure.error is not None
        assert 0 < figure.error < 1e-4


@pytest.mark.cpu
@pytest.mark.usefixtures("brief_peaks")
def test_by_default_no_row_names_a_backend_that_an_op_does_not_have(tmp_path: Path) -> None:
    sizes = ["--lengths", "8", "--seconds", "0", "--force", "--d_model", "8"]
    for suite in (["ops", "--only", "fft_conv"], ["decode", "--patterns", "lstm"]):
        only = ["--batches", "1"] if suite[0] == "decode" else ["--rows", "1"]
        assert main(["bench", *suite, *sizes, *only, "--out", str(tmp_path)]) == 0
    ops, decode = (read_benchmark(tmp_path / f"{name}.json") for name in ("ops", "decode"))
    assert {figure.candidate for figure in ops.figures} == {"torch", "auto"}
    assert ops.skipped == ()
    assert {figure.candidate for figure in decode.figures} == {"lstm [torch]", "lstm [auto]"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops", "--only", "diagonal"], "did you mean 'diagonal_ssm'"),
        (["ops", "--lengths", "0"], "must be at least 1"),
        (["ops", "--backends", "cuda"], "unknown backend 'cuda'"),
        (["ops", "--seconds", "-1"], "seconds must not be negative, got -1"),
        (["ops", "--rows", "0"], "rows must be at least 1, got rows=0"),
        (["ops", "--d_model", "0"], "d_model must be at least 1, got d_model=0"),
        (["ops", "--against", "hf"], "--against is for layers, train, decode, not for ops"),
        (["layers", "--against", "safari"], "needs a checkout"),
        (["layers", "--against", "safary"], "did you mean 'safari'"),
        (["layers", "--against", "safari=tests"], "it has no src/models/sequence/h3.py"),
        (["layers", "--against", "fla"], "needs a checkout"),
        (["layers", "--against", "fla=tests"], "it has no tests/fla/ops/gla/naive.py"),
        (["train", "--decode"], "--decode is for layers, not for train"),
        (["train", "--against", "nanogpt"], "needs a checkout"),
        (["train", "--against", "hf"], "unknown peer with a transformer to train 'hf'"),
        (["train", "--against", "nanogpt", "--patterns", "h3"], "add attention*2 to --patterns"),
        (["decode", "--against", "mambapy"], "unknown peer with a language model 'mambapy'"),
        (["sprint"], "suite must be"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def checkout(folder: Path, file: str, layer: str, arguments: str, result: str) -> Path:
    """A folder with a layer whose code imports a package ``src``, as both real ones do."""
    (folder / "src").mkdir(parents=True)
    (folder / "src" / f"of_{layer}.py").write_text("from torch import nn\n")
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(
        f"from src.of_{layer} import nn\n"
        f"class {layer}(nn.Module):\n"
        f"    def __init__(self, d_model, {arguments}):\n"
        "        super().__init__()\n"
        "    def forward(self, u):\n"
        f"        return {result}\n"
    )
    return folder


def test_layers_of_checkouts_are_peers(tmp_path: Path) -> None:
    s4 = checkout(tmp_path / "a", "models/s4/s4d.py", "S4D", "d_state, dropout", "u.cumsum(-1), 0")
    h3 = "src/models/sequence/h3.py"
    safari = checkout(tmp_path / "b", h3, "H3", "d_state, head_dim", "u.cumprod(1)")
    found = find_peers([f"s4={s4}", f"safari={safari}"], ["h3", "s4d"])
    x = torch.randn(2, 5, 4)
    assert torch.allclose(found["s4d"]["s4"]("s4d", 4)(x), x.cumsum(1))
    assert torch.allclose(found["h3"]["safari"]("h3", 4)(x), x.cumprod(1))
    assert "src" not in sys.modules


NANOGPT = """
from dataclasses import dataclass
from torch import nn

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        print(config)
        self.config, width = config, config.n_embd
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, width),
            "wpe": nn.Embedding(config.block_size, width),
            "h": nn.ModuleList(nn.Linear(width, width) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(width),
        })
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
"""


@pytest.mark.usefixtures("brief_peaks")
def test_the_transformer_of_a_checkout_is_trained_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no name is divided
    (tmp_path / "model.py").write_text(NANOGPT)
    pattern, given = "attention(n_heads=2)*3", f"nanogpt={tmp_path}"
    build = find_trained([given], [pattern])["nanogpt"]
    peer = build(ModelConfig(pattern, vocab_size=7, d_model=8), 5)
    assert peer(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 7)
    assert vars(peer.gpt.config) == {  # type: ignore[union-attr]
        "block_size": 5, "vocab_size": 7, "n_layer": 3, "n_head": 2, "n_embd": 8, "dropout": 0.0
    }  # fmt: skip
    assert "model" not in sys.modules
    assert capsys.readouterr().out == ""
    arguments = ["train", "--patterns", pattern, "--tasks", "copying", "--against", given, *QUICK]
    assert main(["bench", *arguments]) == 0
    assert "nanogpt" in capsys.readouterr().out


def test_a_peer_without_the_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "s4", lambda _: {"s4d": torch.nn.Identity})
    with pytest.raises(InputError, match="'s4' has only s4d: add it to --patterns"):
        find_peers(["s4"], ["h3"])


@pytest.mark.usefixtures("brief_peaks")
def test_a_layer_with_arguments_has_the_peers_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "s4", lambda _: {"s4d": lambda _, d: torch.nn.Linear(d, d)})
    arguments = ["layers", "--patterns", "s4d(output=glu)", "--lengths", "8", "--tokens", "8"]
    assert main(["bench", *arguments, *QUICK, "--against", "s4", "--out", str(tmp_path)]) == 0
    figures = read_benchmark(tmp_path / "layers.json").figures
    assert {x.candidate for x in figures} == {"torch", "s4"}


class Counting(torch.nn.Module):
    """A layer whose state is the number of positions that it has read."""

    def prefill(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.tensor(x.shape[1])]

    def step(self, x: torch.Tensor, state: list[torch.Tensor]) -> None:
        assert x.shape == (2, 1, 8)
        state[0] += 1


@pytest.mark.usefixtures("brief_peaks")
def test_layers_decode_beside_the_peers_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "s4", lambda _: {"lstm": lambda *_: Counting()})
    monkeypatch.setitem(PEERS, "hf", lambda _: {"lstm": lambda *_: torch.nn.Identity()})
    arguments = ["layers", "--decode", "--patterns", "lstm", "--lengths", "4", "--rows", "2"]
    arguments += ["--against", "s4", "hf", "--out", str(tmp_path)]
    assert main(["bench", *arguments, *QUICK]) == 0
    figures = read_benchmark(tmp_path / "layers.json").figures
    assert [(x.work, x.candidate, x.length, x.n_bytes) for x in figures] == [
        ("prefill", "torch", 4, None),
        ("prefill", "s4", 4, None),
        ("decode", "torch", 4, LSTM(8).state_bytes(4) * 2),
        ("decode", "s4", 4, 8),
    ]


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_transformers_prefill_and_decode(name: str) -> None:
    pytest.importorskip("transformers")
    pattern = (
        "attention(gated=true, position=rope, qk_norm=offset)" if name == "attention" else name
    )
    peer, x = LAYERS[name](pattern, 64).eval(), torch.randn(2, 65, 64)
    with torch.no_grad():
        state = peer.prefill(x[:, :64])
        found = peer.step(x[:, 64:], state)
        torch.testing.assert_close(found[:, 0], peer(x)[:, -1], rtol=1e-4, atol=1e-5)
    ours = sum(p.numel() for p in bare_layer(pattern, 64).parameters())
    assert sum(p.numel() for p in peer.parameters()) == pytest.approx(ours, rel=0.05)


@pytest.mark.usefixtures("brief_peaks")
def test_a_long_prefill_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateline.bench.decode.LONG_SECONDS", 0.0)
    arguments = ["decode", "--patterns", "lstm", "--lengths", "4", "--batches", "2"]
    assert main(["bench", *arguments, *QUICK, "--out", str(tmp_path)]) == 0
    prefill, decode = read_benchmark(tmp_path / "decode.json").figures
    assert prefill.low == prefill.seconds == prefill.high == prefill.first
    assert decode.work == "decode"


@pytest.mark.slow
def test_a_peer_prefills_and_decodes_beside_our_models(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arguments = ["decode", "--patterns", "lstm", "--lengths", "4", "--batches", "2"]
    assert main(["bench", *arguments, *QUICK, "--against", "hf", "--out", str(tmp_path)]) == 0
    figures = read_benchmark(tmp_path / "decode.json").figures
    assert [(x.work, x.candidate, x.length) for x in figures] == [
        (work, name, 4)
        for work in ("prefill", "decode")
        for name in ("lstm [torch]", "hf mamba*24")
    ]


@pytest.mark.slow
def test_a_prompt_too_large_for_a_peer_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("stateline.bench.peers_hf.MOST_BYTES", 0)
    arguments = ["decode", "--patterns", "lstm", "--lengths", "4", "--batches", "2"]
    assert main(["bench", *arguments, *QUICK, "--against", "hf", "--out", str(tmp_path)]) == 0
    found = read_benchmark(tmp_path / "decode.json")
    assert [(x.candidate, x.work) for x in found.skipped] == [("hf mamba*24", "prefill")]
    assert ("hf mamba*24", "decode") in [(x.candidate, x.work) for x in found.figures]


def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    path.write_text('{"suite": 3}')
    with pytest.raises(InputError, match="suite"):
        read_benchmark(path)
