"""build/ for CUDA: what compiles for which architecture, what is refused and why, what hostile sources cost."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import command_line
import pytest
from cuda_cheats import all_cheats, read
from linear import require_linear
from waiting import wait_until

from cuda_l2.build import cubin, cuda_compiler, cuda_rules
from cuda_l2.build import cuda as cuda_build
from cuda_l2.build.cuda import build_all
from cuda_l2.contract import kernel_id
from cuda_l2.machine.cuda import toolkit
from cuda_l2.machine.cuda.target import CudaTarget, compile_only
from cuda_l2.records import Build, BuildStatus, Candidate
from cuda_l2.system import paths, process_tree, sandbox
from cuda_l2.system.errors import UserError

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

CORPUS = {cheat.name: cheat.source for cheat in all_cheats()}
MMA, SHORT_MMA, WGMMA = (CORPUS[name] for name in ("honest_mma", "fp16_accumulation_mma", "honest_wgmma"))

KERNEL = 'extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k)'
SIMPLE = KERNEL + " { c[threadIdx.x] = a[threadIdx.x] * b[blockIdx.x]; }"


def target(arch: str) -> CudaTarget:
    return dataclasses.replace(compile_only(arch), cores=2)


def source(body: str, arch: str = "sm_80", args: str = "a b c m n k", extra: str = "") -> str:
    """A candidate whose contract launches `gemm`."""
    passed = ", ".join(f'"{name}"' for name in args.split())
    launch = f'[[launch]]\nkernel = "gemm"\ngrid = [1]\nblock = [128]\nargs = [{passed}]\n{extra}'
    return f'/* cuda-l2\ntarget = "cuda"\narch = "{arch}"\n{launch}\n*/\n#include <cuda_fp16.h>\n{body}\n'


def build(text: str, arch: str = "sm_90a") -> Build:
    return build_all([Candidate(text)], target(arch))[0]


def statement(text: str) -> str:
    """A kernel with one statement of its own."""
    return source(KERNEL + " { " + text + " }")


# a template whose instantiations double with every step: endless, and ever more memory
BOMB = """
template <int N, class T> struct Bomb {
  static constexpr int value = Bomb<N - 1, Bomb<N, T> *>::value + Bomb<N - 1, Bomb<N, T> &>::value;
};
template <class T> struct Bomb<0, T> { static constexpr int value = 1; };
static_assert(Bomb<40, int>::value != 3);
"""


@pytest.fixture(scope="module", autouse=True)
def no_servers_left() -> Iterator[None]:
    yield
    cuda_compiler.close_servers()


@pytest.mark.parametrize(
    ("args", "reason"),
    [("a b c order m n k", ""), ("a b c order m n", "takes 7 parameters, the contract passes 6")],
)
def test_parameters_are_counted_where_a_table_makes_them_longer_than_4_kib(args: str, reason: str) -> None:
    table = '[[table]]\nname = "order"\ndtype = "uint16"\nlength = 4096\nvalue = "i"\n'
    taken = KERNEL.replace("int m", "const __grid_constant__ Order order, int m")
    body = f"struct Order {{ unsigned short of[4096]; }};\n{taken} {{ c[order.of[threadIdx.x]] = a[n]; }}"
    built = build(source(body, args=args, extra=table))
    assert (built.status is BuildStatus.BUILT) == (not reason) and reason in built.reason, built.reason + built.log


@pytest.mark.corpus(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_tensor_core_kernels_compile_for_every_architecture(arch: str) -> None:
    exact, short = build_all([Candidate(MMA), Candidate(SHORT_MMA)], target(arch))
    for result, opcode in ((exact, "HMMA.16816.F32"), (short, "HMMA.16816.F16")):
        assert result.status is BuildStatus.BUILT, result.reason + result.log
        (kernel,) = result.kernels
        assert kernel.name == "gemm" and kernel.tensor_instructions == (opcode,)
        assert kernel.parameter_bytes == 32 and kernel.instructions > 10 and kernel.registers >= 8
        assert kernel.spill_bytes == 0 and result.warnings == ()
        assert Path(result.artifact).read_bytes().startswith(b"\x7fELF")


def test_a_wgmma_kernel_compiles_for_hopper() -> None:
    result = build(WGMMA)
    assert result.status is BuildStatus.BUILT, result.reason
    assert result.kernels[0].tensor_instructions == ("HGMMA.64x8x16.F32",)
    assert result.kernels[0].shared_bytes == 2304


def test_wgmma_that_the_assembler_serialises_is_a_failure() -> None:
    (multiply,) = re.findall(r'asm volatile\("{ .reg.*?;\n', WGMMA, re.S)
    result = build(WGMMA.replace(multiply, f"for (int i = 0; i < 4; i++) {{ {multiply} d[0] += 1.0f; }}"))
    assert result.status is BuildStatus.FAILED
    assert "C75" in result.reason and any("serialized" in warning for warning in result.warnings)


def checked(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command_line.run("check", str(file), *arguments)


def test_check_compiles_for_an_architecture_without_a_gpu(tmp_path: Path) -> None:
    example = Path(__file__).parents[1] / "examples" / "wgmma_tma.cu"
    done = checked(example, "512x512x512:tn", "--compile-only", "sm_90a")
    assert done.returncode == 0 and "registers, 0 bytes spilled" in done.stdout and "launch   " in done.stdout
    done = checked(example, "512x512x511:tn", "--compile-only", "sm_90a")
    assert done.returncode == 1 and "contract refused" in done.stdout
    wrong = tmp_path / "wrong.cu"
    wrong.write_text(source(KERNEL + " { c[0] = nothing; }"))
    done = checked(wrong, "64x64x64", "--compile-only", "sm_80", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and told["build"]["status"] == "failed" and "nothing" in told["build"]["log"]
    assert told["plan"]["launches"][0]["block"] == [128, 1, 1]
    done = checked(wrong, "64x64x64", "--compile-only", "volta")
    assert done.returncode == 2 and "no architecture" in done.stderr


@pytest.mark.corpus(4)
@pytest.mark.parametrize("header", sorted(cuda_rules.HEADERS - {"mma.h"}))
def test_every_allowed_header_compiles(header: str) -> None:
    result = build(source(f"#include <{header}>\n{SIMPLE}"))
    assert result.status is BuildStatus.BUILT, result.reason


def test_wmma_compiles() -> None:
    if not any((folder / "crt" / "mma.h").exists() for folder in cuda_compiler.toolchain().headers):
        pytest.skip("nvidia-cuda-crt, which holds crt/mma.h, is not installed")
    body = "{ nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, half> f; c[0] = f.x[0]; }"
    assert build(source(f"#include <mma.h>\n{KERNEL} {body}")).status is BuildStatus.BUILT


def test_functions_need_no_device_keyword_and_standard_integers_are_there() -> None:
    text = f"#include <cstdint>\n#include <stddef.h>\nstd::uint32_t twice(uint32_t x) {{ return 2 * x; }}\n{KERNEL}"
    result = build(source(text + "{ c[twice(m) % offsetof(int2, y)] = 1; }"))
    assert result.status is BuildStatus.BUILT, result.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('#include "x.h"', "not allowed"),
        ("#include </etc/passwd>", "not allowed"),
        ("#include <cuda/../../../etc/passwd>", "not allowed"),
        ("#include <cuda_fp16.h> /**/ X", "not allowed"),
        ("#include <stdio.h>", "not allowed"),
        ("#define FILE </etc/passwd>\n#include FILE", "not allowed"),
        ("#inc\\\nlude </etc/passwd>", "not allowed"),
        ("#inc\\ \nlude </etc/passwd>", "not allowed"),
        ("%:include </etc/passwd>", "digraphs"),
        ("??=include </etc/passwd>", "trigraphs"),
        ("#include_next <cuda_fp16.h>", "#include_next"),
        ('#embed "x"', "#embed"),
        ('#import "x"', "#import"),
        ('#line 1 "cuda_fp16.h"', "#line"),
        ('# 1 "cuda_fp16.h"', "#1"),
        ("#if __has_include(</etc/passwd>)\n#endif", "__has_include"),
        ("#if __has_embed(</etc/passwd>)\n#endif", "__has_embed"),
        ("#pragma GCC dependency \"/etc/passwd\"", "#pragma"),
        ("_Pragma(\"GCC dependency \\\"/etc/passwd\\\"\")", "_Pragma"),
        ("#define P(x) _Pragma(#x)\nP(GCC dependency)", "_Pragma"),
        ('const char *s = R"(" /* )";', "raw strings"),
        ("int x; // \0", "character"),
        ("int é1'a/*';", "ASCII"),
        # a reader who takes the quote in a number for a character misses the comment, and what its end hides
        ("int a = 1'0 /*\n/*/\n#include </etc/passwd>\n//*/;", "not allowed"),
        ("#if 0\n' /*\n/*/\n#include </etc/passwd>\n//*/\n#endif", "quote"),
        ("int x; /* open", "comment"),
        ("void f() { asm(\".file 1 \\\"x\\\"\"); }", "directive .file"),
        ("void f() { asm(\"nop; .section .debug\"); }", "directive .section"),
        ("void f() { asm(\"}\\n.visible .entry g() {\"); }", "directive .visible"),
        ("void f() { asm(\"{ .ext\" \"ern .func g; }\"); }", "directive .extern"),
        ("void f() { asm(\"#include </etc/passwd>\"); }", "preprocessor"),
        ("void f() { asm(\"mov.u64 %0, %%clo\" /* */ \"ck64;\"); }", "clock64"),
        ("void f() { asm(\"mov.u64 %0, %%globaltimer_lo;\"); }", "globaltimer"),
        ("__managed__ int x;", "__managed__"),
        ("const char *day = __TIME__;", "whenever it is compiled"),
        ("#define JOIN(a, b) a##b\nconst char *day = JOIN(__DA, TE__);", "__DATE__"),
        ("x" * 300_000, "larger"),
    ],
)  # fmt: skip
def test_forbidden_text_is_refused_before_the_compiler(text: str, reason: str) -> None:
    assert reason in cuda_rules.refuse_text("int before;\n" + text)


@pytest.mark.parametrize(
    "text",
    [
        "#include <cuda_bf16.h>\n# include <cuda/std/array>\n#include <cute/layout.hpp> // layouts",
        "#pragma unroll 4\n_Pragma(\"unroll\")",
        "constexpr int million = 1'000'000; // don't",
        "/* #include </etc/passwd> and é */ const char *s = \"# // /*\";",
        "template <class T> struct A<::cuda::std::pair<T, T>>;",
        "void f() { asm volatile(\"{ .reg .pred p; setp.ne.b32 p, 1, 0; }\" ::: \"memory\"); }",
        "#define LOAD(space) \"ld\" space \".global.u32\"\n#define S(x) #x",
        "void f() { asm(\"cp.async.bulk\" \".shared::cluster.global [%0], [%1], 16, [%2];\"); }",
    ],
)  # fmt: skip
def test_ordinary_text_passes(text: str) -> None:
    assert cuda_rules.refuse_text(text) == ""


@pytest.mark.parametrize(
    "text",
    ["/* " * 40_000, "'\\'" * 40_000, '"' * 80_000, "1'" * 60_000, "#" * 100_000, '_Pragma("' * 10_000, '""' * 60_000],
)
def test_text_rules_take_linear_time(text: str) -> None:
    require_linear(cuda_rules.refuse_text, text)


@pytest.mark.parametrize(
    "text",
    ["/* " * 200_000, '"' * 400_000, "{" * 400_000, "a" * 800_000, "a:" * 300_000, "@" * 400_000, "%clock" * 90_000],
)
def test_ptx_rules_take_linear_time(text: str) -> None:
    require_linear(cuda_rules.refuse_ptx, text)


@pytest.mark.parametrize(
    ("ptx", "reason"),
    [
        ("mov.u64 %rd1, %clock64;", "%clock64"),
        ("mov.u32 %r1, %warpid;", "threadIdx.x / 32"),
        ("mov.u32 %r1, %nwarpid;", "%nwarpid"),
        (".const .u32 t = 1; mov.u64 %rd1, t; cvta.const.u64 %rd2, %rd1;", "one can write there"),
        (".const .u32 t = 1; .const .u64 p = generic(t);", "one can write there"),
        ("a: b: @!%p1 pmevent 1;", "pmevent"),
        ("@ %p1 pmevent 1;", "pmevent"),
        ("{ brkpt; }", "brkpt"),
        ("mov.b64 {lo, hi}, %rd1; {brkpt; }", "brkpt"),
        (".tex .u32 t;", "directive .tex"),
        (".reg .pred p; .section x { }", "directive .section"),
        ("// \\\nmov.u64 %rd1, %clock64;", "backslash"),
        ('.pragma "a; mov.u32 %r1, %clock; // "b";', "quote"),
        ("#define x", "preprocessor"),
        ("add.u32 %r1, %r1, 1; 7;", "cannot read"),
        (".visible .global .align 4 .u32 x = 1; {ld.global.u32 %r1, [x+4];}", "variable x"),
        (".global .u32 x[2], y[2] = {1, 2}; .const .u64 z = y;", "variable y"),
        (".extern .func (.param .b32 r) __cuda_syscall_cp_async_bulk (); ret;", "__cuda_syscall_cp_async_bulk"),
        (".func (.param .b32 r) f(.param .b32 a) {ret;} mov.u64 %rd1, f;", "address of the function f"),
        (".visible .entry k(.param .u64 a) {mov.u64 %rd1, k;}", "address of the function k"),
        (".func f() {ret;} .const .align 8 .u64 t[2] = {f, 1};", "address of the function f"),
    ],
)
def test_ptx_outside_the_contract_is_refused(ptx: str, reason: str) -> None:
    assert reason in cuda_rules.refuse_ptx("ret;\n" + ptx)


def test_ordinary_ptx_passes() -> None:
    ptx = (
        ".version 9.0\n.target sm_90a\n.global .align 1 .b8 x[2] = {1, 2};\n.visible .entry k(.param .u64 y)\n.maxntid 128, 1, 1\n{ .reg .b32 %r<4>; // a \\n"
        '$L_1: /* ; */ @!%p1 bra.uni $L_1; .pragma "nounroll"; mov.b64 {%r1, %r2}, %rd1;\n'
        ".func cluster() { st.shared::cluster.u32 [%r1], %r2; ret; }"
        ".func (.param .b32 r) add(.param .b32 a) { add.u32 %r1, %r1, 1; @%p1 call.uni (r), add, (a); ret; }"
        "st.shared::cluster.u32 [%r1], %r2; call.uni (r), f, (a); p : .callprototype (.param .b32 _) _ (); ret; }"
    ).replace("\\n", "\n")
    assert cuda_rules.refuse_ptx(ptx) == ""


REFUSED = {
    # PTX: what macros, escapes and libraries spelled
    "clock": (statement("c[0] = (half)(float)clock64();"), "%clock64"),
    "clock by escapes": (statement('long long t; asm volatile("mov.u64 %0, %%\\143lock64;" : "=l"(t)); c[0] = t;'), "%clock64"),
    "clock by macro": (
        source(f'#define Q(x) #x\n#define NAME clo##ck\n{KERNEL} {{ int t; asm volatile("mov.u32 %0, %%" Q(clock) ";" : "=r"(t)); c[0] = t; }}'),
        "%clock",
    ),
    "graph": (statement('long long t; asm volatile("mov.u64 %0, %%\\143urrent_graph_exec;" : "=l"(t)); c[0] = t;'), "graph"),
    "instruction": (statement('asm volatile("pmevent 1;"); c[0] = 1;'), "PTX instruction pmevent"),
    "breakpoint in a block": (statement('asm volatile("{ .reg .pred p; setp.ne.s32 p, 1, 0; @p brkpt; }"); c[0] = 1;'), "brkpt"),
    # machine code
    "printf": (source(f'extern "C" int printf(const char *, ...);\n{KERNEL} {{ printf("%d", m); }}'), "printf"),
    "malloc": (statement("half *p = (half *)malloc(k); *c = *p;"), "malloc"),
    "new": (statement("volatile half *p = new half[k]; p[0] = a[0]; delete[] p;"), "malloc"),
    "assert": (source(f'{KERNEL} {{ if (m) __assertfail("a", "b", 1, "c", 1); }}'), "assert"),
    "variable": (source(f"__device__ int count;\n{KERNEL} {{ c[0] = count++; }}"), "variable count"),
    "static variable": (statement("static int count; c[0] = count++;"), "count"),
    "constant made a variable": (
        source(f"static __device__ const int count = 1;\n{KERNEL} {{ (*(volatile int *)&count)++; }}"), "variable count"
    ),
    "variable by address": (
        source(f"__device__ int count;\n__constant__ int *at = &count;\n{KERNEL} {{ c[0] = (*at)++; }}"), "variable count"
    ),
    "variable in assembly": (
        statement('int r; asm volatile("{.global .u32 hidden; atom.global.add.u32 %0, [hidden], 1;}" : "=r"(r)); c[0] = r;'),
        "hidden",
    ),
    "large variable": (source(f"__device__ int unused[1 << 20];\n{SIMPLE}"), "4096 KiB"),
    "grid number by address": (
        statement('long long t; asm volatile("ld.param.u64 %0, [gemm_param_0+-480];" : "=l"(t)); c[0] = t;'), "none of its parameters"
    ),
    "beyond its parameters": (
        statement('long long t; asm volatile("ld.param.u64 %0, [gemm_param_0+512];" : "=l"(t)); c[0] = t;'), "none of its parameters"
    ),
    # contract
    "no kernel": (source(SIMPLE.replace("gemm", "gemn")), "it has gemn"),
    "no extern C": (source(SIMPLE.replace('extern "C"', "")), "no extern"),
    "few parameters": (source(SIMPLE, args="a b c m n"), "takes 6 parameters, the contract passes 5"),
    "narrow parameter": (source(SIMPLE, args="a b m c n k"), "parameter 3 of gemm has 8 bytes, the contract passes int32 of 4"),
    "no wait": (source(SIMPLE, "sm_90a", extra='edge = "programmatic"'), "griddepcontrol.wait"),
    "other architecture": (source(SIMPLE, "sm_100a"), "needs sm_100a; the target is sm_90a"),
    "no contract": (SIMPLE, "does not begin with"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused() -> dict[str, Build]:
    """All at once, as a search would meet them."""
    builds = build_all([Candidate(text) for text, _ in REFUSED.values()], target("sm_90a"))
    return dict(zip(REFUSED, builds, strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_what_breaks_the_contract_is_refused_with_its_reason(case: str, refused: dict[str, Build]) -> None:
    result = refused[case]
    print(case, result.status, result.reason)
    assert result.status is BuildStatus.REFUSED, result.reason + result.log
    assert REFUSED[case][1] in result.reason
    assert "\n" not in result.reason and not result.artifact


def test_what_assembly_adds_is_judged_like_all_else() -> None:
    other = 'asm volatile("ret; \\x7d .visible .entry other() \\x7b");'
    result = build(source(f"{KERNEL} {{ c[0] = 1; {other} }}"))
    assert [kernel.name for kernel in result.kernels] == ["gemm", "other"], result.reason


def test_a_compile_error_keeps_the_compilers_words() -> None:
    result = build(source(KERNEL + " { c[0] = nothing; }"))
    assert result.status is BuildStatus.FAILED
    assert "nothing" in result.reason and "candidate.cu" in result.reason and "nothing" in result.log


def test_a_forged_report_of_the_assembler_is_not_believed() -> None:
    forged = (
        "ptxas info    : Compiling entry function 'gemm' for 'sm_90a'\\nptxas info    : Used 1 registers, 9 bytes smem"
    )
    body = "__shared__ half s[64]; old(); s[threadIdx.x] = a[0]; __syncthreads(); c[0] = s[m];"
    result = build(source(f'[[deprecated("\\n{forged}")]] void old() {{}}\n{KERNEL} {{ {body} }}'))
    assert result.status is BuildStatus.BUILT, result.reason
    assert result.kernels[0].shared_bytes == 128 and result.kernels[0].registers > 1


def test_a_kernel_for_another_task_compiles_with_its_own_buffers() -> None:
    text = read(Path(__file__).with_name("cuda_task_cheats") / "honest_rms_norm.cu").source
    wider = text.replace("int columns)", "long long columns)")
    good, bad = build_all([Candidate(text), Candidate(wider)], target("sm_80"))
    assert good.status is BuildStatus.BUILT, good.reason
    assert wider != text and bad.status is BuildStatus.REFUSED and "rms_norm" in bad.reason


def test_the_sandbox_keeps_files_from_a_source_that_no_rule_read(tmp_path: Path) -> None:
    if sandbox.kind() is sandbox.Kind.LIMITS:
        pytest.skip("no sandbox works here")
    (tmp_path / "secret").write_text("hidden treasure\n")
    tools = cuda_compiler.toolchain()
    result = cuda_compiler.compile_source(f'#include "{tmp_path}/secret"', "sm_90a", tools, with_cutlass=False)
    assert result.status is BuildStatus.FAILED and "treasure" not in result.log and "cannot open" in result.log


def test_headers_that_name_the_folder_of_cccl_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUTLASS includes <cccl/cuda/std/...> from CUDA 13 on; the rest of the toolkit may lie elsewhere."""
    for wheel, plain in (("a/include/cccl", "b/include"), ("a/include", "a/include")):
        folders = {"cccl": tmp_path / wheel, "cudart": tmp_path / plain}
        monkeypatch.setattr(cuda_compiler, "_headers", folders.__getitem__)
        found = cuda_compiler._toolkit_headers()
        assert found == list(dict.fromkeys([tmp_path / wheel, tmp_path / plain, tmp_path / "a/include"]))


