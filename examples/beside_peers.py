"""Time layers, whole updates and generation in turns with the code of other projects.

Run it: python examples/beside_peers.py --peers DIR --models DIR

A line shows milliseconds of processor time on one thread (medians), and for each peer its time over
ours: above 1, we are faster. ``--peers`` is a folder with checkouts of github.com/karpathy/nanoGPT,
HazyResearch/safari, state-spaces/s4 and alxndrTL/mamba.py, named as they are (``git clone --depth 1
https://github.com/karpathy/nanoGPT DIR/nanoGPT``); safari and s4 need the packages einops,
opt_einsum and pytorch_lightning, safari hydra-core, too. ``--models`` is a folder with folders of
published models, as transformers writes them. The fifth peer is the installed transformers. What is
not there is named.

Models of an update have four layers and are trained on the same tokens by the same AdamW with
clipping, in bfloat16 by autocast, ours without looking for numbers that are not finite, as in
training (``all_or_nothing``); ours has rotary positions, nanoGPT learned ones. A prompt is read
until its next token is known: by ``prefill`` and a step of a ``Session``, and by one call of
transformers that computes the last logits alone. A turn of decoding goes on after the turn before,
in the precision of the weights.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateline import InputError, ModelConfig
from stateline.allocator import keep_freed_memory
from stateline.bench.peers import bare_layer, find_peers, find_trained, layer_of
from stateline.bench.timing import Call, interleave, stopwatch
from stateline.generate import Session, prefill
from stateline.models.convert.table import load_pretrained
from stateline.models.factory import make_model
from stateline.ops import all_or_nothing
from stateline.train.environment import environment

LAYERS = {
    "h3": "safari",
    "s4d(output=glu)": "s4",
    "mamba": "mambapy",
    "mamba2": "hf",
    "gated_delta_net": "hf",
    "attention(gated=true, position=rope, qk_norm=offset)": "hf",
}
"""Our layers, and the peer of each."""

UPDATES = ("64/64/32", "128/256/12", "384/512/8", "768/1024/2")
"""Width, length and rows."""

RANDOM = {
    "Llama": {"intermediate_size": 1376, "num_attention_heads": 8, "max_position_embeddings": 4096},
    "Mamba": {"state_size": 16},
    "Mamba2": {"state_size": 64, "num_heads": 16, "head_dim": 64, "n_groups": 1},
}
"""Models of transformers with random weights, 8 layers of width 512, that generate."""

Make = Callable[[], Call]
Case = tuple[str, dict[str, Make]]
"""What is timed, and how the call of each candidate is made: ours first."""


def layers(given: argparse.Namespace) -> Iterator[Case]:
    """Single layers without norm and feed-forward, on four rows."""
    for pattern, peer in LAYERS.items():
        if given.patterns and layer_of(pattern) not in given.patterns:
            continue
        for length in given.lengths:
            x = torch.randn(4, length, given.width, dtype=given.dtype)

            def ours(pattern: str = pattern) -> nn.Module:
                return bare_layer(pattern, given.width)

            def theirs(pattern: str = pattern, peer: str = peer) -> nn.Module:
                found = find_peers([source(given, peer)], [pattern])[layer_of(pattern)][peer]
                return found(pattern, given.width)

            for passes in (forward, with_gradients):
                makes = {"ours": ours, peer: theirs}
                if given.compiled:
                    makes[f"{peer} compiled"] = lambda theirs=theirs: torch.compile(theirs())
                label = f"{pattern}, 4 x {length}, {passes.__name__.replace('_', ' ')}"
                yield label, {n: partial(passes, make, x) for n, make in makes.items()}


def source(given: argparse.Namespace, peer: str) -> str:
    """A peer with the folder of its checkout, if it has one."""
    folder = given.peers / {"nanogpt": "nanoGPT"}.get(peer, peer)
    return peer if peer in ("hf", "mambapy") else f"{peer}={folder}"


def forward(make: Callable[[], nn.Module], x: Tensor) -> Call:
    """A forward pass."""
    layer = make().to(x.dtype)
    return torch.no_grad()(lambda: layer(x))


def with_gradients(make: Callable[[], nn.Module], x: Tensor) -> Call:
    """A forward and a backward pass, to the input and the weights."""
    layer, x = make().to(x.dtype), x.clone().requires_grad_()

    def both() -> None:
        layer.zero_grad()
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(torch.ones_like(y))

    return both


def updates(given: argparse.Namespace) -> Iterator[Case]:
    """Whole updates of transformers: beside nanoGPT, and a Llama beside that of transformers."""
    if given.compiled:
        sys.path.append(str(given.peers / "nanoGPT"))  # torch.compile imports modules by name
    for size in given.sizes:
        width, length, rows = map(int, size.split("/"))
        heads = max(4, width // 64)  # as in nanoGPT's configurations
        pattern = f"attention(n_heads={heads}, position=rope)*4"
        gpt = ModelConfig(pattern, vocab_size=256, d_model=width, tie_embeddings=True)
        llama = {"num_hidden_layers": 4, "hidden_size": width, "num_attention_heads": heads}
        llama |= {"intermediate_size": 8 * round(width / 3), "max_position_embeddings": length}

        def nanogpt(gpt: ModelConfig = gpt, length: int = length) -> nn.Module:
            return find_trained([source(given, "nanogpt")], [gpt.pattern])["nanogpt"](gpt, length)

        def hf(sizes: dict[str, int] = llama) -> nn.Module:
            return HuggingFace(random_model("Llama", **sizes))

        def converted(hf: Callable[[], Any] = hf) -> nn.Module:
            with TemporaryDirectory() as folder:
                hf().model.save_pretrained(folder)
                return load_pretrained(folder).train()

        tokens = torch.randint(256, (rows, length + 1))
        train = partial(update, tokens=tokens, dtype=given.dtype)
        for ours, name, peer in (
            (partial(make_model, gpt), "nanogpt", nanogpt),
            (converted, "hf llama", hf),
        ):
            makes = {"ours": partial(train, ours), name: partial(train, peer)}
            if given.compiled:
                for whose, make in {"ours": ours, name: peer}.items():
                    makes[f"{whose} compiled"] = partial(
                        train, lambda make=make: torch.compile(make())
                    )
            yield f"update {size}", makes


class HuggingFace(nn.Module):
    """A model of transformers that gives logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of all positions."""
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def random_model(family: str, **sizes: int) -> Any:
    """A model of transformers with random weights."""
    code = import_module("transformers")
    config = getattr(code, f"{family}Config")(vocab_size=256, tie_word_embeddings=True, **sizes)
    return getattr(code, f"{family}ForCausalLM")(config)


def update(make: Callable[[], nn.Module], tokens: Tensor, dtype: torch.dtype) -> Call:
    """Forward and backward pass, clipping, and the optimizer's step."""
    torch.manual_seed(0)
    model = make()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)

    def step() -> None:
        with all_or_nothing():
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                logits = model(tokens[:, :-1]).float()
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def generation(given: argparse.Namespace) -> Iterator[Case]:
    """Models with random weights."""
    with TemporaryDirectory() as folder:
        for family, sizes in RANDOM.items():
            with suppress(ImportError):  # each candidate says so
                model = random_model(family, num_hidden_layers=8, hidden_size=512, **sizes)
                model.save_pretrained(Path(folder) / family)
            yield from generating(given, Path(folder) / family)


