"""Tokens: predict the next token of a corpus on disk."""

from collections.abc import Mapping
from typing import ClassVar

from stateline.data.corpus import Split, open_corpus
from stateline.data.token_text import TokenText
from stateline.data.tokenizer import utf8
from stateline.errors import InputError
from stateline.settings import at_least
from stateline.tasks.text.corpus import Documents, TextTask, eval_lengths


class Tokens(TextTask):
    """Predict the next token of a corpus that ``stateline data`` has written.

    Scores are bits per byte of text (bits per token divided by bytes per token of the held-out
    text), so they can be compared between tokenizers. The corpus is memory-mapped.

    Args:
        seed: Fixes every batch.
        path: Folder of the corpus.
        length: Tokens in a training window.
        batch_size: Windows in a training batch.
        documents: ``"join"`` reads them as one long text. With ``"separate"``, windows end with
            their document, and carried state is reset at the start of each document. With
            ``"pack"``, too, but a row holds several documents, or parts of them, so that few
            positions are empty: they are packed by best fit, or with carried state one follows the
            other.
        held_out_tokens: Largest number of tokens of the held-out text to score.
        longest: Score at ``length``, at its doublings up to this length, and at it; by default at
            ``length`` and four times ``length``.
        carried: Score the held-out text in ``batch_size`` rows with carried state, as models with a
            memory are scored, instead of in windows that each begin with an empty state.

    Raises:
        InputError: If there is no corpus at ``path``, if it is damaged, if nothing is held out, or
            if it is shorter than one window.
    """

    title = "Text in tokens"
    about = (
        "Bits per byte on held-out documents; gzip and xz, which have not seen the training text, "
        "are the baselines to beat. Scores compare only between runs on the same held-out text."
    )
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 600,
        "lr": 4e-3,
        "schedule": "cosine",
    }

    def __init__(
        self,
        seed: int = 0,
        *,
        path: str = "",
        length: int = 256,
        batch_size: int = 16,
        documents: Documents = "join",
        held_out_tokens: int = 262_144,
        longest: int | None = None,
        carried: bool = False,
    ) -> None:
        at_least(1, length=length, batch_size=batch_size)
        at_least(2, held_out_tokens=held_out_tokens)
        if not path:
            raise InputError(
                "the task tokens needs the folder of a corpus: tokens(path=FOLDER), which "
                "stateline data SOURCE --out FOLDER writes"
            )
        self.seed, self.batch_size, self.documents = seed, batch_size, documents
        self.train_length, self.eval_lengths = length, eval_lengths(length, longest)
        self.carried = carried
        self.corpus = open_corpus(path)
        self.corpus.check_tokens()
        self.tokenizer, self.vocab_size = self.corpus.tokenizer, self.corpus.tokenizer.vocab_size
        training, held_out = (self.corpus.splits.get(name) for name in ("train", "held_out"))
        if training is None or held_out is None:
            found = ", ".join(self.corpus.splits) or "neither"
            raise InputError(
                f"the corpus {path} must have documents to train on and documents that are held "
                f"out, it has {found}: make it with --held_out above 0"
            )
        scored = held_out.text.cut(held_out_tokens)
        self._training, self._held_out = training.text, scored
        if documents == "join":
            self._training, self._held_out = training.text.joined(), scored.joined()
        windows = self._training.borders[1:] - self._training.borders[:-1]
        needed = length + 1 if len(windows) == 1 and documents != "pack" else 2
        if windows.max() < needed or scored.borders.max() < 2:
            raise InputError(
                f"the corpus {path} must give {needed} tokens in a row to train on and 2 to hold "
                f"out, got {windows.max()} and {len(scored)}: give more text or lower length"
            )
        self._held_out_bytes = self._bytes_of(held_out, scored)
        self.bytes_per_token = self._held_out_bytes / len(scored)

    def _bytes_of(self, split: Split, part: TokenText) -> int:
        """Bytes of the first part of a split, with the part of a document that is cut."""
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