AS_CUTLASS = "#if 0\n#include <cute/tensor.hpp>\n#endif\n"  # so that limits of its own hold for it


def test_a_source_out_of_time_costs_only_itself(own_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "CUTLASS_CPU_S", 1)
    bomb = Candidate(source(AS_CUTLASS + BOMB + SIMPLE))
    late, fine = build_all([bomb, Candidate(source(SIMPLE + "// beside a bomb"))], target("sm_90a"))
    assert late.status is BuildStatus.TIMED_OUT, late.reason
    assert fine.status is BuildStatus.BUILT, fine.reason
    records = [path.read_text() for path in (paths.cache_dir() / "builds").glob("*/build.json")]
    assert not any(late.candidate_id in record for record in records), "that a machine was slow is not remembered"


def test_a_source_out_of_memory_costs_only_itself(own_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "CUTLASS_MEMORY_BYTES", 512 << 20)
    bomb = Candidate(source(AS_CUTLASS + BOMB + SIMPLE + "// large"))
    large, fine = build_all([bomb, Candidate(source(SIMPLE + "// beside a large one"))], target("sm_90a"))
    assert large.status is BuildStatus.FAILED and "memory" in large.reason
    assert fine.status is BuildStatus.BUILT, fine.reason


def test_a_compiler_that_crashes_costs_only_its_source(own_cache) -> None:
    assert build(source(SIMPLE + "// before a crash")).status is BuildStatus.BUILT
    (server,) = cuda_compiler._idle[-1:]
    process = server._process.pid
    idle = process_tree.processes(process)

    def crash() -> None:
        working: list[int] = []
        wait_until(lambda: working.extend(set(process_tree.processes(process)) - set(idle)) or working)
        os.kill(working[0], signal.SIGSEGV)

    threading.Thread(target=crash, daemon=True).start()
    crashed = build(source(BOMB + SIMPLE + "// crashes"))
    assert crashed.status is BuildStatus.FAILED and "SIGSEGV" in crashed.reason
    assert build(source(SIMPLE + "// after a crash")).status is BuildStatus.BUILT
    assert server.alive


