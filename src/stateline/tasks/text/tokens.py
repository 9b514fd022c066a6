"""Tokens: predict the next token of a corpus on disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from stateline.data.corpus import Split, open_corpus
from stateline.data.token_text import TokenText
from stateline.data.tokenizer import utf8
from stateline.errors import InputError
from stateline.settings import within
from stateline.tasks.text.corpus import LongTextTask


@dataclass(eq=False, kw_only=True)
class Tokens(LongTextTask):
    """Predict the next token of a corpus that ``stateline data`` has written.

    Scores are bits per byte of text (bits per token divided by bytes per token of the held-out
    text), so they can be compared between tokenizers. The corpus is memory-mapped.

    Args:
        path: Folder of the corpus.
        held_out_tokens: Largest number of tokens of the held-out text to score.
        **options: See :class:`~stateline.tasks.LongTextTask`.

    Raises:
        InputError: If there is no corpus at ``path``, if it is damaged, if nothing is held out, or
            if it is shorter than one window.
    """

    title = "Text in tokens"
    about = (
        "Bits per byte on held-out documents; gzip and xz, which have not seen the training text, "
        "are the baselines to beat. Scores compare only between runs on the same held-out text."
    )
    path: str = ""
    held_out_tokens: Annotated[int, within(2)] = 262_144

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise InputError(
                "the task tokens needs the folder of a corpus: tokens(path=FOLDER), which "
                "stateline data SOURCE --out FOLDER writes"
            )
        self.corpus = open_corpus(self.path)
        self.corpus.check_tokens()
        self.tokenizer, self.vocab_size = self.corpus.tokenizer, self.corpus.tokenizer.vocab_size
        training, held_out = (self.corpus.splits.get(name) for name in ("train", "held_out"))
        if training is None or held_out is None:
            found = ", ".join(self.corpus.splits) or "neither"
            raise InputError(
                f"the corpus {self.path} must have documents to train on and documents that are "
                f"held out, it has {found}: make it with --held_out above 0"
            )
        scored = held_out.text.cut(self.held_out_tokens)
        self.set_texts(training.text, scored, f"the corpus {self.path}", "tokens")
        self._held_out_bytes = self._bytes_of(held_out, scored)
        self.bytes_per_token = self._held_out_bytes / len(scored)

    def _bytes_of(self, split: Split, part: TokenText) -> int:
        """Bytes of the text of ``part``, the beginning of a split; its last document may be cut."""
        whole = len(part.borders) - 1
        whole -= int(part.borders[-1] < split.text.borders[whole])
        cut = part.read(int(part.borders[whole]), len(part))
        return int(split.bytes[:whole].sum()) + len(utf8(self.tokenizer.decode(cut)))

    def describe(self) -> Mapping[str, object]:
        """Source, sizes and hash of the text, and the held-out documents."""
        training, held_out = self.corpus.splits["train"], self.corpus.splits["held_out"]
        count = len(held_out.text.cut(len(self._held_out)).borders) - 1
        return {
            "source": str(self.corpus.folder),
            "n_documents": len(training.names) + len(held_out.names),
            "training_tokens": len(self._training),
            "training_bytes": int(training.bytes.sum()),
            "held_out_tokens": len(self._held_out),
            "held_out_bytes": self._held_out_bytes,
            "bytes_per_token": self.bytes_per_token,
            "vocab_size": self.vocab_size,
            "newlines": self.corpus.newlines,
            "sha256": self.corpus.sha256,
            "tokenizer_sha256": self.corpus.index["tokenizer"],
            "held_out_files": tuple(held_out.names[:count]),
        }
