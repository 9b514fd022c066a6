"""Convert a published model to a folder of ours, or back to its official format.

SRC is a folder or a file in any known format, which is recognised; DST is a new folder.
"""

import json
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from stateline.devices import add_dtype_option
from stateline.errors import InputError


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("src", type=str, help="folder or file with the model")
    parser.add_argument("dst", type=str, help="folder to write, which must not exist")
    parser.add_argument(
        "--to",
        type=str,
        default="stateline",
        help="format to write: stateline, h3, mamba, mamba-hf, gpt_neox, or a model_type of "
        "transformers, such as llama",
    )
    parser.add_argument(
        "--settings",
        type=str,
        default="{}",
        help='JSON object that adds to the model\'s config.json, as {"num_heads": 12} for h3',
    )
    add_dtype_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Convert, and tell what was recognised."""
    given = parser.parse_args(arguments)

    from pathlib import Path

    from stateline.devices import resolve_dtype
    from stateline.files import parse_json_object, user_path
    from stateline.models.convert.table import read_pretrained, tokenizer_files, write_pretrained
    from stateline.runs.folder import check_imports

    settings = parse_json_object(given.settings, "value of --settings")
    if Path(given.dst).exists():
        raise InputError(f"{given.dst} exists: choose another folder, or remove it")
    check_imports(Path(given.src))
    found = read_pretrained(given.src, settings=settings, dtype=resolve_dtype(given.dtype))
    model = found.model
    parameters = sum(p.numel() for p in model.parameters())
    print(f"recognised {found.format}: {json.dumps(model.config.pattern)}")
    print(f"{parameters:,} parameters, d_model {model.d_model}, {model.config.vocab_size:,} tokens")
    if found.ignored:
        print(f"not needed: {len(found.ignored)} tensors, such as {found.ignored[0]}")
    source = user_path(given.src, "model")
    beside = source if source.is_dir() else source.parent
    write_pretrained(model, given.dst, given.to, tokenizer_from=beside)
    if copied := tokenizer_files(beside):
        print(f"copied {', '.join(path.name for path in copied)}")
    print(f"wrote {given.dst} ({given.to})")
    return 0
