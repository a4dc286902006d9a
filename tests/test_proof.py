"""Proving a table: its distinct kernels, the shapes they are proved at, and how a run goes on and ends."""

import csv
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cuda_l2 import contract
from cuda_l2.commands import prove
from cuda_l2.families._base import families_for
from cuda_l2.library import proof as proof_module
from cuda_l2.library.kernels import EDGE, INTERIOR, ProofTask, TableKernel, kernels_of, launched, tasks_for
from cuda_l2.library.proof import PROOF, ProofFile, failures, kernels_csv, proof_of
from cuda_l2.library.table import PLAIN, PROGRAMMATIC, Row, family_of, write_table
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cuda.alone import Job
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.machine.cuda.target import CudaTarget, compile_only, detect
from cuda_l2.records import Accumulate, Gemm, Verdict, VerdictStatus
from cuda_l2.runs import prover
from cuda_l2.verify._base import CheckFailed

TARGET = dataclasses.replace(compile_only("sm_90a"), cores=2)
MACHINE = TARGET.machine
SHAPES = (
    *("64x64x64", "128x128x128:tn", "64x2048x16384:tn", "128x256x12288", "512x256x4096:tn", "1024x1024x1024"),
    *("256x12288x512:tn", "2048x12288x2048", "16384x64x512", "8192x8192x512:nn:fp16", "16384x128x2048"),
    *("1000x1000x1000:tn", "77x90x200", "333x520x1096", "12288x12288x64:tn"),
)


def row(shape: str, family: str, wanted: dict[str, int] | None = None, target: CudaTarget = TARGET) -> Row:
    """A family's default with some choices set, or first valid where the default's is not valid any more."""
    gemm, chosen = Gemm.parse(shape), family_of(family)
    default = dict(zip([choice.name for choice in chosen.choices], chosen.default(gemm, target), strict=True))
    values: list[int] = []
    for choice in chosen.choices:
        valid = chosen.valid_values(gemm, target, values)
        value = {**default, **(wanted or {})}[choice.name]
        assert value in valid or choice.name not in (wanted or {}), (choice.name, valid)
        values.append(value if value in valid else valid[0])
    schedule = tuple(zip([choice.name for choice in chosen.choices], values, strict=True))
    return Row(gemm, launched(schedule), family, schedule, 1.0)


def both_edges(shape: str, family: str) -> list[Row]:
    rows = [row(shape, family)]
    if dict(rows[0].schedule).get("PDL", 1):  # without the choice always
        rows = [row(shape, family, {"EDGE": edge}) for edge in (0, 1)]
    return rows


def blocks(task: ProofTask, sms: int = TARGET.sms) -> int:
    gemm = task.gemm
    x, y, z = contract.parse_cuda(task.candidate.source).plan(gemm, sms).launches[0].grid
    return x * y * z


def families(shape: str) -> list[str]:
    return [family.name for family in families_for(Gemm.parse(shape), TARGET)]


# -- distinct kernels


def test_rows_that_differ_in_their_launch_alone_are_one_kernel() -> None:
    rows = [row("1024x1024x1024", "sm90_wave", {"EDGE": edge, "ORDER": order}) for edge in (0, 1) for order in (0, -1)]
    rows.append(row("1024x1024x1024", "sm90_wave", {"PDL": 0}))
    first, second = kernels_of(rows, TARGET)
    assert len(first.rows) == 4 and first.edges == (PROGRAMMATIC, PLAIN)
    assert second.edges == (PLAIN,) and first.id != second.id


@pytest.mark.parametrize("family", ["sm80_gemm", "sm90_wave", "sm90_persistent"])
def test_a_kernel_of_fp32_sums_is_proved_in_the_fp32_class_wherever_it_is_used(family: str) -> None:
    narrow = {"ACC16": 1} if family == "sm80_gemm" else {"ACC": 16}
    wide = {"ACC16": 0} if family == "sm80_gemm" else {"ACC": 32}
    first, second = (row("2048x2048x512:nn:fp16", family, sums) for sums in (wide, narrow))
    by_sums = kernels_of([first, second], TARGET)
    assert [kernel.accumulate for kernel in by_sums] == [Accumulate.FP32, Accumulate.FP16]
    for kernel in by_sums:
        assert {task.gemm.accumulate for task in tasks_for(kernel, TARGET)} == {kernel.accumulate}


# -- shapes


