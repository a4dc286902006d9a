"""The mutation operators do what their names say, and the sample of mutants is fixed, distinct and large enough."""

import dataclasses
import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cuda_cheats import ACCEPTED
from mutation import on_gpu, report, sampling
from mutation.operators import GROUPS, OPERATORS
from mutation.report import Judged
from mutation.sampling import PLAIN_QUOTAS, QUOTAS, Mutant, enumerate_mutants, equivalents, ordered, select
from mutation.source import Source
from mutation.subjects import CPU_SUBJECTS, SUBJECTS, TASK_SUBJECTS, Subject
from verify_the_verifier import Book

from cuda_l2.build.cuda import build_all
from cuda_l2.contract import parse_cuda, plan_cuda
from cuda_l2.evaluator import Evaluator
from cuda_l2.machine.cuda.target import CudaTarget, compile_only
from cuda_l2.records import Build, BuildStatus, Candidate

SMS = 132
LEAST_MUTANTS, LEAST_OF_SYNCHRONISATION = 240, 70
LEAST_OF_A_SUBJECT, LEAST_OF_A_TASK = 150, 100
subjects = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)

KERNEL = """/* cuda-l2
target = "cuda"
arch = "sm_90a"

[[workspace]]
name = "sums"
bytes = "4 * m * n"
kind = "persistent"

[[tensor_map]]
name = "map_a"
tensor = "a"
dims = ["k", "m"]
strides = ["2 * k"]
box = [64, 64]
swizzle = "128B"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 64)"]
block = [128]
shared_bytes = 4096
args = ["map_a", "sums", "m", "n"]
edge = "plain"
*/
#define DEV static __device__ __forceinline__
// Arrives at a barrier: __syncthreads() in a comment is none.
DEV void wait_for(unsigned bar, unsigned parity) {
  asm volatile("mbarrier.try_wait.parity.shared.b64 p, [%0], %1;" ::"r"(bar), "r"(parity) : "memory");
}
DEV void store_row(float *to, int row, int col) { to[row * 64 + col] = 0; }
extern "C" __global__ void gemm(float *out, int m, int n) {
  unsigned parity = 0;
  const int row = blockIdx.y * 16 + threadIdx.y, col = blockIdx.x * 16 + threadIdx.x;
  if (row >= m) return;
  for (int i = 0; i < n; i++) {
    wait_for(full + s * 8, parity);
    parity ^= 1;
    __syncthreads();
  }
  store_row(out, row, col);
}
"""


PLAIN = """/* cuda-l2
target = "cpu"
*/
#define TERM(x) \\
    do { /* x + x */ \\
        sum += x + y; \\
    } while (0)
static inline void store(float *to, float x) { *to = x; }
void gemm(const float *a, float *c, long n) {
    for (long j = 0; j + LANES <= n; j += LANES) store(c + j, a[j]);
}
"""


@pytest.fixture(scope="module")
def target() -> CudaTarget:
    return compile_only("sm_90a")


def edits(name: str) -> list[str]:
    """The lines that an operator makes of the kernel above."""
    return [mutant.after for mutant in enumerate_mutants("kernel", KERNEL) if mutant.operator == name]


def test_a_barrier_is_dropped_where_it_stands_and_not_where_a_comment_names_it() -> None:
    (mutant,) = (m for m in enumerate_mutants("kernel", KERNEL) if m.operator == "drop block barrier")
    assert mutant.before == "__syncthreads();"
    assert mutant.source == KERNEL.replace("    __syncthreads();", "    ((void)0);")


def test_helpers_are_known_by_their_ptx_and_not_by_their_names() -> None:
    source = Source(KERNEL)
    assert source.named("wait") == ("wait_for",)
    assert [source.text[c.start : c.end] for c in source.role_calls("wait")] == ["wait_for(full + s * 8, parity)"]
    assert edits("drop mbarrier wait") == ["((void)0);"]


def test_phases_flip_at_the_start_at_the_turn_and_at_the_wait() -> None:
    flipped = ["wait_for(full + s * 8, (parity) ^ 1);", "unsigned parity = 1;", "parity ^= 0;"]
    assert edits("flip phase") == flipped


def test_a_barrier_moves_past_its_neighbour() -> None:
    (moved,) = (m for m in enumerate_mutants("kernel", KERNEL) if m.operator == "move barrier earlier")
    body = moved.source.split("wait_for(full")[1]
    assert body.index("__syncthreads();") < body.index("parity ^= 1;")
    assert moved.source.count("__syncthreads()") == KERNEL.count("__syncthreads()")


