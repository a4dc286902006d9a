"""Parts of a command on a Ray cluster that a test starts on the loopback address; without Ray only what needs none."""

import ipaddress
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from pool_servants import FOLDER
from waiting import require_gone, wait_until

from cuda_l2.archive import Archive
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.runs import on_ray
from cuda_l2.system.errors import UserError

PART = """
import os, pathlib, signal, sys, time
out, mode, place = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[1], pathlib.Path(sys.argv[2])
out.mkdir(exist_ok=True)
done = (out / "results.jsonl").read_text().split() if (out / "results.jsonl").exists() else []
print("cuda-l2: goes on after", len(done), file=sys.stderr, flush=True)
while len(done) < 4:
    with (out / "results.jsonl").open("a") as file:
        file.write(f"{mode}-{len(done)}-{os.getpid()}\\n")
    done.append("")
    if mode == "killed" and len(done) == 2:
        while not (place / "results.jsonl").exists() or len((place / "results.jsonl").read_text().split()) < 2:
            time.sleep(0.02)  # until the head has them
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if mode == "hangs" and len(done) == 2 and not (place / "stopped").exists():
        while not (place / "results.jsonl").exists() or len((place / "results.jsonl").read_text().split()) < 2:
            time.sleep(0.02)
        (place / "stopped").write_text(str(os.getppid()))
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(600)
sys.exit(3 if mode == "fails" else 0)
"""
"""A command that stores four lines. killed, hangs: ends or stops the actor that it runs in, once, when the head has two
of them.
"""

