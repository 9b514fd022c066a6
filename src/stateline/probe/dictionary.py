r"""A dictionary to memorise, and a key whose value is asked for.

Source: Bick et al., "Retrieval-Aware Distillation for Transformer-SSM Hybrids", 2026, and the code
published with it, whose words are drawn by another package.
"""

from random import Random

from stateline.probe.prompts import Example

WORDS = tuple(
    """
    apple arrow attic badge basin beach berry blade board bread brick bridge broom brush bucket
    cabin cable camel candle canvas carpet castle cattle cedar chain chair chalk cheese cherry
    circle clock cloud clover coast coffee copper corner cotton cradle cream crown curtain daisy
    desert diamond dragon eagle engine fabric falcon feather fence ferry field finger flame flower
    forest garden garlic ginger glass globe glove grape guitar hammer harbor helmet honey horse
    island jacket jungle kettle kitchen ladder lemon lily lizard magnet maple marble meadow melon
    mirror monkey mountain needle ocean olive onion orange oyster paddle palace paper parrot
    pebble pencil pepper pillow planet pocket rabbit ribbon river rocket saddle salmon
    """.split()  # noqa: SIM905
)
"""Words for keys, at least as many as there are values."""

VALUES = 100
"""Values are numbers below this, all different."""


def dictionary(rng: Random, pairs: int) -> Example:
    r"""Draw a dictionary of words and numbers, and a question.

    Example:
        >>> print(dictionary(Random(0), 2).prompt)
        Memorize the following dictionary:
        ...:...
        ...:...
        The value of the key '...' is
    """
    words, values = rng.sample(WORDS, pairs), rng.sample(range(VALUES), pairs)
    lines = [f"{word}:{value}" for word, value in zip(words, values, strict=True)]
    asked = rng.randrange(pairs)
    question = f"The value of the key '{words[asked]}' is"
    prompt = "\n".join(["Memorize the following dictionary:", *lines, question])
    return Example(prompt, (str(values[asked]),))
