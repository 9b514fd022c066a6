"""The law as a check of servers: one prompt has one answer, whatever was asked before or beside it.

``check_server`` asks any server with OpenAI's completions interface the same prompts in several
ways, and measures how far the answers differ.
"""

from stateline.server_check.clauses import BORDERS, distance
from stateline.server_check.client import Answer, Server
from stateline.server_check.report import ServerFinding, ServerReport
from stateline.server_check.run import check_server

__all__ = [
    "BORDERS",
    "Answer",
    "Server",
    "ServerFinding",
    "ServerReport",
    "check_server",
    "distance",
]
