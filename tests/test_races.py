"""Full verification: delays placed in the text, the shape that the sanitizer looks at, what it says, what both catch."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_cheats import all_cheats
from mutation.subjects import SUBJECTS, Subject

from cuda_l2.build.cuda import build_all
from cuda_l2.build.stress import stressed
from cuda_l2.contract import ContractError, parse_cuda
from cuda_l2.machine import gpu_present
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cuda import alone as cuda_alone
from cuda_l2.machine.cuda import sanitizer
from cuda_l2.machine.cuda.alone import Ended, Job
from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.machine.cuda.target import compile_only, detect
from cuda_l2.records import BuildStatus, Candidate, Gemm, VerdictStatus
from cuda_l2.system.errors import MachineError, UserError
from cuda_l2.tasks.products import CudaReferences, ProductCases
from cuda_l2.verify import races, stress
from cuda_l2.verify._base import CheckFailed
from cuda_l2.verify._cuda import CudaSession, Facilities

CHEATS = {cheat.name: cheat for cheat in all_cheats()}
HONEST = sorted(name for name, cheat in CHEATS.items() if cheat.honest)
RECORDED = Path(__file__).with_name("data") / "sanitizer"
HOPPER = dataclasses.replace(compile_only("sm_90a"), cores=2)
SMS = 132
PATIENCE_S = 1200
"""A guard against hangs, for all kernels of one process under a tool, on a busy machine too."""

# -- delays in the text


def text(body: str, before: str = "") -> str:
    """A kernel with this body, and declarations before it."""
    contract = '/* cuda-l2\ntarget = "cuda"\narch = "sm_80"\n\n[[launch]]\nkernel = "gemm"\ngrid = [1]\nblock = [64]\nargs = []\n*/'
    return f'{contract}\n{before}\nextern "C" __global__ void __launch_bounds__(64) gemm() {{\n{body}\n}}\n'


def kernel_of(source: str) -> str:
    """The kernel's body, numbers of delays left out."""
    return re.sub(r"delay\(\d+\)", "delay()", source[source.index("gemm() {") + 8 :])


D = "cuda_l2_delay();"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("__syncthreads();", f"{{ {D} __syncthreads(); {D} }}"),
        ("if (x) __syncwarp(); else y = 1;", f"if (x) {{ {D} __syncwarp(); {D} }} else y = 1;"),
        ("for (;;) wait(bar, 1);", f"for (;;) {{ {D} wait(bar, 1); {D} }}"),
        ("else cute::cp_async_wait<0>();", f"else {{ {D} cute::cp_async_wait<0>(); {D} }}"),
        ('asm volatile("bar.sync 1, 128;");', f'{{ {D} asm volatile("bar.sync 1, 128;"); {D} }}'),
        ('asm("wgmma.wait_group.sync.aligned 0;");', f'{{ {D} asm("wgmma.wait_group.sync.aligned 0;"); {D} }}'),
        ('asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p));', f'{{ {D} asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p)); {D} }}'),
        ('asm volatile("wgmma.fence.sync.aligned;");', None),
        ("warpgroup_arrive();", None),
        ("int waited = wait_until(x);", None),
        ("(void) await(x);", None),
        ('say("__syncthreads();"); // __syncthreads();', None),
        ("x = y;", None),
    ],
)  # fmt: skip
def test_delays_surround_what_orders_threads_and_nothing_else(body: str, expected: str | None) -> None:
    found = kernel_of(stressed(text(body), 1)).replace(" cuda_l2_late();", "", 1).strip().removesuffix("}").strip()
    assert found == (expected or body)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "poll",
    [
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%0], 1;",
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%0], 1; }",
        "ld.volatile.global.u32 r, [%0];",
    ],
)
def test_even_seeds_leave_polls_as_they_are(poll: str, seed: int) -> None:
    body = kernel_of(
        stressed(text(f'asm volatile("{poll}" :: "r"(x)); asm volatile("mbarrier.arrive _, [%0];");'), seed)
    )
    assert body.count(D) == (4 if seed % 2 else 2)
    assert f'{D} asm volatile("mbarrier.arrive' in body


