"""``python -m stateline.server_check URL`` checks a server with the standard library alone."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from stateline.errors import InputError
from stateline.server_check.run import check_server


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a server, print the report, and return 0, 1 if it is broken, or 2 after an error."""
    parser = argparse.ArgumentParser("python -m stateline.server_check", description=__doc__)
    parser.add_argument("url", help="address of OpenAI's interface, as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="name of the model; by default the first")
    parser.add_argument("--key", help="key of the server; or set STATELINE_KEY")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    given = parser.parse_args(arguments)
    try:
        key = given.key or os.environ.get("STATELINE_KEY") or None
        report = check_server(given.url, given.model, key=key, seed=given.seed)
        if given.json is not None:
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump(report.as_json(), file, indent=2)
    except (InputError, OSError) as error:
        sys.stderr.write(f"stateline: error: {error}\n")
        return 2
    sys.stdout.write(f"{report}\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
