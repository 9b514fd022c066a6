"""Keywords of layers that stand in a dataclass, which several layers can share.

Such a layer takes the fields as keywords; :func:`keywords_from` publishes them in the constructor's
signature, where patterns, type checks and documentation read them.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from stateline.settings import checked

LayerT = TypeVar("LayerT")


def keywords_from(settings: type) -> Callable[[type[LayerT]], type[LayerT]]:
    """Class decorator: publish the fields of a settings dataclass as keywords of the constructor.

    The constructor itself takes ``**settings``. ``inspect.signature`` and ``typing.get_type_hints``
    then show each field with its annotation and its default, which all fields have. The dataclass
    itself refuses values that do not fit, too.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     n_heads: int = 4
        >>> @keywords_from(Settings)
        ... class Layer:
        ...     def __init__(self, d_model: int, **settings: Any) -> None:
        ...         self.settings = Settings(**settings)
        >>> str(inspect.signature(Layer))
        '(d_model: int, *, n_heads: int = 4)'
    """

    def publish(kind: type[LayerT]) -> type[LayerT]:
        hints = get_type_hints(settings, include_extras=True)
        keyword = inspect.Parameter.KEYWORD_ONLY
        published = [
            inspect.Parameter(
                field.name, keyword, default=field.default, annotation=hints[field.name]
            )
            for field in fields(settings)
        ]
        constructor: Any = kind.__init__  # its own: a subclass may have another constructor
        itself, first, *own = inspect.signature(constructor).parameters.values()
        parameters = [itself, first, *published, *own[:-1]]  # without **settings
        constructor.__signature__ = inspect.Signature(parameters)
        constructor.__annotations__ = {**constructor.__annotations__, **hints}
        return kind

    own: Any = settings
    if not hasattr(own.__init__, "__wrapped__"):  # several layers may share the settings
        own.__init__ = checked(own.__init__)
    return publish
