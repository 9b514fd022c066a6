"""Reading sound from wave files."""

import wave
from pathlib import Path

import numpy as np


def read_wave(path: Path) -> np.ndarray:
    """Samples of a wave file (one channel, 16 bits), as fractions of full scale."""
    try:
        with wave.open(str(path)) as file:
            if (file.getnchannels(), file.getsampwidth()) != (1, 2):
                raise ValueError("it must have one channel of 16 bits")
            data = file.readframes(file.getnframes())
    except wave.Error as error:
        raise ValueError(str(error)) from error
    if not data:
        raise ValueError("it has no samples")
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / 2**15