def test_a_lost_server_is_replaced(own_cache) -> None:
    assert build(source(SIMPLE + "// before")).status is BuildStatus.BUILT
    for server in cuda_compiler._idle:
        sandbox.kill(server._process)
    assert build(source(SIMPLE + "// after")).status is BuildStatus.BUILT


def test_a_server_lost_at_work_is_replaced(own_cache) -> None:
    cuda_compiler.close_servers()
    started = []
    original = cuda_compiler.Server.compile

    def kill_the_first(self, *arguments):  # type: ignore[no-untyped-def]
        started.append(self)
        if len(started) == 1:
            answer = self._answer
            self._answer = lambda timeout_s: sandbox.kill(self._process) or answer(timeout_s)
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_compiler.Server, "compile", kill_the_first)
        result = build(source(f"#include <cuda/std/utility>\n{SIMPLE}// lost"))
    assert result.status is BuildStatus.BUILT, result.reason
    assert len(started) == 2


def test_a_build_is_cached_by_content(own_cache) -> None:
    text = source(SIMPLE + "// cached")
    first, second, twin = (
        *build_all([Candidate(text)], target("sm_90a")),
        *build_all([Candidate(text)] * 2, target("sm_90a")),
    )
    assert first.status is BuildStatus.BUILT and second == twin == first
    assert build(text, "sm_80").artifact != first.artifact