@pytest.mark.corpus(4)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_kernel_is_proved_at_two_shapes_that_it_serves(shape: str) -> None:
    for family in families(shape):
        (kernel,) = kernels_of(both_edges(shape, family), TARGET)
        inside, edge = tasks_for(kernel, TARGET)
        assert (inside.role, edge.role) == (INTERIOR, EDGE)
        assert inside.gemm in kernel.shapes
        assert edge.gemm != inside.gemm and edge.gemm.flops <= max(inside.gemm.flops, 1 << 34)
        for task in (inside, edge):
            assert contract.kernel_id(task.candidate.source) == kernel.id
            assert blocks(task) > 0
            first = contract.parse_cuda(task.candidate.source)
            plan = first.plan(task.gemm, TARGET.sms)
            assert plan.launches[0].programmatic == (task.edge == PROGRAMMATIC)
        assert {inside.edge, edge.edge} == set(kernel.edges) and inside.edge == kernel.edges[0]


def cut(gemm: Gemm, kernel: TableKernel) -> list[bool]:
    return [size % side != 0 for size, side in zip((gemm.m, gemm.n, gemm.k), kernel.tile, strict=True)]


@pytest.mark.parametrize(
    ("shape", "family", "cuts"),
    [
        ("1000x1000x1000:tn", "sm90_wave", [True, True, True]),
        ("1333x2520x1096", "sm90_persistent", [True, True, True]),
        ("77x90x200", "sm80_gemm", [True, True, True]),
        ("2048x12288x2048", "sm90_persistent", [True, True, False]),  # K is read in whole 64s where it is one
        ("1024x1024x1024", "sm90_wave", [False, False, False]),  # compiled for whole tiles
    ],
)
def test_an_edge_shape_cuts_what_the_kernel_lets_be_cut(shape: str, family: str, cuts: list[bool]) -> None:
    (kernel,) = kernels_of([row(shape, family)], TARGET)
    assert cut(tasks_for(kernel, TARGET)[1].gemm, kernel) == cuts


def test_a_kernel_for_whole_tiles_gets_few_of_them_and_a_ring_that_does_not_come_round() -> None:
    (kernel,) = kernels_of([row("1024x1024x1024", "sm90_wave", {"CK": 1})], TARGET)
    inside, edge = tasks_for(kernel, TARGET)
    stages = kernel.compiled["STAGES"]
    assert inside.gemm.k // kernel.tile[2] > stages >= edge.gemm.k // kernel.tile[2]
    assert blocks(edge) == 1


@pytest.mark.parametrize("shape", ["256x12288x512:tn", "2048x12288x2048", "8192x8192x512", "16384x64x512"])
def test_persistent_blocks_take_several_tiles_at_one_of_the_shapes(shape: str) -> None:
    (kernel,) = kernels_of([row(shape, "sm90_persistent")], TARGET)
    assert any(blocks(task) < blocks(task, 1 << 20) for task in tasks_for(kernel, TARGET))


@pytest.mark.parametrize("family", ["sm90_persistent", "sm80_gemm"])
def test_a_kernel_used_at_huge_shapes_only_is_proved_at_smaller_ones(family: str) -> None:
    (kernel,) = kernels_of([row("16384x16384x16384", family)], TARGET)
    inside, edge = tasks_for(kernel, TARGET)
    assert max(inside.gemm.flops, edge.gemm.flops) < 1 << 37
    assert not any(cut(inside.gemm, kernel))
    assert blocks(inside) >= 64 and (family == "sm80_gemm" or blocks(inside) < blocks(inside, 1 << 20))


def test_the_cheapest_shape_with_whole_tiles_and_enough_blocks_is_inside() -> None:
    tile = {"BM": 128, "BN": 128, "CM": 1, "CN": 1, "KB": 1, "CK": 1, "SL": 1, "PDL": 0, "STAGES": 6}
    shapes = ("256x256x4096", "1024x1024x4096", "1024x2048x4096", "1024x1024x8192")
    (kernel,) = kernels_of([row(shape, "sm90_wave", tile) for shape in shapes], TARGET)
    assert tasks_for(kernel, TARGET)[0].gemm == Gemm.parse("1024x1024x4096")


# -- results


@pytest.fixture(scope="module")
def tasks() -> list[ProofTask]:
    rows = [*both_edges("1024x1024x1024", "sm90_wave"), row("64x64x64", "sm80_gemm")]
    return [task for kernel in kernels_of(rows, TARGET) for task in tasks_for(kernel, TARGET)]


def right(task: ProofTask, status: VerdictStatus = VerdictStatus.CORRECT, reason: str = "") -> proof_module.Proof:
    verdict = Verdict(status, "stress" if reason else "", reason, passed=("instructions", "exact match"))
    return proof_of(task, MACHINE, "2026-01-01T00:00:00+00:00", None, verdict)


