"""Convert a published model to a folder of Stateline, or back to its official format.

SRC is a folder or a file in any known format, which is recognised; DST is a new folder.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from stateline.cli.options import add_dtype, user_folder
from stateline.cli.parser import Parser
from stateline.devices import resolve_dtype
from stateline.errors import InputError
from stateline.files import parse_json_object, read_json_object, write_text

if TYPE_CHECKING:
    from stateline.data import Tokenizer
    from stateline.models.convert.table import Pretrained


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("src", "folder or file with the model, also a GGUF file")
    parser.argument("dst", "folder to write, which must not exist")
    parser.option(
        "to",
        str,
        "stateline",
        "format to write: stateline, h3, mamba, mamba-hf, gpt_neox, or a model_type of "
        "transformers, such as llama",
    )
    about = 'JSON object that is added to the model\'s config.json: {"num_heads": 12} for h3'
    parser.option("settings", str, "{}", about)
    add_dtype(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Convert, and print what was recognised."""
    given = parser.parse_args(arguments)
    folder = user_folder(given.src)

    from stateline.data import load_tokenizer
    from stateline.data.huggingface import HuggingFaceTokenizer
    from stateline.data.published_tokenizer import needs_transformers
    from stateline.data.tokenizer import FILE
    from stateline.generate.runs import find_model, own_tokenizer, tokenizer_places
    from stateline.models.convert.table import (
        CONVERTERS,
        read_pretrained,
        tokenizer_files,
        write_pretrained,
    )

    settings = parse_json_object(given.settings, "value of --settings")
    if Path(given.dst).exists():
        raise InputError(f"{given.dst} exists: choose another folder, or remove it")
    source = find_model(folder)
    found = read_pretrained(source, settings=settings, dtype=resolve_dtype(given.dtype))
    model = found.model
    _tell(found)
    beside = next((place for place in tokenizer_places(source) if tokenizer_files(place)), None)
    tokens = dict(found.tokens)
    with TemporaryDirectory() as made:
        family, verb = given.to in CONVERTERS and CONVERTERS[given.to].kinds, "copied"
        own = own_tokenizer(source) if beside and family else None
        if own and find_spec("transformers") is None:
            print(
                "the tokenizer is copied as it is, and transformers may not read it: "
                "pip install 'stateline[hf]', then convert again"
            )
        elif own and beside:
            text = load_tokenizer(own)
            if "eos_token_id" not in tokens:
                if text.begin_of_text is not None:
                    tokens.setdefault("bos_token_id", text.begin_of_text)
                if ends := sorted(text.end_tokens):
                    tokens["eos_token_id"] = ends if len(ends) > 1 else ends[0]
            size = model.config.vocab_size
            if not isinstance(text, HuggingFaceTokenizer) or text.padding >= size:
                tokens.pop("pad_token_id", None)
                _write_for_transformers(text, beside, Path(made))
                beside, verb = Path(made), "wrote"
        if given.to == "stateline" and beside and needs_transformers(beside):
            load_tokenizer(beside).save(Path(made) / FILE)
            beside, verb = Path(made), "wrote"
        write_pretrained(model, given.dst, given.to, tokenizer_from=beside, tokens=tokens)
        if beside:
            print(f"{verb} {', '.join(path.name for path in tokenizer_files(beside))}")
    print(f"wrote {given.dst} ({given.to})")
    return 0


def _tell(found: "Pretrained") -> None:
    """Print what was recognised."""
    model = found.model
    parameters = sum(p.numel() for p in model.parameters())
    print(f"recognised {found.format}: {json.dumps(model.config.pattern)}")
    print(f"{parameters:,} parameters, d_model {model.d_model}, {model.config.vocab_size:,} tokens")
    if found.ignored:
        print(f"not needed: {len(found.ignored)} tensors, such as {found.ignored[0]}")


def _write_for_transformers(text: "Tokenizer", beside: Path, folder: Path) -> None:
    """Write a tokenizer that transformers cannot use as it is beside the model.

    It has no padding token: that of exported tokenizers has no row in models of transformers.
    """
    from stateline.data.huggingface import GENERATION
    from stateline.hf import tokenizer

    tokenizer(text, padding=False).save_pretrained(folder)
    if (beside / GENERATION).is_file():
        kept = read_json_object(beside / GENERATION, "settings of generation")
        kept.pop("pad_token_id", None)
        write_text(folder / GENERATION, json.dumps(kept, indent=2) + "\n")