def test_one_kernel_under_several_contracts_is_compiled_once(own_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    original = cuda_build.compile_source

    def counted(source: str, *arguments, **named):  # type: ignore[no-untyped-def]
        compiled.append(source)
        return original(source, *arguments, **named)

    monkeypatch.setattr(cuda_build, "compile_source", counted)
    body = SIMPLE + "// under several contracts"
    options = ["", "coresident = true", 'edge = "programmatic"', "#"]
    texts = [source(body, "sm_90a", extra=extra) for extra in options]
    good, twin, early, again = build_all([Candidate(text) for text in texts], target("sm_90a"))
    short = build(source(body, "sm_90a", args="a b m n k"))
    assert len(compiled) == 1
    assert good.status is twin.status is again.status is BuildStatus.BUILT
    assert good.kernels == twin.kernels == again.kernels
    assert Path(good.artifact).read_bytes() == Path(again.artifact).read_bytes()
    assert "griddepcontrol.wait" in early.reason and short.status is BuildStatus.REFUSED  # judged under each contract
    assert kernel_id(texts[0]) == kernel_id(texts[2]) != kernel_id(source(body, "sm_80"))


def test_what_fails_is_compiled_under_each_contract() -> None:
    """A compiler's complaint names lines of the whole text."""
    logs = [build(source("int wrong = ;", extra="#\n" * lines)).log for lines in (1, 3)]
    assert "(13)" in logs[0] and "(15)" in logs[1], logs


def test_serial_and_parallel_builds_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = [
        Candidate(source(f"{SIMPLE}\n{KERNEL.replace('gemm', f'other{i}')} {{ c[m] = {i}; }}")) for i in range(6)
    ]
    seen = []
    for cores in (1, 2):
        monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path / str(cores)))
        builds = build_all(candidates, dataclasses.replace(target("sm_90a"), cores=cores))
        seen.append([(result.kernels, Path(result.artifact).read_bytes()) for result in builds])
    assert seen[0] == seen[1]
    assert len({code for _, code in seen[0]}) == 6