DRIVER = """
import json, sys
from pathlib import Path
from cuda_l2.runs import on_ray
on_ray.STEP_S, program, folder, said = 0.1, (sys.executable, "-c", sys.argv[1]), Path(sys.argv[2]), []
with on_ray.cluster("ray") as slots:
    places = {name: folder / f"gpu-{name}" for name in ("ray-0", "ray-1")}
    commands = {
        name: [mode, str(place), "--out", str(place)]
        for (name, place), mode in zip(places.items(), ("killed", "fails"))
    }
    on_ray.share(commands, said.append, program)
    import psutil, ray
    mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listens = [at.laddr.ip for each in mine for at in each.net_connections("inet") if at.status == psutil.CONN_LISTEN]
    has = ray.cluster_resources()
    has = int(has.get("GPU", 0)) or int(has["CPU"])
    print(json.dumps({"slots": len(slots), "said": said, "has": has, "listens": listens}))
"""
HANGS = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
from cuda_l2.runs import on_ray
on_ray.STEP_S, program, place, said = 0.1, (sys.executable, "-c", sys.argv[1]), Path(sys.argv[2]) / "part", []
stopped, now = place / "stopped", [0.0]
def hangs():
    try:
        return Path("/proc", stopped.read_text(), "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
def clock():
    if hangs() and not any("again" in line for line in said):
        now[0] += 2 * on_ray.ANSWER_S
    return now[0]
on_ray.time = SimpleNamespace(monotonic=clock)
with on_ray.cluster("ray"):
    on_ray.share({"ray-0": ["hangs", str(place), "--out", str(place)]}, said.append, program)
    print(json.dumps(said))
"""
"""The clock stands still, but when the actor is seen stopped."""


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(on_ray.MODE, raising=False)


def test_a_cluster_is_not_used_without_tokens(no_token: None) -> None:
    with pytest.raises(UserError, match="RAY_AUTH_MODE=token") as raised, on_ray.cluster("ray://127.0.0.1:1"):
        pass
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:ten"])
def test_a_cluster_that_cannot_be_reached_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'cuda-l2[ray]'")
    monkeypatch.setenv(on_ray.MODE, "token")
    with pytest.raises(UserError, match="cannot be reached") as raised, on_ray.cluster(f"ray://{address}"):
        pass
    assert len(str(raised.value).splitlines()) == 1


def test_without_ray_a_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv(on_ray.MODE, "token")
    with pytest.raises(UserError, match=r"pip install 'cuda-l2\[ray\]'"), on_ray.cluster("ray://127.0.0.1:1"):
        pass


@pytest.mark.parametrize(("asked", "found"), [("ray", True), ("ray://h:1", True), ("auto", False), ("rays", False)])
def test_what_names_a_cluster(asked: str, found: bool) -> None:
    assert on_ray.is_ray(asked) is found


def part(tmp_path: Path, program: str, there: dict[str, bytes] | None = None) -> on_ray.Part:
    arguments = ["--out", str(tmp_path / "elsewhere" / "data")]
    return on_ray.Part(arguments, (sys.executable, "-c", program), (0,), "data", there or {})


def test_a_part_sees_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(on_ray.TOKEN, "hush-hush")
    running = part(tmp_path, "import os, sys; print(sorted(os.environ.values()), file=sys.stderr)")
    while not (said := running.step(0.05))[0]:
        pass
    assert "hush" not in str(said)


def test_a_part_goes_on_from_what_is_there_and_sends_what_changed(tmp_path: Path) -> None:
    program = """
import pathlib, sys
out = pathlib.Path(sys.argv[-1])
print((out / "old").read_text(), file=sys.stderr)
(out / "new").write_text("new")
(out / ".partial").write_text("not yet whole")
"""
    running = part(tmp_path, program, {"data/old": b"kept"})
    lines, files = list[str](), dict[str, bytes]()
    over = False
    while not over:
        said, gained, interrupted, over = running.step(0.05)
        lines += said
        files |= gained
    assert (lines, files, interrupted) == (["kept"], {"data/new": b"new"}, False)


def test_an_interrupted_part_ends_as_by_an_interrupt(tmp_path: Path) -> None:
    running = part(tmp_path, "import sys, time; print('on', file=sys.stderr, flush=True); time.sleep(600)")
    while not running.step(0.05)[0]:
        pass
    running.interrupt()
    over = False
    while not over:
        *_, interrupted, over = running.step(0.05)
    assert interrupted


def loopback(text: str) -> bool:
    """As IPv4 within IPv6 too, which Python 3.11 takes for another address."""
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def test_an_actor_that_is_killed_costs_what_it_had_not_sent(tmp_path: Path) -> None:
    """A real Ray on the loopback address; its other part ends with an error, and is not started again."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'cuda-l2[ray]'")
    pytest.importorskip("psutil")
    done = subprocess.run([sys.executable, "-c", DRIVER, PART, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    killed = (tmp_path / "gpu-ray-0" / "results.jsonl").read_text().split()
    assert [line.rpartition("-")[0] for line in killed] == [f"killed-{number}" for number in range(4)]
    assert killed[0].split("-")[2] == killed[1].split("-")[2] != killed[2].split("-")[2]  # another process went on
    require_gone(killed[0].split("-")[2])  # it ended with its actor
    assert len((tmp_path / "gpu-ray-1" / "results.jsonl").read_text().split()) == 4
    assert sorted({*found["said"], "ray-0: goes on after 0"}) == [  # a line that it had not sent is lost with it
        "ray-0: goes on after 0",
        "ray-0: goes on after 2",
        "ray-0: its process or its node is gone; started again",
        "ray-1: ended with status 3; what it has not measured is measured after",
        "ray-1: goes on after 0",
    ]
    assert found["slots"] == found["has"]
    assert found["listens"] and all(loopback(address) for address in found["listens"])


def test_an_actor_that_hangs_is_seen_beside_others_that_answer() -> None:
    jobs = {name: SimpleNamespace(late=name == "hangs") for name in ("answers", "hangs", "works")}
    assert on_ray.due(["answers"], jobs) == ["answers", "hangs"]
    assert on_ray.due(["hangs"], jobs) == ["hangs"]


def test_an_actor_that_hangs_costs_what_it_had_not_sent(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'cuda-l2[ray]'")
    done = subprocess.run([sys.executable, "-c", HANGS, PART, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "part" / "results.jsonl").read_text().split()
    assert [line.rpartition("-")[0] for line in found] == [f"hangs-{number}" for number in range(4)]
    assert found[0].split("-")[2] == found[1].split("-")[2] != found[2].split("-")[2]
    wait_until(lambda: not Path("/proc", (tmp_path / "part" / "stopped").read_text()).exists())
    assert "ray-0: it gave no answer for 300 s; started again" in json.loads(done.stdout.splitlines()[-1])


POOLED = """
import json, sys, time
from pathlib import Path
from pool_servants import FOLDER, Scripted
from cuda_l2.runs import on_ray, pool
on_ray.STEP_S, folder, said = 0.1, Path(sys.argv[1]), []
with on_ray.cluster("ray"), pool.Pool(["a", "b"], Scripted(folder), said.append, 1e6, pool.on_ray) as opened:
    found = [opened.begin(word) for word in ("one", "dies once", "ends its actor", "no", "environment")]
    print(json.dumps({"answers": [str(each.exception() or each.result()) for each in found], "said": said}))
    held = opened.begin("hangs")
    while not (folder / "hangs").exists():
        time.sleep(0.02)
print((folder / "hangs").read_text().strip())
"""


def test_processes_of_a_cluster_answer_and_what_one_had_in_flight_is_given_out_again(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'cuda-l2[ray]'")
    words = [sys.executable, "-c", POOLED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": FOLDER})
    assert done.returncode == 0, done.stderr
    first, pid = done.stdout.splitlines()[-2:]
    found = json.loads(first)
    seen, *again, error, variables = found["answers"]
    assert again == [seen, seen] and error == "no such word" and variables == "no token"
    lost = sorted(line.partition("its process ")[2] for line in found["said"] if "given out again" in line)
    assert lost == [
        "ended: its actor or its node is gone; what it had in flight is given out again",
        "was killed by signal 9; what it had in flight is given out again",
    ]
    assert any(line.endswith(": one") for line in found["said"])
    require_gone(pid)


@pytest.mark.full
def test_the_candidates_of_several_shapes_are_judged_by_actors(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'cuda-l2[ray]'")
    shapes, archive = ["16x16x16", "16x16x32"], tmp_path / "archive.db"
    words = [sys.executable, str(Path(FOLDER) / "pooled_cli.py"), "optimize", *shapes, "--workers", "ray", "--json"]
    words += ["--target", "cpu", "--policy", "random", "--budget", "1h", "--trials", "2", "--archive", str(archive)]
    variables = {**os.environ, "PYTHONPATH": FOLDER, "POOL_PIDS": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["gemm"] for line in done.stdout.splitlines()] == shapes
    with Archive(archive, reading=True) as read:
        tried = Counter(str(trial.task) for trial in read.trials() if trial.protocol == SEARCH.name)
    assert tried == dict.fromkeys(shapes, 2)
    parents = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name.isdigit()}
    assert parents and all(name.startswith("ray::Held") for name in parents.values())
    for pid in parents:
        require_gone(pid)
