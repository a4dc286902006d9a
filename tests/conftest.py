"""Shared pieces: a cache and a home of their own, this machine, and the whole path a candidate takes."""

import datetime
import gc
import importlib.util
import json
import math
import os
import secrets
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import drawing
import kept_builds
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch loads: spinning threads slow others down

import chance
import few_kernels
import kept_baselines
import scripted_times
import torch
from cuda_cheats import Cheat

from cuda_l2 import cli, tasks
from cuda_l2.archive import Archive
from cuda_l2.build.cuda import build_all
from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import families_for
from cuda_l2.machine import gpu_present
from cuda_l2.machine.cpu.target import CpuTarget, usable_cores
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.cpu_rounds import _CpuRounds
from cuda_l2.propose._base import FamilySpace
from cuda_l2.records import Build, Candidate, Gemm, Trial
from cuda_l2.rigs.cpu import CpuRig

CHEATS = Path(__file__).with_name("cheats")
KEY = "sk-secret-of-the-tests-0123456789"
"""The API key of every test: never the user's own."""
MOST_WORKERS = 8
OUTCOMES = ("passed", "failed", "error", "skipped")
SAME_GPU = ("gpu", "driver", "nvrtc", "cublas")
"""What of the environment must be alike for an earlier record's files to stay."""
RECORDING = Path(__file__).with_name("data") / "recorded-256x256x256.parquet"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", type=Path, help="write what the GPU tests gave, and the machine, to this file")
    drawing.add_options(parser)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker for every core and one more, since each waits for sandboxes a fifth of its time.

    None beside this process where there is one core, or where tests share a GPU.
    """
    count = min(usable_cores(), MOST_WORKERS)
    return 0 if count < 2 or gpu_present() or "gpu" in (config.option.markexpr or "") else count + 1


def pytest_configure(config: pytest.Config) -> None:
    drawing.prepare(config)
    chance.settle(config.option.draw)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell that runs the tests in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # the other cores have workers of their own
    else:
        kept_builds.prune()


def pytest_report_header(config: pytest.Config) -> str:
    return drawing.header(config)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage goes through it again, nor copies its pages in a fork."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are skipped, not failed, where there is no GPU, unless they were asked for by name."""
    drawing.choose(config, items)
    if gpu_present() or "gpu" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    chance.begin(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    with chance.apart(f"{fixturedef.baseid} {fixturedef.argname}"):
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the GPU tests' result, so that a reader sees when they last passed; by file, so that they may run in parts."""
    path = session.config.getoption("--gpu-record")
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if not path or not reporter:
        return
    from cuda_l2.machine.cuda import target as cuda  # noqa: PLC0415 - needs a GPU

    environment = json.loads(json.dumps(cuda.detect().environment()))
    before = json.loads(path.read_text()) if path.exists() else {}
    alike = {name: before.get("environment", {}).get(name) == environment[name] for name in SAME_GPU}
    files = before.get("files", {}) if all(alike.values()) else {}
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    ran: dict[str, dict[str, list[str]]] = {}
    for outcome in OUTCOMES:
        for report in reporter.stats.get(outcome, []):
            ran.setdefault(report.nodeid.split("::")[0], {}).setdefault(outcome, []).append(report.nodeid)
    for name, outcomes in ran.items():
        not_passed = outcomes.get("failed", []) + outcomes.get("error", [])
        files[name] = {"when": when, **{o: len(outcomes.get(o, [])) for o in OUTCOMES}, "not_passed": not_passed}
    totals = {outcome: sum(file[outcome] for file in files.values()) for outcome in OUTCOMES}
    record = {**totals, "files": dict(sorted(files.items())), "environment": environment}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


@pytest.fixture(scope="session")
def gpu(own_folders: Path) -> Iterator[Any]:
    """The rig of the GPU."""
    from cuda_l2.rigs.cuda import CudaRig  # noqa: PLC0415 - needs a GPU

    with CudaRig() as opened:
        yield opened


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test touches the user's cache or archive; only what was compiled is kept from run to run."""
    folder = tmp_path_factory.mktemp("cuda-l2")
    kept_builds.link(folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_L2_CACHE", str(folder / "cache"))
        patch.setenv("CUDA_L2_HOME", str(folder / "home"))
        patch.setenv("OPENAI_API_KEY", KEY)
        chance.install(patch.setattr)
        scripted_times.install(patch.setattr)
        kept_baselines.install(patch.setattr)
        few_kernels.install(patch.setattr)
        yield folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, where a test asks whether something is built."""
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path / "own-cache"))
    return tmp_path / "own-cache"


@pytest.fixture(scope="session")
def rig(own_folders: Path) -> Iterator[CpuRig]:
    with CpuRig() as opened:
        yield opened


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile is among the baselines."""
    monkeypatch.setitem(kept_baselines.compiling, "now", True)


@pytest.fixture(scope="module")
def many_launches(own_folders: Path) -> Iterator[None]:
    """A CPU's rounds have all the launches that may lie side by side, where cheats of many launches give way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_CpuRounds, "most", scripted_times.REAL["most"])
        yield


@pytest.fixture
def slow_and_fast() -> Iterator[Callable[[str, str], None]]:
    """slow_and_fast(source, source): one candidate takes ten times as long as the other."""

    def script(slow: str, fast: str) -> None:
        scripted_times.seconds_by_source.update({slow.strip(): 20e-5, fast.strip(): 2e-5})

    yield script
    scripted_times.seconds_by_source.clear()


@pytest.fixture(scope="session")
def target(rig: CpuRig) -> CpuTarget:
    return rig.target


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    with Archive(tmp_path / "archive.db") as opened:
        yield opened


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server of the tests' own, as examples/postgres_server.py starts it."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    servers = example("postgres_server")
    if servers.missing():
        pytest.skip(servers.missing())
    with servers.PostgresServer() as server:
        yield server


@pytest.fixture
def database(postgres: Any) -> str:
    """The URL of an empty database on that server."""
    return str(postgres.make_database(f"db_{secrets.token_hex(6)}"))


@pytest.fixture(scope="session")
def judge(rig: CpuRig):  # type: ignore[no-untyped-def]
    """judge(source, task) -> Trial through the real path, with an evaluator of its own, whatever was judged before."""

    def run(source: str, task: str) -> Trial:
        with Evaluator(tasks.parse(task), rig) as evaluator:
            return next(evaluator.evaluate([Candidate(source)]))

    return run


@pytest.fixture
def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """typed(*arguments) of `cuda-l2`, in this process and an empty folder: exit status, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["cuda-l2", *map(str, arguments)])
        status = 0
        try:
            with warnings.catch_warnings(action="ignore"):  # that arguments come from pytest's own process
                cli.main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *capsys.readouterr()

    return command


@pytest.fixture(scope="session")
def build_of(own_folders: Path) -> Callable[[str], Build]:
    """build_of(source): built for Hopper; no GPU is needed."""
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    target = replace(compile_only("sm_90a"), cores=2)
    return cache(lambda source: build_all([Candidate(source)], target)[0])


@pytest.fixture(scope="module")
def judge_on_gpu(gpu: Any) -> Iterator[Callable[[Cheat], Trial]]:
    """judge(cheat) -> Trial through the real path; one evaluator at a time, for the task last asked for."""
    opened: list[Evaluator] = []

    def run(cheat: Cheat) -> Trial:
        task = tasks.parse(cheat.shape)
        if not opened or opened[-1].task != task:
            for evaluator in opened:
                evaluator.close()
            opened[:] = [Evaluator(task, gpu, weights_ahead=True)]
        return next(opened[-1].evaluate([Candidate(cheat.source)], full=cheat.full))

    yield run
    for evaluator in opened:
        evaluator.close()


def example(name: str) -> Any:
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, drawing.ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settled(evaluator: Evaluator) -> Evaluator:
    """The same where it is asked whether kernels are right: none is a new best, which would be looked at twice."""
    evaluator.best_speedup = math.inf
    return evaluator


@pytest.fixture
def space(target: CpuTarget) -> FamilySpace:
    gemm = Gemm.parse("64x48x80")
    return FamilySpace(families_for(gemm, target)[0], gemm, target)


def honest_source() -> str:
    """A slow kernel that is right."""
    return (CHEATS / "honest.c").read_text()
