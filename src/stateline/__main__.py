"""``python -m stateline`` is the command ``stateline``."""

import sys

from stateline.cli import main

if __name__ == "__main__":
    sys.exit(main())