@pytest.mark.parametrize("seed", [1, 2])
def test_a_loop_of_polls_in_one_statement_has_its_delays_with_every_seed(seed: int) -> None:
    loop = "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared.b64 p, [%0], 1; @p bra DONE; bra WAIT; DONE: }"
    assert kernel_of(stressed(text(f'asm volatile("{loop}" :: "r"(x));'), seed)).count(D) == 2


def test_what_the_text_defines_itself_has_its_delays_inside() -> None:
    defined = 'static __device__ void wait_here(int b) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(b)); }'
    source = stressed(text("wait_here(1);", defined), 1)
    assert kernel_of(source).count("delay()") == 0
    assert source.count("cuda_l2_delay(") == 1 + 2  # its definition, and around the assembly


LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
MAP = """
[[tensor_map]]
name = "map_a"
tensor = "a"
dims = ["k", "m"]
strides = ["2 * k"]
box = [64, 32]
"""


@pytest.mark.parametrize(
    ("statement", "address"),
    [
        (f'asm volatile("{LOAD} [%0], [%1, {{%3, %4}}], [%2];" :: "r"(at(tile)), "l"(map), "r"(bar));', "at(tile)"),
        (f'asm volatile("{LOAD} "\n "[%0], [%1];" : : "r"(ring + s * 8), "l"(map));', "ring + s * 8"),
        (f'asm volatile("{LOAD}.multicast::cluster [%0], [%1];" :: "r"(to), "l"(map));', ""),
        (f'asm volatile("{LOAD} [%1], [%0];" :: "l"(map), "r"(to));', ""),
        (f'asm volatile("{LOAD} [%0], [%1];" :: "l"(to), "l"(map));', ""),
        (f'asm volatile("{LOAD} [%0], [%1];" :: "r"(to += 64), "l"(map));', ""),
        ('asm volatile("cp.async.bulk.commit_group;");', ""),
    ],
)
def test_what_a_tensor_load_overwrites_is_spoiled_before_it(statement: str, address: str) -> None:
    source = text(statement).replace("\n\n[[launch]]", f"\n{MAP}\n[[launch]]", 1)
    body = stressed(source, 1).split("cuda_l2_late();")[-1]
    assert ("cuda_l2_spoil(" in body) == bool(address)
    if address:
        assert body.index(f"cuda_l2_spoil({address});") < body.index("asm volatile")


@pytest.mark.parametrize(
    ("box", "pieces"),
    [("[64, 32]", (16, 256, 16)), ("[16, 16]", (16, 32, 0)), ("[8, 1]", (1, 16, 0))],
)
def test_no_more_is_spoiled_than_the_smallest_box_holds(box: str, pieces: tuple[int, int, int]) -> None:
    other = MAP.replace("map_a", "map_b").replace("[64, 32]", box)
    maps = MAP + other + MAP.replace("map_a", "map_c").replace('"a"', '"c"').replace("[64, 32]", "[8, 1]")
    source = stressed(text("").replace("\n\n[[launch]]", f"\n{maps}\n[[launch]]", 1), 1)
    count, step, turn = pieces
    assert f"i < {count}; i++" in source
    assert f"at + i * {step} + i % 8 * {turn})" in source
    sides = [int(side) for side in box.strip("[]").split(", ")]
    assert (count - 1) * step + 7 * turn + 16 <= 2 * sides[0] * sides[1]


def test_a_box_that_depends_on_the_shape_is_left_alone() -> None:
    load = f'asm volatile("{LOAD} [%0], [%1];" :: "r"(to), "l"(map));'
    maps = MAP.replace("[64, 32]", '["k / 2", 32]')
    source = text(load).replace("\n\n[[launch]]", f"\n{maps}\n[[launch]]", 1)
    assert "cuda_l2_spoil(to)" not in stressed(source, 1)


MULTIPLY = (
    'asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;" '
    ': "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(x + 2 * k), "l"(y));'
)
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;");'
WAIT = 'asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N - 1) : "memory");'