def published(given: argparse.Namespace) -> Iterator[Case]:
    """The models in a folder."""
    for home in sorted(given.models.glob("*/config.json")):
        yield from generating(given, home.parent)


def generating(given: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """The prompt and the tokens of one row, by the model in a folder."""
    prompt = torch.randint(250, (1, given.prompt), generator=torch.Generator().manual_seed(0))

    def ours() -> tuple[Call, Call]:
        model = load_pretrained(folder, dtype=given.dtype).eval()
        session = Session(model, prefill(model, prompt))
        return (
            lambda: Session.after(model, prompt, room=1).step(),
            lambda: [session.step() for _ in range(given.tokens)],
        )

    @torch.inference_mode()
    def hf() -> tuple[Call, Call]:
        auto = import_module("transformers").AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=given.dtype).eval()
        read = torch.inference_mode()(partial(model, logits_to_keep=1, use_cache=True))
        found = read(prompt)

        def decode() -> None:
            nonlocal found
            for _ in range(given.tokens):
                token = found.logits[:, -1:].argmax(dim=-1)
                kept = found.get("past_key_values"), found.get("cache_params")
                names = "past_key_values", "cache_params"
                state = {n: s for n, s in zip(names, kept, strict=True) if s is not None}
                found = read(token, **state)

        return lambda: read(prompt), decode

    made: dict[str, tuple[Call, Call]] = {}

    def once(name: str, make: Callable[[], tuple[Call, Call]], part: int) -> Call:
        if name not in made:
            made[name] = make()
        return made[name][part]

    for part, what in enumerate((f"prompt of {given.prompt}", f"{given.tokens} tokens")):
        makes = {"ours": partial(once, "ours", ours, part), "hf": partial(once, "hf", hf, part)}
        yield f"{folder.name}, {what}", makes


