"""The checks of the types of calls that ``make test-all`` makes."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""An ``int`` is accepted for a ``float``, as type checkers and PEP 484 do."""
