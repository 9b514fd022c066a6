"""Write a trained model as a folder that Hugging Face transformers reads.

RUN is the folder of a language model, a run or a checkpoint; DST is a new folder, with the weights,
the tokenizer and a model card.
"""

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from stateline.devices import add_dtype_option
from stateline.errors import InputError


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", type=str, help="folder of a trained model, a run or a checkpoint")
    parser.add_argument("dst", type=str, help="folder to write, which must not exist")
    parser.add_argument(
        "--max_shard_size", type=str, default="5GB", help="largest file of weights, as 500MB"
    )
    parser.add_argument(
        "--remote_code",
        action="store_true",
        help="add a file that trust_remote_code=True loads; stateline must still be installed",
    )
    add_dtype_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Write the folder, and tell what is in it."""
    given = parser.parse_args(arguments)

    from stateline.files import user_path
    from stateline.runs.folder import check_imports

    check_imports(user_path(given.run, "model"))
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "stateline export needs the package transformers: install stateline[hf]"
        ) from error

    from stateline.devices import resolve_dtype
    from stateline.hf import export

    transformers.utils.logging.disable_progress_bar()
    files = export(
        given.run,
        given.dst,
        dtype=resolve_dtype(given.dtype),
        max_shard_size=given.max_shard_size,
        remote_code=given.remote_code,
    )
    print(f"wrote {given.dst}: {', '.join(files)}")
    if "tokenizer.json" not in files:
        print("without a tokenizer: the model reads token numbers")
    return 0