def test_what_wgmma_reads_is_watched_from_its_issue_to_the_wait_that_covers_it() -> None:
    body = kernel_of(stressed(text(MULTIPLY + COMMIT + WAIT), 1)).split("cuda_l2_watch();")[1]
    expected = [
        f"cuda_l2_issued(x + 2 * k, y); {MULTIPLY}",
        f"cuda_l2_committed(); {COMMIT}",
        f"cuda_l2_waits(N - 1); {WAIT}",
    ]
    places = [body.index(each) for each in expected]
    assert places == sorted(places)
    assert "cuda_l2_issued" not in stressed(text(MULTIPLY + COMMIT + WAIT), 1, counts=False)


@pytest.mark.parametrize(
    "body",
    [
        MULTIPLY + COMMIT,  # no wait in the text
        MULTIPLY + WAIT,
        COMMIT + WAIT,
        MULTIPLY.replace('"l"(y)', '"l"(y++)') + COMMIT + WAIT,
        MULTIPLY + COMMIT + WAIT.replace("%0", "%1"),
        f"{MULTIPLY}{COMMIT}{WAIT}".replace('"l"', '"q"'),
    ],
)
def test_nothing_is_watched_where_the_text_does_not_tell_all_of_it(body: str) -> None:
    assert "cuda_l2_watch" not in stressed(text(body), 1)


def test_a_stress_build_keeps_its_contract_and_its_seed_changes_the_text() -> None:
    source = text("__syncthreads();")
    assert parse_cuda(stressed(source, 1)) == parse_cuda(source)
    assert len({stressed(source, seed, counts=counts) for seed in (1, 2) for counts in (True, False)}) == 4


@pytest.mark.corpus(1)
@pytest.mark.parametrize("counts", [True, False])
def test_every_family_and_honest_kernel_builds_with_delays_and_keeps_wgmma_asynchronous(counts: bool) -> None:
    sources = [subject.candidate(HOPPER).source for subject in SUBJECTS] + [CHEATS[name].source for name in HONEST]
    builds = build_all([Candidate(stressed(source, 3, counts=counts)) for source in sources], HOPPER)
    assert [build.reason for build in builds if build.status is not BuildStatus.BUILT] == []
    assert not any(warning for build in builds for warning in build.warnings)
    assert sum("cuda_l2_delay(1)" in stressed(source, 3) for source in sources) >= len(SUBJECTS)
    assert sum("cuda_l2_spoil(dst)" in stressed(source, 3) for source in sources) >= 8
    assert sum("cuda_l2_issued(x, y)" in stressed(source, 3) for source in sources) >= 4


# -- the shape that is looked at


def session(shape: str, source: str, refuse: Callable[[Gemm], bool] = lambda gemm: False) -> Any:
    """As much of a session as choosing a shape needs."""
    contract = parse_cuda(source)

    def plan_for(gemm: Gemm) -> Any:
        if refuse(gemm):
            raise ContractError("not this one")
        return contract.plan(gemm, SMS)

    return SimpleNamespace(task=Gemm.parse(shape), plan_for=plan_for, sms=SMS)


FMA = CHEATS["honest_fma"].source


@pytest.mark.parametrize("shape", ["8x8x8", "2048x2048x2048", "64x16384x8192"])
def test_a_small_shape_is_looked_at_itself(shape: str) -> None:
    assert races.smaller(session(shape, FMA)) == Gemm.parse(shape)


