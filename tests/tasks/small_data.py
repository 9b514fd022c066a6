"""Data sets of a few rows, in the layouts that tasks on files read."""

import gzip
import io
import json
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np


def write_wave(path: Path, samples: np.ndarray, *, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(samples.astype("<i2").tobytes())


def spoken_digits(folder: Path) -> Path:
    """Of two speakers and four digits: recordings 4 (test), 5 (valid) and 10 (train)."""
    for digit in range(4):
        for speaker in ("ann", "bob"):
            for number in (4, 5, 10):
                length = 10 * digit + number + len(speaker)
                sound = 1000 * digit + np.arange(length) * number * (-1 if speaker == "ann" else 1)
                write_wave(folder / "recordings" / f"{digit}_{speaker}_{number}.wav", sound)
    return folder


def speech_commands(folder: Path) -> Path:
    """Two words, each six times: one to score, one to choose by."""
    for word in ("go", "up"):
        for number in range(6):
            write_wave(folder / word / f"{number}.wav", np.arange(20 + number) * (len(word) + 7))
    write_wave(folder / "_background_noise_" / "noise.wav", np.arange(99))
    (folder / "validation_list.txt").write_text("go/4.wav\nup/4.wav\n")
    (folder / "testing_list.txt").write_text("go/5.wav\nup/5.wav\n")
    return folder


def eeg(folder: Path) -> Path:
    """Segments 1, 2 and 69 of each set; one set's names are in capitals, as in the original."""
    for place, name in enumerate("ZONFS"):
        for number in (1, 2, 69):
            values = (np.arange(30) * (place + 1) + number) % 101 - 50
            suffix = "TXT" if name == "N" else "txt"
            path = folder / name / f"{name}{number:03}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(map(str, values)) + "\n")
    return folder


def listops(folder: Path) -> Path:
    """Maxima of two digits, in parentheses."""
    folder.mkdir(exist_ok=True)
    for name in ("train", "val", "test"):
        rows = [f"( ( ( [MAX {n} ) {n // 2} ) ] )\t{n}" for n in range(10)]
        (folder / f"basic_{name}.tsv").write_text("\n".join(["Source\tTarget", *rows]) + "\n")
    return folder


def byte_text(folder: Path) -> Path:
    """Twenty reviews in five folds."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"text": "good" * n if n % 2 else "bad" * n, "label": "np"[n % 2], "fold": n % 5}
        for n in range(1, 21)
    ]
    path = folder / "reviews.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sequential_image(folder: Path, name: str = "t10k", count: int = 20) -> Path:
    """Images of 3 x 2 pixels, in the format of MNIST."""
    folder.mkdir(exist_ok=True)
    pixels = np.arange(count * 6, dtype=np.uint8) * 2
    labels = np.arange(count, dtype=np.uint8) % 10
    sizes = {"images-idx3": [2051, count, 3, 2], "labels-idx1": [2049, count]}
    for (kind, header), values in zip(sizes.items(), (pixels, labels), strict=True):
        with gzip.open(folder / f"{name}-{kind}-ubyte.gz", "wb") as file:
            file.write(np.array(header, ">u4").tobytes() + values.tobytes())
    return folder


def grey_png(pixels: np.ndarray) -> bytes:
    """A PNG image."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def pathfinder(folder: Path) -> Path:
    """Twenty images of 4 x 3 pixels, all different."""
    (folder / "metadata").mkdir(parents=True)
    (folder / "imgs" / "0").mkdir(parents=True)
    rows = []
    for number in range(20):
        pixels = np.arange(12).reshape(4, 3) * (number + 1)
        (folder / "imgs" / "0" / f"sample_{number}.png").write_bytes(grey_png(pixels))
        rows.append(f"imgs/0 sample_{number}.png {number} {number % 2} 1 0.5 2 14")
    for part in (0, 1):
        text = "".join(f"{row}\n" for row in rows[part::2])
        (folder / "metadata" / f"{part}.npy").write_text(text)
    return folder


def retrieval(folder: Path) -> Path:
    """Pairs of texts, of which the equal ones are cited."""
    folder.mkdir(exist_ok=True)
    for part, first in (("train", 0), ("eval", 10), ("test", 20)):
        rows = [f"{n % 2}.0\t{n}\t{n + 1}\tré {n}\t{'ré' if n % 2 else 'b'} {n}" for n in range(8)]
        lines = [row.replace("ré", f"ré{first}") for row in rows]
        (folder / f"new_aan_pairs.{part}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def signals(folder: Path) -> Path:
    """Two classes of short signals with two channels, a folder each."""
    for label in ("calm", "wild"):
        (folder / label).mkdir(parents=True)
        for number in range(6):
            x = np.arange(2.0 * (5 + number)).reshape(-1, 2) * (2 if label == "wild" else 1) % 7
            np.save(folder / label / f"{number}.npy", x)
    return folder


def answers(folder: Path, count: int = 60) -> Path:
    """Sums, with a prompt and an answer each."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = [(n * 7 % 23, n * n % 101) for n in range(count)]
    rows = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a, b in sums]
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "byte_text": byte_text,
    "eeg": eeg,
    "listops": listops,
    "pathfinder": pathfinder,
    "retrieval": retrieval,
    "sequential_image": sequential_image,
    "signals": signals,
    "speech_commands": speech_commands,
    "spoken_digits": spoken_digits,
}


def task_on(name: str, folder: Path, **keywords: object) -> str:
    """A task on small data that are written for it, in batches of four rows."""
    given = {"path": f'"{WRITERS[name](folder / name)}"', "batch_size": 4, **keywords}
    return f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})"
