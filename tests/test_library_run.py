"""Which kernels of a table are timed on a shape. The rig is a stand-in: there is no GPU here."""

import subprocess
import sys
from dataclasses import replace

import pytest
from made import timing

from cuda_l2.build.build_server import CORES_A_SERVER, BuildServers
from cuda_l2.families._base import families_for
from cuda_l2.library.table import COLD, PLAIN, PROGRAMMATIC, Row, joined, read_table, write_table
from cuda_l2.machine import gpus
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.protocols import CUDA_PROTOCOLS
from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import Build, BuildStatus, Gemm
from cuda_l2.runs.library_run import MOST_CORES, Library, figures, first_builds, headline
from cuda_l2.system.errors import UserError

TARGET = compile_only("sm_90a")
TIMES = {"nn": {PLAIN: 8.0, PROGRAMMATIC: 7.0}, "tn": {PLAIN: 6.0, PROGRAMMATIC: 9.0}}


class StandIn:
    """A rig and its bench; keeps what it is asked to time."""

    target = TARGET
    gpu = "0000:1B:00.0"

    def __init__(self, status: BuildStatus = BuildStatus.BUILT) -> None:
        self.status, self.asked = status, []

    def open(self, gemm, seed, *, both_layouts):
        assert both_layouts
        return self

    def build(self, candidates):
        told = {"artifact": "x"} if self.status is BuildStatus.BUILT else {"reason": "no compiler"}
        return iter([Build(candidate.id, self.status, **told) for candidate in candidates])

    def time_kernels(self, kernels, protocol):
        self.asked.append((protocol.name, list(kernels)))
        found = timing(5.0, {"torch": 25.0}, 0.02, protocol=protocol.name, speedups=())
        return {name: replace(found, candidate=replace(found.candidate, name=name)) for name in kernels}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.fixture
def library(tmp_path) -> Library:
    rows = []
    for layout, times in TIMES.items():
        gemm = Gemm.parse(f"1024x1024x1024:{layout}")
        family = next(family for family in families_for(gemm, TARGET) if family.name == "sm90_wave")
        values = dict(zip((choice.name for choice in family.choices), family.default(gemm, TARGET), strict=True))
        for edge, us in times.items():
            schedule = tuple({**values, "EDGE": int(edge != PLAIN)}.items())
            rows.append(Row(gemm, edge, family.name, schedule, us))
    write_table(tmp_path / "table.csv", rows)
    return Library(tmp_path / "table.csv")


def test_all_kernels_run_offline_and_elsewhere_those_that_would_be_used(library) -> None:
    rig, gemm = StandIn(), Gemm(1024, 1024, 1024)
    protocols = [CUDA_PROTOCOLS[name] for name in ("offline", "server")]
    offline, server = library.time(gemm, protocols, rig)
    assert rig.asked == [
        ("offline", ["tn plain", "nn plain", "nn programmatic", "tn programmatic"]),
        ("server", ["tn plain"]),  # also the fastest of all
    ]
    assert [row.us for row, _, _ in offline] == [6.0, 8.0, 7.0, 9.0]
    timing = headline(server)
    assert timing.candidate and timing.candidate.name == CANDIDATE
    kept = figures(offline)
    assert [(k.layout.value, k.dependent, k.selected_us) for k in kept[:3]] == [
        ("tn", False, 6.0), ("nn", False, 8.0), ("nn", True, 7.0),
    ]  # fmt: skip
    assert kept[1].kernel == kept[2].kernel != kept[0].kernel  # one compiled kernel serves both launches


def test_servers_launch_what_was_chosen_cold(library, tmp_path) -> None:
    warm = read_table(tmp_path / "table.csv")
    cold = [replace(row, edge=COLD, us=12.0 + row.us) for row in warm if row.edge == PLAIN]
    write_table(tmp_path / "both.csv", joined(warm, cold))
    rig, protocols = StandIn(), [CUDA_PROTOCOLS[name] for name in ("offline", "rotating", "server")]
    *_, server = Library(tmp_path / "both.csv").time(Gemm(1024, 1024, 1024), protocols, rig)
    assert [names for _, names in rig.asked] == [
        ["tn plain", "nn plain", "nn programmatic", "tn programmatic"],
        ["tn plain"],
        ["tn cold"],
    ]
    (kept,) = figures(server)
    assert not kept.dependent and kept.selected_us == 18.0
    write_table(tmp_path / "cold.csv", cold)  # nothing else to be had
    rig.asked.clear()
    list(Library(tmp_path / "cold.csv").time(Gemm(1024, 1024, 1024), protocols[:1], rig))
    assert rig.asked == [("offline", ["tn cold", "nn cold"])]


def test_shapes_are_served_in_any_layout_or_not_at_all(library) -> None:
    assert library.serves(Gemm.parse("1024x1024x1024:tn")) and library.serves(Gemm(1024, 1024, 1024))
    assert not library.serves(Gemm.parse("1024x1024x1024:fp16")) and not library.serves(Gemm(64, 64, 64))
    assert len(library.candidates(Gemm(1024, 1024, 1024), StandIn().target)) == 4


def test_a_kernel_that_does_not_build_is_told(library) -> None:
    with pytest.raises(UserError, match="does not build: no compiler"):
        next(library.time(Gemm(1024, 1024, 1024), [CUDA_PROTOCOLS["offline"]], StandIn(BuildStatus.FAILED)))


def test_the_first_shapes_kernels_are_built_before_there_is_a_rig(library, monkeypatch) -> None:
    monkeypatch.setattr(gpus, "architecture", lambda: "")
    assert first_builds(library, [Gemm(1024, 1024, 1024)]) is None, "no GPU"
    monkeypatch.setattr(gpus, "architecture", lambda: "sm_90")
    begun = list[tuple[str, int]]()
    monkeypatch.setattr(BuildServers, "begin", lambda self, found: begun.append((self._target.arch, len(found))))
    monkeypatch.setattr("cuda_l2.runs.library_run.compile_only", lambda arch: replace(compile_only(arch), cores=64))
    builders = first_builds(
        library, [Gemm(64, 64, 64), Gemm(1024, 1024, 1024), *[Gemm(8, 8, 8)] * 2, Gemm(1024, 1024, 1024)]
    )
    assert builders
    builders.close()
    assert builders._count == MOST_CORES // CORES_A_SERVER
    assert begun == [("sm_90a", 0), ("sm_90a", 4), ("sm_90a", 0), ("sm_90a", 0)]


def test_neither_first_builds_nor_tables_of_a_grid_load_torch() -> None:
    modules = "runs.library_run", "report.bench", "report.grid", "report.grid_summary"
    code = f"import sys, {', '.join(f'cuda_l2.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
