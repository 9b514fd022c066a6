"""The fixtures of broken input, which other tests of the command line use, too."""

from tests.cli.conftest import folder, prepared, refused

__all__ = ["folder", "prepared", "refused"]
