"""The command ``stateline``, also as ``python -m stateline``."""

import sys
from importlib.util import find_spec

NEEDED = ("jsonargparse", "rich", "altair")
"""What the commands need besides the library: the packages of the extra ``cli``."""


def main() -> int:
    """Run a command, or say what it needs; the exit code is that of :func:`stateline.cli.main`."""
    if missing := [package for package in NEEDED if find_spec(package) is None]:
        told = f"the commands need {', '.join(missing)}: pip install 'stateline[cli]'"
        sys.stderr.write(f"stateline: error: {told}\n")
        return 2
    from stateline.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