@pytest.mark.corpus(3)
@subjects
def test_what_cannot_change_a_result_is_not_tried(subject: Subject, target: CudaTarget) -> None:
    """Bits of a lane that are shifted out, waiting for more groups, announcing bytes late but with the arrival."""
    for mutant in enumerate_mutants(subject.name, subject.candidate(target).source):
        if mutant.operator == "wrong lane":
            for bit, shift, number in re.findall(r"\([\w.]+ \^ (\d+)\) (>>|/) (\d+)", mutant.after):
                assert int(bit) == (1 << int(number) if shift == ">>" else int(number)), mutant.after
        elif mutant.operator == "ring one stage short or stuck":
            assert "wait" not in mutant.before
        elif mutant.operator == "move barrier later":
            assert not mutant.before.startswith("bar_expect(")


def test_bounds_move_by_one() -> None:
    assert edits("relation off by equality") == ["if (row > m) return;", "for (int i = 0; i <= n; i++) {"]
    assert "for (int i = 0; i < - 1 + n; i++) {" in edits("bound one less or more")
    assert edits("drop predicate") == ["if (true) return;"]


def test_contracts_mutate_and_still_parse() -> None:
    mutants = [m for m in enumerate_mutants("kernel", KERNEL) if m.group == "contract"]
    kinds = {"box", "stride", "dimension", "swizzle", "grid", "block", "edge", "workspace size", "shared memory"}
    assert {mutant.operator for mutant in mutants} >= kinds
    for mutant in mutants:
        parse_cuda(mutant.source)


def test_macros_and_static_functions_of_a_cpu_kernel_are_code() -> None:
    made = {(mutant.operator, mutant.after) for mutant in enumerate_mutants("plain", PLAIN)}
    assert ("minus for plus", "sum += x - y; \\") in made
    assert ("drop store", "for (long j = 0; j + LANES <= n; j += LANES) ((void)0);") in made
    assert not any("/* x - x */" in after for _, after in made)


def test_a_loop_over_vectors_that_leaves_more_to_the_next_is_no_fault() -> None:
    loops = {after for after in (m.after for m in enumerate_mutants("plain", PLAIN)) if "j + LANES <" in after}
    assert any("<= + 1 + n" in after for after in loops)
    assert not any("< n" in after or "- 1 + n" in after for after in loops)


@pytest.mark.corpus(2)
@pytest.mark.parametrize("subject", TASK_SUBJECTS, ids=lambda subject: subject.name)
def test_mutants_of_a_gpu_task_compile_to_other_machine_code(subject: Subject, target: CudaTarget) -> None:
    """What a GPU then judges: `verify_the_verifier.py --kernels tasks`."""
    original, on = subject.candidate(target).source, dataclasses.replace(target, cores=2)
    assert plan_cuda(original, subject.task, SMS).launches

    def build(texts: Sequence[str]) -> list[Build]:
        return build_all([Candidate(text) for text in texts], on)

    assert len(enumerate_mutants(subject.name, original)) >= LEAST_OF_A_TASK
    quotas = dict.fromkeys(QUOTAS, 0) | {"bounds": 1, "index": 1, "epilogue": 1}
    found = list(select(subject, original, SMS, build, Counter(), quotas))
    assert {mutant.group for mutant, _ in found} == {"bounds", "index", "epilogue"}
    assert all(made.status is BuildStatus.BUILT for _, made in found)


@pytest.mark.skipif(not shutil.which("cc"), reason="needs cc")
@pytest.mark.corpus(2)
@pytest.mark.parametrize("subject", CPU_SUBJECTS, ids=lambda subject: subject.name)
def test_a_cpu_subject_is_accepted_and_one_that_stores_less_is_not(subject: Subject, rig: Any) -> None:
    try:
        original = subject.candidate(rig.target)
    except ValueError as error:
        pytest.skip(str(error))
    mutants = [m for m in enumerate_mutants(subject.name, original.source) if m.operator == "drop store"]
    with Evaluator(subject.task, rig) as evaluator:
        (first,) = evaluator.evaluate([original])
        assert first.status == "measured", first.reason
        others = (next(evaluator.evaluate([Candidate(mutant.source)])) for mutant in mutants)  # until one is found
        assert any(trial.status == "incorrect" for trial in others), "some stores are other operations'"