TABLES = {"layers": layers, "updates": updates, "generation": generation, "published": published}


def measured(case: Case, dtype: str, seconds: float) -> dict[str, Any]:
    """Time a case, print its line, and return it as a record."""
    label, makes = case
    calls, first, absent = dict[str, Call](), dict[str, float](), dict[str, str]()
    for name, make in makes.items():
        try:
            calls[name] = make()
            first[name] = stopwatch(torch.device("cpu"))(calls[name], 1)
        except (InputError, ImportError, OSError) as error:
            calls.pop(name, None)
            absent[name] = next(iter(str(error).splitlines()), type(error).__name__)
    times = {
        name: timing.samples
        for name, timing in interleave(
            calls, seconds=seconds, first=first, clock=time.process_time
        ).items()
    }
    shown, ratios = [], {}
    for name, samples in times.items():
        text = f"{name} {1e3 * statistics.median(samples):.3g}"
        if name != "ours" and "ours" in times:
            pairs = zip(samples, times["ours"], strict=True)
            ratios[name] = round(statistics.median(theirs / own for theirs, own in pairs), 3)
            text += f" ({ratios[name]:.2f})"
        shown.append(text)
    shown += [f"no {name}: {why}" for name, why in absent.items()]
    print(f"{label}, {dtype}: {'; '.join(shown)}", flush=True)
    medians = {name: round(1e3 * statistics.median(s), 4) for name, s in times.items()}
    return {"case": label, "dtype": dtype, "ms": medians, "ratios": ratios, "absent": absent}


def main(given: argparse.Namespace) -> None:
    """Print a line for each case."""
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    sys.path.append(str(given.peers / "mamba.py"))  # a package, which its own files import
    found = []
    for table in given.only:
        for dtype in given.dtypes:
            given.dtype = getattr(torch, dtype)
            if table == "layers" and dtype != "float32":
                continue  # peers have no kernels for it
            found += [measured(case, dtype, given.seconds) for case in TABLES[table](given)]
    if given.record:
        record = {"environment": environment(), "cases": found}
        given.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder of checkouts")
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of models")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--patterns", nargs="+", help="names of layers; by default all")
    parser.add_argument("--width", type=int, default=256, help="of layers")
    parser.add_argument("--sizes", nargs="+", default=UPDATES, help="width/length/rows of updates")
    parser.add_argument(
        "--compiled", action="store_true", help="compiled, too: peers, and our updates"
    )
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="that are decoded in a turn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each candidate")
    parser.add_argument("--record", type=Path, help="file of the figures")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
