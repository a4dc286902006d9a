"""Build servers: builds in order, and nothing twice that is under way."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cuda_l2.build import build_server
from cuda_l2.build.build_server import CORES_A_SERVER, MOST_A_BATCH, BuildServers
from cuda_l2.families._base import Schedule, families_for
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm
from cuda_l2.system.errors import UserError

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

TARGET = replace(compile_only("sm_80"), cores=2)


class Counted(BuildServers):
    """Keeps what was sent to a process."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.sent: list[str] = []

    def _send(self, sources: Sequence[str]) -> dict[str, Build]:
        self.sent += sources
        return super()._send(sources)


def test_what_is_under_way_is_not_built_again() -> None:
    gemms = [Gemm.parse(shape) for shape in ("64x64x64", "4096x4096x4096")]
    family = families_for(gemms[0], TARGET)[0]
    schedules = (Schedule(family, gemm, TARGET, family.default(gemm, TARGET)) for gemm in gemms)
    first, second = (family.render(schedule) for schedule in schedules)
    servers = Counted()
    try:
        ahead = servers.build([first, second])
        builds = list(servers.build([second, first, second]))
        assert servers.sent == [first.source, second.source]
        assert [build.candidate_id for build in builds] == [second.id, first.id, second.id]
        assert all(build.status is BuildStatus.BUILT for build in builds)
        assert list(ahead) == [builds[1], builds[0]]
    finally:
        servers.close()


def test_what_was_built_is_sent_again_only_if_it_is_gone(monkeypatch, tmp_path) -> None:
    sent: list[str] = []

    def send(_: BuildServers, sources: Sequence[str]) -> dict[str, Build]:
        sent.extend(sources)
        if "unanswered" in sources:
            raise UserError("a build process ended before its answer")
        if "refused" in sources:
            return {"refused": Build("refused", BuildStatus.REFUSED, "by a rule")}
        for source in sources:
            (tmp_path / source).touch()
        return {source: Build(source, BuildStatus.BUILT, artifact=str(tmp_path / source)) for source in sources}

    monkeypatch.setattr(BuildServers, "_send", send)
    for name, most in (("MOST_KEPT", 4), ("FIRST_BATCH", 1), ("MOST_A_BATCH", 1)):
        monkeypatch.setattr(build_server, name, most)
    servers = BuildServers(TARGET)
    names = ("kept", "deleted", "refused", "unanswered")

    def ask() -> list[str]:
        sent.clear()
        for awaited in servers.begin([Candidate(name) for name in names]):
            with contextlib.suppress(UserError):
                awaited()
        return sorted(sent)

    try:
        assert ask() == sorted(names)
        (tmp_path / "deleted").unlink()
        assert ask() == ["deleted", "refused", "unanswered"]
        list(servers.build([Candidate(f"more {i}") for i in range(4)]))
        assert ask() == sorted(names)
    finally:
        servers.close()


def test_what_is_built_is_shared_out_to_all_servers(monkeypatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(BuildServers, "_send", lambda _, sources: sent.append(len(sources)) or {})
    servers = BuildServers(replace(TARGET, cores=3 * CORES_A_SERVER))
    try:
        for count in (2, 6, 18 + 300 * MOST_A_BATCH):
            servers.build([Candidate(f"{count} {i}") for i in range(count)])
    finally:
        servers._pool.shutdown()
    many = [*[2] * 3, *[4] * 3, *[MOST_A_BATCH] * 300]
    assert sorted(sent) == sorted([1, 1, *[2] * 3, *many])


def test_a_machine_without_a_gpu_compiles_on_all_its_cores(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(3 * CORES_A_SERVER)))
    monkeypatch.setattr("cuda_l2.system.control_groups.cpu_quota", lambda: None)
    servers = BuildServers(compile_only("sm_90a"))
    assert servers._count == 3