def test_what_is_proved_is_not_proved_again(tasks: Sequence[ProofTask], tmp_path: Path) -> None:
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        assert proofs.pending(tasks) == list(tasks)
        proofs.append(right(tasks[0]))
        proofs.append(right(tasks[1], VerdictStatus.UNHYGIENIC, "other bits"))
        proofs.append(proof_of(tasks[2], MACHINE, "2026-01-01T00:00:00+00:00", None, "its process died"))
        assert proofs.pending(tasks) == tasks[2:]  # a fault once found stays, a process that died says nothing
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        assert proofs.pending(tasks) == tasks[2:]
        assert [proof.reason for proof in failures(tasks, proofs)] == ["other bits", "its process died"]
        proofs.append(right(tasks[2]))
        assert [proof.reason for proof in failures(tasks, proofs)] == ["other bits"]
    with ProofFile(tmp_path / PROOF, "another machine") as proofs:
        assert proofs.pending(tasks) == list(tasks)


def test_another_verifier_or_launch_proves_anew(
    tasks: Sequence[ProofTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        proofs.append(right(tasks[0]))
        other = dataclasses.replace(tasks[0], candidate=dataclasses.replace(tasks[0].candidate, source="/* x */"))
        assert proofs.pending([tasks[0], other]) == [other]
    monkeypatch.setattr(proof_module, "rules_version", lambda: "of tomorrow")
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        assert proofs.pending(tasks[:1]) == tasks[:1]


def test_a_damaged_line_costs_itself_only(tasks: Sequence[ProofTask], tmp_path: Path) -> None:
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        proofs.append(right(tasks[0]))
    with (tmp_path / PROOF).open("a") as file:
        file.write('{"kernel": 3}\n{"kernel": "cut sh')
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        proofs.append(right(tasks[1]))
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        assert proofs.pending(tasks) == tasks[2:]


def test_the_proofs_of_parts_are_taken_over_once(tasks: Sequence[ProofTask], tmp_path: Path) -> None:
    """One that died here is replaced; a fault stays, wherever it was found."""
    died = proof_of(tasks[0], MACHINE, "2026-01-01T00:00:00+00:00", None, "its process died")
    faulty = right(tasks[1], VerdictStatus.UNHYGIENIC, "other bits")
    with ProofFile(tmp_path / "part", MACHINE) as part:
        for task in tasks[:3]:
            part.append(right(task))
        part.append(elsewhere := right(tasks[3], VerdictStatus.UNHYGIENIC, "other bits there"))
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        proofs.append(died)
        proofs.append(faulty)
        proofs.append(right(tasks[3]))
        for _ in range(2):
            proofs.take_over(tmp_path / "part")
        assert proofs.pending(tasks) == tasks[4:] and failures(tasks, proofs) == [faulty, elsewhere]
    assert len((tmp_path / PROOF).read_text().splitlines()) == 6


def test_the_table_of_kernels_says_what_was_proved_where(tasks: Sequence[ProofTask], tmp_path: Path) -> None:
    kernels = list(dict.fromkeys(task.kernel for task in tasks))
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        proofs.append(right(tasks[0]))
        proofs.append(right(tasks[1]))
        proofs.append(right(tasks[2], VerdictStatus.UNHYGIENIC, "other bits"))
        first, second = csv.DictReader(kernels_csv(kernels, tasks, proofs).splitlines())
    assert first["kernel"] == tasks[0].kernel.id and first["verdict"] == "correct" and first["rows"] == "2"
    assert (first["interior"], first["interior_launch"]) == (str(tasks[0].gemm), PROGRAMMATIC)
    assert (first["edge"], first["edge_launch"]) == (str(tasks[1].gemm), PLAIN)
    assert first["checks"] == "instructions; exact match"
    assert second["verdict"] == "unhygienic" and "other bits" in second["reason"]


# -- the run


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ProofTask]:
    """One kernel at shapes of 16, 32, 48 and 64 rows, judged by a process that stands in for one with a GPU."""
    monkeypatch.setattr(prover, "MAIN", "stand_in_prover")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.setenv("STAND_IN_MET", str(tmp_path / "met"))
    fixed = {"LOAD": 0, "BM": 16, "BN": 8, "WARPS_M": 1, "WARPS_N": 1, "WARPS_K": 1, "BK": 32}
    rows = [row(f"{m}x64x64", "sm80_gemm", fixed) for m in (16, 32, 48, 64)]
    (kernel,) = kernels_of(rows, TARGET)
    return [ProofTask(kernel, EDGE, each.gemm, PLAIN, each.candidate(TARGET), 0) for each in rows]


def test_a_process_that_dies_costs_its_item_which_is_tried_once_more(small: list[ProofTask]) -> None:
    found: list[proof_module.Proof] = []
    with prover.Prover(TARGET, 2) as running:
        running.run(small, found.append)
    assert {proof.gemm.m: str(proof.status) for proof in found} == dict(
        zip((16, 32, 48, 64), ("correct", "correct", "died", "incorrect"), strict=True)
    )
    by_rows = {proof.gemm.m: proof for proof in found}
    assert by_rows[16].registers > 0 and by_rows[16].passed
    assert by_rows[64].check == "exact match" and "status" in by_rows[48].reason


def test_an_interrupt_keeps_what_is_done(small: list[ProofTask], tmp_path: Path) -> None:
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:

        def keep(proof: proof_module.Proof) -> None:
            proofs.append(proof)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), prover.Prover(TARGET, 1) as running:
            running.run(small[:1] * 1, keep)
    with ProofFile(tmp_path / PROOF, MACHINE) as proofs:
        assert proofs.pending(small) == small[1:]


