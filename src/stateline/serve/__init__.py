"""A server with OpenAI's interfaces for completions, chats and responses, whose states are kept."""

from stateline.serve.app import make_app
from stateline.serve.engine import Engine
from stateline.serve.rows import Limits, Piece, Row
from stateline.serve.run import listen, make_server

__all__ = ["Engine", "Limits", "Piece", "Row", "listen", "make_app", "make_server"]
