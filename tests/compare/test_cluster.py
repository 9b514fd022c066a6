"""The engine ``ray`` on a real cluster of two nodes on this machine."""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateline.compare import Comparison, plan
from stateline.compare.cluster import Ray, _connect, _work
from stateline.compare.own_code import own_code
from stateline.errors import InputError
from stateline.train.processes import Processes

RECALL = "associative_recall(length=4, batch_size=4)"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="pip install 'stateline[ray]'"
)

SCRIPT = """
import os, sys, time
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
from pathlib import Path
from ray.cluster_utils import Cluster
from stateline.compare import Comparison, News, compare
from stateline.compare.cluster import Ray
from stateline.compare.storage import results_folder
from stateline.runs.results import to_json

class Kill(News):
    "Loses a node as soon as a job on it has made a checkpoint, or after some finished jobs."

    def __init__(self, cluster, node):
        self.cluster, self.node, self.killed, self.done = cluster, node, False, 0

    def finished(self, job, run):
        self.done += 1
        if self.node is not None and self.done == 3:
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.node = None
            print("killed", flush=True)

def main(out, kill, jobs):
    system = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
    options = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**options, "include_dashboard": False, "_system_config": system},
    )
    second = cluster.add_node(**options)
    cluster.wait_for_nodes()
    news = Kill(cluster, second if kill else None)
    with results_folder(out) as (folder, mirror):
        engine = Ray(cluster.address, mirror=mirror)
        results = compare(jobs, folder, news=news, engine=engine, timing="none")
        Path("results.json").write_text(to_json(results))
    cluster.shutdown()
    assert news.node is None

"""


def comparison(**changes: Any) -> str:
    settings = {"d_model": 8, "steps": 40, "protocol": "quick", "train": {"save_every": 10}}
    settings |= changes
    return f"Comparison(['h3', 'lstm', 'attention'], ['{RECALL}*4'], **{settings})"


def on_a_cluster(folder: Path, out: str, *, kill: bool, **changes: Any) -> dict[str, Any]:
    """Compare on two nodes, in a process of its own."""
    call = f"main({out!r}, {kill}, {comparison(**changes)})"
    (folder / "script.py").write_text(f"{SCRIPT}\nif __name__ == '__main__':\n    {call}\n")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("killed" in done.stdout) == kill
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def scores(results: dict[str, Any]) -> list[Any]:
    names = ("model", "seed", "steps", "stopped", "by_length", "by_position")
    return [[run[name] for name in names] for run in results["runs"]]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The scores of 12 jobs on this machine."""
    from stateline.compare import compare
    from stateline.runs.results import to_json

    jobs = eval(comparison(), {"Comparison": Comparison})
    results = compare(jobs, tmp_path_factory.mktemp("local"), workers=0, timing="none")
    assert len(results.runs) == 12
    return scores(json.loads(to_json(results)))


@pytest.mark.slow
@pytest.mark.parametrize(("kill", "remote"), [(False, False), (True, True)])
def test_12_jobs_on_two_nodes_come_to_the_scores_of_this_machine(
    tmp_path: Path, local: list[Any], kill: bool, remote: bool
) -> None:
    out = f"file://{tmp_path}/storage" if remote else str(tmp_path / "shared")
    results = on_a_cluster(tmp_path, out, kill=kill)
    assert scores(results) == local
    if remote:
        assert len(list((tmp_path / "storage" / "runs").glob("*/result.json"))) == 12
        assert json.loads((tmp_path / "storage" / "results.json").read_text()) == results


class Lost(Exception):
    """A node is lost."""


class Inbox:
    """Receives progress; the node is lost at a step."""

    def __init__(self, lost_at: int = -1) -> None:
        self.lost_at, self.steps, self.put = lost_at, list[int](), self

    def remote(self, _: str, metrics: Any) -> None:
        self.steps.append(metrics.step)
        if metrics.step == self.lost_at:
            raise Lost


@pytest.mark.parametrize("remote", [False, True])
def test_a_job_that_was_lost_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, remote: bool
) -> None:
    pytest.importorskip("fsspec")
    (job,) = plan(
        Comparison(
            ["lstm"],
            [RECALL],
            d_model=8,
            steps=12,
            protocol="quick",
            train={"save_every": 4, "log_every": 1, "eval_every": 0},
        )
    )

    def work(name: str, inbox: Inbox) -> Any:
        place = str(tmp_path / name)
        where = f"file://{place}" if remote else place
        return _work(job, where, remote, own_code(), 1, True, inbox)

    with pytest.raises(Lost):
        work("lost", Inbox(lost_at=6))
    again, whole = Inbox(), Inbox()
    resumed = work("lost", again)
    assert again.steps == [5, 6, 7, 8, 9, 10, 11, 12]
    expected = work("whole", whole)
    assert resumed.by_length == expected.by_length
    assert [p.loss for p in resumed.curve] == [p.loss for p in expected.curve]
    assert [path.name for path in sorted((tmp_path / "lost" / "checkpoints").iterdir())] == [
        path.name for path in sorted((tmp_path / "whole" / "checkpoints").iterdir())
    ]


def test_a_job_that_cannot_be_run_gives_its_line(tmp_path: Path) -> None:
    (job,) = plan(Comparison(["lstm"], [RECALL], d_model=8, steps=2, protocol="quick"))
    (tmp_path / "file").write_text("")
    told = _work(job, str(tmp_path / "file"), False, own_code(), 1, False, Inbox())
    assert told.startswith("cannot write ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gpus_per_job": -1},
            "Ray wants gpus_per_job to be a finite number of at least 0 or none",
        ),
        ({"cpus_per_job": 0}, "Ray wants cpus_per_job to be int of at least 1, got 0"),
        ({"retries": -1}, "Ray wants retries to be int of at least 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ray(**changes)


def test_without_ray_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import ExitStack

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'stateline\[ray\]'"):
        _connect(None, ExitStack())


@pytest.mark.usefixtures("unannotated")
def test_a_job_that_takes_no_gpu_does_not_use_one_that_it_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (job,) = plan(Comparison(["lstm"], [RECALL], d_model=8, steps=2, protocol="quick"))
    used: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def begin(*_: object, processes: Processes) -> Any:
        used.append(processes.device.type)
        return nullcontext()

    monkeypatch.setattr("stateline.compare.cluster.begin", begin)
    monkeypatch.setattr("stateline.compare.cluster.run_job", lambda *_: None)
    for on_gpu in (False, True):
        _work(job, "", False, own_code(), 1, on_gpu, None)
    assert used == ["cpu", "cuda"]


@pytest.mark.parametrize(("gpus", "own"), [(4, 1), (0, 0), (0.5, 0)])
def test_a_job_takes_a_gpu_where_a_node_has_one(gpus: float, own: int) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 4, "GPU": gpus}}, {"Alive": False}]
    cluster: Any = SimpleNamespace(nodes=lambda: [n for n in nodes if n["Alive"]])
    assert Ray()._gpus(cluster) == own
    assert Ray(gpus_per_job=0)._gpus(cluster) == 0
    with pytest.raises(InputError, match=r"no node of the cluster has 1 CPUs and 8 GPUs"):
        Ray(gpus_per_job=8)._gpus(cluster)