@pytest.mark.parametrize("shape", ["8192x8192x8192", "16384x12288x16383:tn", "12288x16384x5000", "8191x16381x12289"])
def test_a_large_shape_is_replaced_by_one_that_is_laid_out_alike(shape: str) -> None:
    gemm, found = Gemm.parse(shape), races.smaller(session(shape, FMA))
    assert found.flops <= gemm.flops / 4
    assert (found.layout, found.accumulate) == (gemm.layout, gemm.accumulate)
    for size, less in zip((gemm.m, gemm.n, gemm.k), (found.m, found.n, found.k), strict=True):
        assert [size % side == 0 for side in races.SIDES] == [less % side == 0 for side in races.SIDES]
    assert found.k >= 2048
    assert -(-found.m // 16) * -(-found.n // 16) >= 2 * SMS


def test_where_the_contract_takes_no_other_shape_the_shape_itself_is_looked_at() -> None:
    gemm = Gemm.parse("8192x8192x8192")
    assert races.smaller(session(str(gemm), FMA, lambda other: other != gemm)) == gemm


def test_a_smaller_shape_has_the_same_kernels_and_enough_blocks() -> None:
    source = FMA.replace('"cdiv(m, 16)"]', '"cdiv(m, 16)"]\nshared_bytes = "16 * (k / 8192)"')
    found = races.smaller(session("8192x8192x16384", source))
    assert found.k == 16384  # a shorter K would take another amount of shared memory
    persistent = races.smaller(session("16384x16384x16384", FMA.replace('["cdiv(n, 16)", "cdiv(m, 16)"]', '["sms"]')))
    assert persistent.m * persistent.n >= 2 * SMS * 128 * 256
    one_block_a_row = FMA.replace('["cdiv(n, 16)", "cdiv(m, 16)"]', '["m"]')
    assert races.smaller(session("16384x16384x16384", one_block_a_row)).m >= 2 * SMS


# -- what the sanitizer says


def test_a_missing_sanitizer_is_named_with_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")
    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="nvidia-cuda-sanitizer-api"):
        sanitizer.find()


def recorded(name: str) -> str:
    """What the sanitizer said on one H200, some of it cut."""
    return (RECORDED / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (
            "memcheck-element-before",
            "Invalid __global__ write of size 2 bytes at gemm+0x780 by thread (0,0,0) in block (0,0,0) Access to"
            " 0x7f43a0a5fffe is out of bounds and is 2 bytes before the nearest allocation at 0x7f43a0a60000 of size"
            " 131,072 bytes",
        ),
        (  # an error, though a warning stands before it
            "racecheck-copy-not-awaited",
            "Error: Race reported between Write access at gemm+0x360 and Read access at gemm+0x390 [131072 hazards]",
        ),
        ("memcheck-nothing", ""),
        ("racecheck-nothing", ""),
        ("racecheck-crashed", ""),
    ],
)
def test_the_first_report_is_told_in_one_line(name: str, found: str) -> None:
    assert sanitizer.parse(recorded(name)) == found


def test_a_run_passes_only_where_it_ended_well_and_gave_one_result() -> None:
    well = Ended(0, recorded("racecheck-nothing"), (("1f", "1f"),))
    assert sanitizer.judged(Tool.RACECHECK, well) == ""
    differs = dataclasses.replace(well, digests=(("1f", "2e"),))
    assert "another result" in sanitizer.judged(Tool.RACECHECK, differs)


def test_a_run_of_several_passes_only_where_all_of_them_did() -> None:
    well = Ended(0, recorded("racecheck-nothing"), (("1f", "1f"), ("2e", "2e")))
    assert sanitizer.judged(Tool.RACECHECK, well, 2) == ""
    with pytest.raises(Fault):
        sanitizer.judged(Tool.RACECHECK, well, 3)
    differs = dataclasses.replace(well, digests=(("1f", "1f"), ("2e", "3d")))
    assert "another result" in sanitizer.judged(Tool.RACECHECK, differs, 2)


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (Ended(1, recorded("racecheck-crashed"), fault="cuStreamSynchronize: illegal address"), VerdictStatus.CRASHED),
        (Ended(0, recorded("racecheck-nothing")), VerdictStatus.CRASHED),  # the program died without a word
        (Ended(0, "", (("1f", "1f"),)), VerdictStatus.CRASHED),  # the tool did
        (Ended(None, recorded("racecheck-nothing")), VerdictStatus.TIMED_OUT),
        (Ended(0, "", refused="gemm takes 6 parameters, the contract passes 7"), VerdictStatus.FORBIDDEN),
    ],
)
def test_no_report_is_not_enough_to_pass(ended: Ended, status: VerdictStatus) -> None:
    with pytest.raises(Fault) as failure:
        sanitizer.judged(Tool.RACECHECK, ended)
    assert failure.value.status is status