def test_a_source_that_does_not_build_is_no_proof(small: list[ProofTask]) -> None:
    broken = dataclasses.replace(small[0].candidate, source=small[0].candidate.source + "\nnonsense;\n")
    found: list[proof_module.Proof] = []
    with prover.Prover(TARGET, 1) as running:
        running.run([dataclasses.replace(small[0], candidate=broken)], found.append)
    (proof,) = found
    assert (proof.status, proof.passed) == ("failed", ()) and "error" in proof.reason


@pytest.mark.parametrize(
    "failure", [CheckFailed(VerdictStatus.UNHYGIENIC, "racecheck: a race"), Fault(VerdictStatus.TIMED_OUT, "hangs")]
)
def test_what_the_sanitizer_finds_later_is_the_verdict(small: list[ProofTask], failure: CheckFailed | Fault) -> None:
    item = prover._Item(small[0], verdict=Verdict(VerdictStatus.CORRECT, passed=("exact match", "races")))
    prover._add(item, None)
    assert item.verdict and item.verdict.status is VerdictStatus.CORRECT
    prover._add(item, failure)
    assert item.verdict.status is failure.status and item.verdict.check == "races"
    assert item.verdict.passed == ("exact match",)


def test_candidates_are_watched_alone_where_the_tool_speaks_of_several(
    small: list[ProofTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them it means is said by runs of one each."""
    gemm = small[0].gemm
    plan = contract.parse_cuda(small[0].candidate.source).plan(gemm, TARGET.sms)
    jobs = [Job(f"{number}.cubin", plan, gemm, 2) for number in range(3)]
    alone: list[str] = []

    def findings(tool: Tool, job: Job, limit_s: float) -> str:
        alone.append(job.cubin)
        return "a race" if job.cubin == "1.cubin" else ""

    monkeypatch.setattr(prover.sanitizer, "findings", findings)
    monkeypatch.setattr(prover.sanitizer, "silent", lambda *_: False)
    items = [prover._Item(small[0]) for _ in jobs]
    with prover.Prover(TARGET, 1) as running:
        running._watch(Tool.RACECHECK, list(zip(items, jobs, strict=True)))
        events = [running._events.get_nowait() for _ in jobs]
    assert alone == ["0.cubin", "1.cubin", "2.cubin"]
    assert [getattr(event, "failure") is not None for event in events] == [False, True, False]  # noqa: B009


@pytest.mark.gpu
def test_two_kernels_are_proved_by_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [row("64x64x64", "sm80_gemm", target=detect())]
    rows += [row("512x512x512:tn", "sm90_wave", {"EDGE": edge}, detect()) for edge in (0, 1)]
    write_table(tmp_path / "table.csv", rows)

    def run() -> Iterator[tuple[object, str]]:
        with pytest.raises(SystemExit) as ended:
            prove.command(tmp_path / "table.csv", out=tmp_path / "out", jobs=2)
        yield ended.value.code, capfd.readouterr().out

    for _ in range(2):  # the second has nothing left to do
        ((code, said),) = run()
        assert code == 0, said
        assert "2 kernels, 4 of 4 proofs" in said
        lines = [json.loads(line) for line in (tmp_path / "out" / PROOF).read_text().splitlines()]
        assert len(lines) == 4 and all("races" in line["passed"] and "stress" in line["passed"] for line in lines)
    first, second = csv.DictReader((tmp_path / "out" / "kernels.csv").read_text().splitlines())
    assert first["verdict"] == second["verdict"] == "correct" and int(second["registers"]) > 0
    assert {second["interior_launch"], second["edge_launch"]} == {PLAIN, PROGRAMMATIC}
