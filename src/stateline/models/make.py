"""From a configuration to its model."""

from stateline.models.classifier import ClassifierConfig, SequenceClassifier
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

AnyModel = LanguageModel | SequenceClassifier


def make_model(config: ModelConfig) -> AnyModel:
    """A classifier or a language model, with new weights.

    Example:
        >>> type(make_model(ClassifierConfig("s4d", d_model=8, vocab_size=4))).__name__
        'SequenceClassifier'
    """
    if isinstance(config, ClassifierConfig):
        return SequenceClassifier(config)
    return LanguageModel(config)