def test_every_operator_has_a_name_of_its_own_in_its_group_and_finds_a_place(target: CudaTarget) -> None:
    names = [(operator.group, operator.name) for operator in OPERATORS]
    assert len(set(names)) == len(names)
    assert {group for group, _ in names} == set(GROUPS) == set(QUOTAS) == set(PLAIN_QUOTAS)
    sources = [Source(subject.candidate(target).source) for subject in SUBJECTS]
    for operator in OPERATORS:
        assert any(next(iter(operator.edits(source)), None) for source in sources), operator.name


@pytest.mark.corpus(3)
@subjects
def test_a_subject_has_a_contract_for_its_shape_and_operands_of_a_type(subject: Subject, target: CudaTarget) -> None:
    gemm = subject.task
    assert "other operand type" in {m.operator for m in enumerate_mutants("kernel", subject.candidate(target).source)}
    assert parse_cuda(subject.candidate(target).source).plan(gemm, SMS).launches


@pytest.mark.corpus(3)
@subjects
def test_mutants_are_many_different_and_the_same_every_time(subject: Subject, target: CudaTarget) -> None:
    text = subject.candidate(target).source
    mutants = enumerate_mutants(subject.name, text)
    assert len(mutants) >= LEAST_OF_A_SUBJECT
    assert all(mutant.source != text for mutant in mutants)
    assert len({mutant.source for mutant in mutants}) == len(mutants) == len({mutant.id for mutant in mutants})
    assert [m.id for m in enumerate_mutants(subject.name, text)] == [m.id for m in mutants]


@pytest.mark.corpus(3)
@subjects
def test_ids_stay_when_lines_are_added_elsewhere(subject: Subject, target: CudaTarget) -> None:
    text = subject.candidate(target).source
    longer = text.replace("*/\n", "*/\n// One line more.\n\n", 1)
    kernels = [{m.id for m in enumerate_mutants(subject.name, t) if m.group != "contract"} for t in (text, longer)]
    assert kernels[0] == kernels[1]


def built(folder: Path, code: str) -> Build:
    (folder / code).write_text(code)
    return Build("id", BuildStatus.BUILT, artifact=str(folder / code))


@pytest.mark.full
def test_the_sample_is_large_enough_and_holds_no_machine_code_twice(target: CudaTarget, tmp_path: Path) -> None:
    """With texts for machine code: what compilers would find equal comes on top, and queues are longer than quotas."""
    taken, used = [], Counter[str]()

    def build(texts: Sequence[str]) -> list[Build]:
        return [built(tmp_path, hashlib.sha256(text.encode()).hexdigest()) for text in texts]

    for subject in SUBJECTS:
        taken += [mutant for mutant, _ in select(subject, subject.candidate(target).source, SMS, build, used)]
    groups = Counter(mutant.group for mutant in taken)
    assert len(taken) >= LEAST_MUTANTS
    assert groups["synchronisation"] >= LEAST_OF_SYNCHRONISATION
    assert {mutant.operator for mutant in taken} == {operator.name for operator in OPERATORS}
    assert used == Counter(mutant.operator for mutant in taken)


def test_kernels_that_nothing_launches_make_no_mutants(target: CudaTarget) -> None:
    subject = next(subject for subject in TASK_SUBJECTS if subject.name == "gpu mean")
    text = subject.candidate(target).source
    kernel, unused = (
        text.replace("/ SPLITS;", "/ SPLITS + 1;", 1),
        text.replace("blockIdx.x * 256", "blockIdx.x * 128", 1),
    )
    assert len({text, kernel, unused}) == 3
    builds = build_all([Candidate(each) for each in (text, kernel, unused)], dataclasses.replace(target, cores=2))
    assert len({Path(build.artifact).read_bytes() for build in builds}) == 3
    found = [
        sampling.fingerprint(build, each, subject.task, SMS)
        for build, each in zip(builds, (text, kernel, unused), strict=True)
    ]
    assert found[0] == found[2] != found[1]