ENTRIES = 6
"""Folders of finished builds, one a code and one a source, before the process is killed at the next."""


def test_a_killed_build_leaves_nothing_half_written(tmp_path: Path) -> None:
    script = (
        "from test_build_cuda import *\n"
        "build(source(SIMPLE)); print(cuda_compiler._idle[0]._process.pid, flush=True)\n"
        "build_all([Candidate(source(f'{SIMPLE} // {i}')) for i in range(200)], target('sm_90a'))"
    )
    environment = {**os.environ, "CUDA_L2_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        wait_until(lambda: len(list((tmp_path / "builds").iterdir())) >= ENTRIES, process)
        process.send_signal(signal.SIGKILL)
    entries = list((tmp_path / "builds").iterdir())
    assert len(entries) >= ENTRIES and all((entry / "build.json").exists() for entry in entries)
    wait_until(lambda: not Path(f"/proc/{server}").exists())  # a server that outlives its process hangs this test
    left = list((tmp_path / "servers").iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_L2_CACHE", str(tmp_path))
        cuda_compiler.Server().close()
    assert left and not list((tmp_path / "servers").iterdir())


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="nvdisasm was not found: pip install"):
        cuda_compiler.toolchain.__wrapped__()


def test_a_program_is_looked_for_again_where_a_busy_machine_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(name: str) -> str:
        asked.append(name)
        if len(asked) < toolkit.TRIES:
            raise ChildProcessError("timed out after 10 seconds")
        return f"/found/{name}"

    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", slow)
    assert toolkit.program("nvcc") == Path("/found/nvcc") and asked == ["nvcc"] * toolkit.TRIES


def test_a_machine_that_never_answers_is_said_unless_the_program_is_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(name: str) -> str:
        raise ChildProcessError("timed out after 10 seconds")

    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", never)
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", never)
    monkeypatch.setenv("PATH", str(tmp_path))
    for look, name in ((toolkit.headers, "cudart"), (toolkit.program, "nvcc")):
        with pytest.raises(UserError, match=rf"{name} could not .* when less is running .*10 seconds"):
            look(name)
    (tmp_path / "nvcc").touch(mode=0o755)
    assert toolkit.program("nvcc") == tmp_path / "nvcc"


def test_an_unwritable_cache_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cuda_compiler.toolchain()
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="CUDA_L2_CACHE"):
        build(source(SIMPLE + "// nowhere"))


def test_a_damaged_entry_is_built_again(own_cache) -> None:
    text = source(SIMPLE + "// damaged")
    first = build(text)
    (Path(first.artifact).parent / "build.json").write_text("{")
    again = build(text)
    assert again.artifact == first.artifact and again.status is BuildStatus.BUILT
    kernel = Path(first.artifact).read_bytes()
    os.truncate(first.artifact, 100)
    build(text)
    assert Path(first.artifact).read_bytes() == kernel
    assert not list((paths.cache_dir() / "scratch").glob("*/kernel.cubin"))


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF" + bytes(200), b"not a cubin" * 50])
def test_what_is_no_cubin_is_said_so(data: bytes) -> None:
    with pytest.raises(cubin.CubinError):
        cubin.read(data)