def test_a_fault_of_the_machine_is_no_verdict() -> None:
    with pytest.raises(MachineError, match="out of memory"):
        sanitizer.judged(Tool.MEMCHECK, Ended(1, "", machine="cuMemAlloc: out of memory"))


def test_a_program_that_cannot_reach_a_gpu_gives_no_digests(tmp_path: Path) -> None:
    if gpu_present():
        pytest.skip("there is a GPU")
    plan = parse_cuda(FMA).plan(Gemm(16, 16, 16), SMS)
    ended = cuda_alone.run([], [cuda_alone.Job("none.cubin", plan, Gemm(16, 16, 16), 1)], tmp_path, 60)
    assert ended.status == 1
    assert ended.digests == ()


# -- on a GPU


def cubin_and_plan(source: str, shape: str) -> tuple[Path, Any]:
    target, gemm = detect(), Gemm.parse(shape)
    (build,) = build_all([Candidate(source)], target)
    assert build.status is BuildStatus.BUILT, build.reason
    return Path(build.artifact), parse_cuda(source).plan(gemm, target.sms)


def look(tool: Tool, source: str, shape: str) -> str:
    """What a tool finds."""
    if not sanitizer.works():
        pytest.skip("compute-sanitizer cannot watch this GPU")
    return sanitizer.findings(tool, job_for(tool, source, shape), 60)


def job_for(tool: Tool, source: str, shape: str) -> Job:
    return sanitizer.job(tool, *cubin_and_plan(source, shape), Gemm.parse(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["row_after", "element_before", "over_read", "workspace_overrun"])
def test_memcheck_names_an_access_outside_the_arrays(name: str) -> None:
    cheat = CHEATS[name]
    found = look(Tool.MEMCHECK, cheat.source, cheat.shape)
    assert re.search(r"Invalid __global__ (read|write) of size \d+ bytes at .*by thread .* in block", found), found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["race_after_store", "race_before_store"])
def test_racecheck_names_two_accesses_that_nothing_orders(name: str) -> None:
    cheat = CHEATS[name]
    found = look(Tool.RACECHECK, cheat.source, cheat.shape)
    assert re.search(r"Race reported between \w+ access at .* and \w+ access at", found), found


@pytest.mark.gpu
def test_initcheck_names_a_look_at_scratch_that_this_call_has_not_written() -> None:
    found = look(Tool.INITCHECK, CHEATS["memoised"].source, CHEATS["memoised"].shape)
    assert re.search(r"Uninitialized __global__ memory read .*at look_up", found), found


@pytest.mark.gpu
def test_the_sanitizer_finds_nothing_in_families_and_honest_kernels() -> None:
    kernels = honest_kernels()
    looks = [(tool, *kernel) for kernel in kernels for tool in Tool]
    with ThreadPoolExecutor(8) as pool:  # most of the time goes into starting processes
        found = list(pool.map(lambda each: (each[0], each[1], look(each[0], *each[2:])), looks))
    assert [finding for finding in found if finding[2]] == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "wrong"),
    [
        (Tool.MEMCHECK, "row_after"),
        (Tool.MEMCHECK, "over_read"),
        (Tool.RACECHECK, "race_before_store"),
        (Tool.INITCHECK, "memoised"),
        (Tool.MEMCHECK, "illegal_address"),
    ],
)
def test_one_that_is_wrong_among_several_in_one_process_is_noticed(tool: Tool, wrong: str) -> None:
    if not sanitizer.works():
        pytest.skip("compute-sanitizer cannot watch this GPU")
    jobs = [job_for(tool, source, shape) for _, source, shape in honest_kernels()]
    assert sanitizer.silent(tool, jobs, PATIENCE_S)
    among = [*jobs[:3], job_for(tool, CHEATS[wrong].source, CHEATS[wrong].shape), *jobs[3:]]
    assert not sanitizer.silent(tool, among, PATIENCE_S)