def test_mutants_that_do_not_compile_or_compile_to_the_same_are_left_out(tmp_path: Path) -> None:
    subject = Subject("kernel", "none", "64x64x64", {})

    def build(texts: Sequence[str]) -> list[Build]:
        """Sees synchronisation alone, and cannot compile a missing wait."""
        failed = Build("id", BuildStatus.FAILED, reason="no wait")
        barriers = [str(text.count("__syncthreads();")) if "wait_for(full" in text else "" for text in texts]
        return [built(tmp_path, each) if each else failed for each in barriers]

    chosen = [mutant for mutant, _ in select(subject, KERNEL, SMS, build, Counter())]
    code = [mutant for mutant in chosen if mutant.group != "contract"]
    assert [mutant.operator for mutant in code] == ["drop block barrier"]
    assert {mutant.group for mutant in chosen} == {"synchronisation", "contract"}


def test_operators_that_were_used_less_come_first() -> None:
    mutants = enumerate_mutants("kernel", KERNEL)
    first = ordered(mutants, {})["synchronisation"][0].operator
    assert ordered(mutants, {first: 3})["synchronisation"][0].operator != first


def test_equivalent_mutants_have_reasons() -> None:
    assert all(len(reason) > 20 for reason in sampling.equivalents().values())


def test_the_wilson_interval_is_the_textbook_s() -> None:
    assert report.wilson(0, 0) == (0.0, 1.0)
    assert report.wilson(50, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert report.wilson(100, 100) == pytest.approx((0.96301, 1.0), abs=1e-5)
    low, high = report.wilson(0, 10)
    assert low == 0.0
    assert high == pytest.approx(0.27753, abs=1e-5)


def test_the_tally_counts_equivalent_survivors_apart() -> None:
    mutants = [judged("a", "incorrect"), judged("b", "measured"), judged("c", "measured"), judged("d", "timed-out")]
    t = report.tally(mutants, ["b", "d"])
    assert (t.judged, t.killed, t.survived, t.equivalent) == (4, 2, 1, 1)
    assert t.rate == pytest.approx(2 / 3)
    assert "c" in report.survivors(mutants, ["b"]) and "b\n" not in report.survivors(mutants, ["b"])
    table = report.operator_table(mutants, ["b", "d"])
    assert "66.7%" in table.splitlines()[-1]


def judged(where: str, status: str) -> Judged:
    operator: Any = OPERATORS[0]
    return Judged("mutant", where, "0", "64x64x64", status, "", "", 0.1, operator.group, operator.name)


def test_faults_that_few_launches_show_are_launchable_and_differ() -> None:
    found = on_gpu.mutants()
    assert len({mutant.source for mutant in found} | {on_gpu.TEXT}) == len({mutant.id for mutant in found}) + 1 > 100
    for mutant in found:
        assert parse_cuda(mutant.source).plan(on_gpu.SUBJECT.task, SMS).launches


def test_a_mutant_names_its_line() -> None:
    mutant: Mutant = next(m for m in enumerate_mutants("kernel", KERNEL) if m.operator == "drop predicate")
    assert KERNEL.splitlines()[mutant.line - 1].strip() == mutant.before == "if (row >= m) return;"


@pytest.mark.gpu
@subjects
def test_a_subject_is_accepted_and_a_mutant_is_not(subject: Subject, gpu: Any) -> None:
    original = subject.candidate(gpu.target)
    wrong = next(m for m in enumerate_mutants(subject.name, original.source) if m.operator == "other operand type")
    with Evaluator(subject.task, gpu) as evaluator:
        trials = list(evaluator.evaluate([original, Candidate(wrong.source)]))
    assert [trial.status for trial in trials] == ["measured", "imprecise"], [trial.reason for trial in trials]


def test_after_a_stricter_verifier_only_what_was_accepted_is_judged_again(tmp_path: Path) -> None:
    missed, killed = "wave/drop-commit/1", "wave/drop-commit/2"
    same = next(iter(equivalents()))
    for where, status in ((missed, ACCEPTED), (killed, "wrong"), (same, ACCEPTED)):
        book = Book(tmp_path)
        book.version = "of before"
        book._versions = dict.fromkeys(book._versions, "of before")
        book.add(Judged("mutant", where, Candidate(where).id, "64x64x64", status, "", "", 0.1))
    asked = (missed, killed, same)
    assert [Book(tmp_path).known("mutant", where, where) for where in asked] == [False, False, False]
    stricter = Book(tmp_path, stricter=True)
    assert [stricter.known("mutant", where, where) for where in asked] == [False, True, True]
    assert not stricter.known("mutant", killed, "another text")
