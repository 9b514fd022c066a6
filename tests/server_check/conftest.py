from importlib.util import find_spec

NEEDED = ("starlette", "uvicorn", "prometheus_client")
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["test_*.py"]