def honest_kernels() -> list[tuple[str, str, str]]:
    """Name, source and shape of kernels that are right."""
    kernels = [(subject.name, subject.candidate(detect()).source, subject.shape) for subject in SUBJECTS]
    return kernels + [(name, CHEATS[name].source, CHEATS[name].shape) for name in HONEST]


@pytest.fixture(scope="module")
def opened(gpu: Any) -> Callable[[str, str], Any]:
    """opened(source, shape) is a session on a GPU, as a context manager."""

    def builds(candidate: Candidate, seeds: Any, counts: bool) -> list[Any]:
        return build_all([Candidate(stressed(candidate.source, seed, counts=counts)) for seed in seeds], gpu.target)

    @contextmanager
    def opened(source: str, shape: str) -> Iterator[Any]:
        gemm, candidate = Gemm.parse(shape), Candidate(source)
        (build,) = build_all([candidate], gpu.target)
        cases = ProductCases(gemm, 1, CudaReferences(lambda *_: list[torch.Tensor]()))
        with CudaArena([gemm], (64 << 20) + 16 * gemm.m * gemm.n) as arena:
            with CudaSession(candidate, build, arena, cases, Facilities(gpu.workers, gpu.target.sms, builds)) as found:
                yield found
            gpu.workers.renew()  # its arena goes

    return opened


@pytest.fixture(scope="module")
def stress_on_gpu(opened: Callable[[str, str], Any]) -> Callable[[str, str], None]:
    """stress_on_gpu(source, shape) runs the check; CheckFailed where the kernel does not pass."""

    def run(source: str, shape: str) -> None:
        with opened(source, shape) as found:
            stress.CHECK.run(found)

    return run


SHARED = """/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["m"]
block = [128]
shared_bytes = "2 * n"
args = ["c", "n"]
*/
extern "C" __global__ void gemm(unsigned short *c, int n) {
  extern __shared__ unsigned short found[];
  for (int i = threadIdx.x; i < n; i += 128) c[blockIdx.x * n + i] = found[i];
}
"""


@pytest.mark.gpu
def test_shared_memory_holds_other_garbage_before_every_launch(opened: Callable[[str, str], Any]) -> None:
    """Blocks write down what they find."""
    gemm = Gemm(64, 48 * 1024, 16)  # 96 KiB a block
    with opened(SHARED, str(gemm)) as session:
        case = session.cases.drawn("garbage")
        first, second = (session.launch(case)["c"] for _ in range(2))
        assert first.isnan().float().mean() > 0.99
        assert second.isnan().float().mean() > 0.99
        assert (first.view(torch.int16) != second.view(torch.int16)).float().mean() > 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["race_after_store", "race_before_store"])
def test_a_missing_barrier_changes_the_result_when_threads_are_delayed(name: str, stress_on_gpu: Any) -> None:
    with pytest.raises(CheckFailed, match="delayed"):
        stress_on_gpu(CHEATS[name].source, CHEATS[name].shape)


@pytest.mark.gpu
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_gives_the_same_bits_when_threads_are_delayed(name: str, stress_on_gpu: Any) -> None:
    stress_on_gpu(CHEATS[name].source, CHEATS[name].shape)


@pytest.mark.gpu
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_family_gives_the_same_bits_when_threads_are_delayed(subject: Subject, gpu: Any, stress_on_gpu: Any) -> None:
    stress_on_gpu(subject.candidate(gpu.target).source, subject.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [each.name for each in SUBJECTS if each.family.startswith("sm90")])
def test_a_stage_handed_back_while_wgmma_may_read_it_is_noticed(name: str, gpu: Any, stress_on_gpu: Any) -> None:
    """Hardware reads it soon enough for the result to be right."""
    subject = next(each for each in SUBJECTS if each.name == name)
    source = subject.candidate(gpu.target).source
    assert source.count("wgmma_wait<1>();") == 1
    with pytest.raises(CheckFailed, match="delayed"):
        stress_on_gpu(source.replace("wgmma_wait<1>();", "wgmma_wait<2>();"), subject.shape)
