"""build/: what is refused, what is cached, what a killed or crowded build leaves behind."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import honest_source
from linear import require_linear

from cuda_l2.build import cpu, lexing, rules
from cuda_l2.build.cpu import build
from cuda_l2.records import BuildStatus, Candidate
from cuda_l2.system import paths, sandbox, scratch
from cuda_l2.system.errors import UserError


@pytest.mark.parametrize(
    "text",
    [
        '#include "x.h"',
        "#include <stdio.h>",
        "#include </etc/passwd>",
        "# include <../etc/passwd>",
        "%:include <stdio.h>",
        "#inc\\\nlude <stdio.h>",
        "#include X",
        "#include_next <stdint.h>",
        '#embed "x"',
        '#import "x"',
        '#line 1 "immintrin.h"',
        "??=include <stdio.h>",
        "#pragma GCC optimize(\"O0\")",
        "#pragma GCC dependency \"/etc/passwd\"",
        "#if __has_include(</etc/passwd>)\n#endif",
        "int f(void) { asm(\"nop\"); }",
        "int x __asm__(\"y\");",
        "\0",
        "/* */ #include <stdio.h>",
        '# 1 "immintrin.h"',
        "#\f include <stdio.h>",
        "\f#include <stdio.h>",
        "#inc\\ \nlude <stdio.h>",
        'const char *s = R"(" /* )"; asm("nop"); /* ";',
        "int a<:4:>;",
        "const char *day = __DATE__;",
        "const char *day = __TIME__;",
        "const char *day = __TIMESTAMP__;",
        "const char *day = __CONCAT(__DA, TE__);",
        "\ud800",
        "x" * 300_000,
    ],
)  # fmt: skip
def test_forbidden_text_is_refused_before_the_compiler(text: str) -> None:
    assert rules.refuse_text("int before;\n" + text)


@pytest.mark.parametrize(
    "text",
    [
        "#include <stdint.h>",
        "  #  include <immintrin.h> // vectors",
        "#pragma GCC unroll 4",
        "/* asm and #include <stdio.h> in a comment */",
        'const char *s = "asm # include";',
        "int assume; int basm;",
        "#define JOIN(A, B) A##B\nint M, T, __TIME, _DATE_, my__DATE__; // __DATE__",
    ],
)
def test_ordinary_text_passes(text: str) -> None:
    assert rules.refuse_text(text) == ""


@pytest.mark.parametrize(
    "text", ["/* " * 40_000, "'\\'" * 40_000, '"' * 80_000, "__attribute__((" * 4_000, "#" * 100_000]
)
def test_rules_take_linear_time(text: str) -> None:
    require_linear(rules.refuse_text, text)
    require_linear(lambda expanded: rules.refuse_expansion(expanded, "candidate.c"), text)


@pytest.mark.parametrize(
    "expanded",
    [
        '[[gnu::ifunc("resolve")]] void f(void);',
        "[ [gnu::constructor]] void f(void) {}",
        "<:<:gnu::constructor:>:> int x;",
    ],
)
def test_standard_attributes_are_refused(expanded: str) -> None:
    assert rules.refuse_expansion(f'# 1 "candidate.c"\n{expanded}\n', "candidate.c")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("workspace = " + "9" * 5000, BuildStatus.REFUSED),
        ("workspace = " + "[" * 20_000, BuildStatus.REFUSED),
        ('workspace = "m" \ud800', BuildStatus.REFUSED),
    ],
)
def test_contracts_meant_to_break_the_reader_are_refused(target, text, status) -> None:
    result = build(Candidate(f'/* cuda-l2\ntarget = "cpu"\n{text}\n*/\nvoid gemm(void) {{}}'), target)
    assert result.status is status


def test_a_compiler_that_says_too_much_is_cut_short(target) -> None:
    body = '/* cuda-l2\ntarget = "cpu"\n*/\nvoid gemm(void) {' + "x;" * 50_000 + "}"
    result = build(Candidate(body), target)
    assert result.status is not BuildStatus.BUILT and len(result.log) <= 20_000


def test_a_macro_bomb_is_refused(target) -> None:
    lines = ["#define A0 int x0;"] + [f"#define A{i} A{i - 1} A{i - 1}" for i in range(1, 26)]
    body = '/* cuda-l2\ntarget = "cpu"\n*/\n' + "\n".join(lines) + "\nvoid gemm(void) { A25 }"
    assert build(Candidate(body), target).status is not BuildStatus.BUILT


def test_only_the_candidates_own_lines_count_after_preprocessing() -> None:
    expanded = '# 1 "candidate.c"\nint x;\n# 1 "/usr/include/thing.h" 1\n__asm__("nop");\n# 2 "candidate.c" 2\nint y;\n'
    assert rules.refuse_expansion(expanded, "candidate.c") == ""
    assert rules.refuse_expansion(expanded + '__asm__("nop");\n', "candidate.c")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("\trdtsc", "clock"),
        ("\trdtscp\n", "clock"),
        ("\trdseed\t%rax", "random"),
        ("\trdrand %rax", "random"),
        ("\tsyscall", "kernel"),
        ("\tint\t$128", "kernel"),
        ("\ttpause\t%eax", "waits"),
        ("\tmrs\tx0, cntvct_el0", "system"),
        ("\tmrs\tx0, fpcr", "system"),
        ("\tmsr\tfpcr, x0", "system"),
        ("\tvstmxcsr\t-4(%rsp)", "arithmetic"),
        ("\tldmxcsr\t-4(%rsp)", "arithmetic"),
        ("\tfnstcw\t-2(%rsp)", "arithmetic"),
        ("\tfldcw\t-2(%rsp)", "arithmetic"),
        ("\txgetbv", "system"),
        ("\tpopfq", "flags"),
        ("\txrstor64\t(%rax)", "registers"),
        ("\tfxsave\t(%rax)", "registers"),
        ("\tfnstsw\t%ax", "x87"),
        ("\tfldenv\t(%rax)", "x87"),
    ],
)
def test_instructions_that_a_kernel_has_no_use_for_are_refused(line: str, says: str) -> None:
    around = "gemm:\n\tvmovups\t(%rdi), %zmm0\n{}\n\tret\n"
    reason = rules.refuse_assembly(around.format(line), product=False)
    assert line.split(maxsplit=1)[0] in reason and says in reason
    assert "MMX" in rules.refuse_assembly(around.format("\tmovd\t%eax, %mm0"), product=False)
    assert rules.refuse_assembly(around.format('\tmrs\tx0, nzcv\n\t.string\t"rdtsc"\ninterior:'), product=True) == ""


@pytest.mark.parametrize("name", ["vpmaddwd", "pmaddubsw", "vpdpwssd", "vpdpbusds", "sdot", "smmla"])
def test_integer_dot_products_are_refused_in_matrix_products_alone(name: str) -> None:
    assembly = f"gemm:\n\t{name}\t%ymm0, %ymm1, %ymm2\n\tret\n"
    assert name in rules.refuse_assembly(assembly, product=True)
    assert rules.refuse_assembly(assembly, product=False) == ""
    assert rules.refuse_assembly(assembly.replace(name, "vdpbf16ps"), product=True) == ""


def test_macros_may_stand_before_includes_but_not_change_them(target) -> None:
    other, its_own = "#define TILE 4\n#define VALUES int32_t\n", "#define int8_t int8_t; extern int a_global\n"
    assert build(Candidate(honest_source().replace("#include", other + "#include", 1)), target).status == "built"
    refused = build(Candidate(honest_source().replace("#include", its_own + "#include", 1)), target)
    assert refused.status == "refused" and "define macros after the #includes" in refused.reason


def test_a_date_that_no_rule_on_the_text_saw_fails_in_the_preprocessor(own_cache, target, monkeypatch) -> None:
    monkeypatch.setattr(lexing, "_DATES", ())
    dated = build(Candidate(honest_source() + "\nconst char *day = __DATE__;\n"), target)
    assert dated.status is BuildStatus.FAILED and "__DATE__" in dated.reason


def test_a_build_is_cached_by_content(own_cache, target) -> None:
    first = build(Candidate(honest_source() + "\n/* cached */\n"), target)
    second = build(Candidate(honest_source() + "\n/* cached */\n"), target)
    assert first.status is BuildStatus.BUILT, first.reason
    assert second == first
    assert Path(first.artifact).exists()


def test_a_damaged_build_is_built_again(own_cache, target) -> None:
    candidate = Candidate(honest_source() + "\n/* damaged */\n")
    artifact = Path(build(candidate, target).artifact)
    whole = artifact.read_bytes()
    os.truncate(artifact, len(whole) // 2)
    assert build(candidate, target).artifact == str(artifact)
    assert artifact.read_bytes() == whole


def test_the_compiler_has_a_limit_of_processor_time_which_other_work_does_not_use_up(
    own_cache, target, monkeypatch
) -> None:
    monkeypatch.setattr(cpu, "LIMITS", replace(cpu.LIMITS, cpu_seconds=1))
    lines = ["#define A0 x = x * y + z; y = y * z + x; z = z * x + y;"]
    lines += [f"#define A{i} A{i - 1} A{i - 1}" for i in range(1, 18)]
    body = "void gemm(int *p) { int x = p[0], y = p[1], z = p[2]; A17 p[0] = x + y + z; }"
    large = Candidate('/* cuda-l2\ntarget = "cpu"\n*/\n' + "\n".join([*lines, body]))
    late = build(large, target)
    assert (late.status, late.reason) == (
        BuildStatus.TIMED_OUT,
        "the compiler did not finish within 1 s of processor time",
    )
    monkeypatch.setattr(cpu, "LIMITS", replace(cpu.LIMITS, cpu_seconds=0))
    monkeypatch.setattr(cpu.rules, "MAX_EXPANSION_BYTES", 0)
    assert build(large, target).status is BuildStatus.REFUSED, "that a machine was slow is not remembered"


def test_a_failed_build_keeps_the_compilers_words(target) -> None:
    result = build(Candidate('/* cuda-l2\ntarget = "cpu"\n*/\nint x = nothing;'), target)
    assert result.status is BuildStatus.FAILED
    assert "nothing" in result.reason and "nothing" in result.log


def test_builds_of_one_content_at_once_agree(own_cache, target) -> None:
    candidate = Candidate(honest_source() + "\n/* at once */\n")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: build(candidate, target), range(4)))
    assert {result.status for result in results} == {BuildStatus.BUILT}
    assert len({result.artifact for result in results}) == 1
    assert not list((paths.cache_dir() / "scratch").iterdir())


def test_an_unwritable_cache_says_what_to_do(target, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="CUDA_L2_CACHE"):
        build(Candidate(honest_source() + "\n/* nowhere */\n"), target)


KINDS = [kind for kind in sandbox.Kind if kind is not sandbox.Kind.LIMITS]


def works(kind: sandbox.Kind, folder: Path) -> bool:
    try:
        return subprocess.run(sandbox.wrap(["/bin/true"], folder, using=kind), capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_sandboxed_command_sees_one_folder_and_the_system(kind: sandbox.Kind, tmp_path: Path) -> None:
    if not works(kind, tmp_path):
        pytest.skip(f"{kind} does not work on this machine")
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    work = tmp_path / "work"
    work.mkdir()
    script = f"cat {secret} /etc/passwd; echo out > result; echo bad > /usr/bad; ls /proc/1 > /dev/null && echo proc"
    done = subprocess.run(sandbox.wrap(["/bin/sh", "-c", script], work, using=kind), capture_output=True, text=True)
    assert "hidden" not in done.stdout and "root" not in done.stdout
    assert (work / "result").read_text() == "out\n"
    assert not Path("/usr/bad").exists()


LOOK = """
import os
for name in ("mountinfo", "status"):
    for line in open(f"/proc/self/{name}"):
        if name == "mountinfo":
            words = line.split(" - ")[0].split()[3:6] + line.split(" - ")[1].split()[:1]
            print(*words)
        elif line.startswith(("Cap", "NoNewPrivs", "Seccomp:")):
            print(*line.split())
for folder, folders, files in os.walk("/"):
    folders[:] = sorted(each for each in folders if os.path.join(folder, each) not in SKIPPED)
    for each in sorted([*folders, *files]):
        path = os.path.join(folder, each)
        found = os.lstat(path)
        print(path, oct(found.st_mode), found.st_size if "/tmp" not in path else "", os.path.islink(path) and os.readlink(path))
print(os.getcwd(), os.listdir("/proc/self/fd"), open("/proc/sys/kernel/pid_max").read())
"""


def test_the_program_and_the_script_make_the_same_view_of_namespaces(tmp_path, monkeypatch) -> None:
    """The script is for machines without a compiler."""
    if not works(sandbox.Kind.NAMESPACES, tmp_path):
        pytest.skip("there are no user namespaces on this machine")
    reads = [Path(sys.prefix), Path(sys.base_prefix), tmp_path / "not there"]
    skipped = {"/proc", *map(str, reads), *map(str, (path.resolve() for path in reads)), *sandbox.SYSTEM_FOLDERS}
    python = [sys.executable, "-I", "-c", LOOK.replace("SKIPPED", repr(skipped))]
    found = []
    assert sandbox._view_maker() != sandbox._SCRIPT, "a C compiler is there"
    for maker in (sandbox._view_maker(), sandbox._SCRIPT):
        monkeypatch.setattr(sandbox, "_view_maker", lambda maker=maker: maker)
        work = tmp_path / "work"
        work.mkdir()
        wrapped = sandbox.wrap(python, work, using=sandbox.Kind.NAMESPACES, reads=reads, proc=True)
        found.append(sandbox.run(wrapped, 600, cwd=work).output.splitlines())
        shutil.rmtree(work)
    assert found[0] == found[1] and len(found[0]) > 30
    assert "CapBnd: 0000000000000000" in found[0] and "NoNewPrivs: 1" in found[0]


def test_the_end_of_a_process_is_known_at_once(monkeypatch) -> None:
    """Popen.wait with a time limit sleeps, 50 ms in the end, and looks again."""
    slept = []
    monkeypatch.setattr(subprocess.time, "sleep", slept.append)
    for command, status in (
        (["sleep", "0.2"], 0),
        (["sh", "-c", "sleep 0.2; exit 3"], 3),
        (["sh", "-c", "kill -9 $$"], -9),
    ):
        assert sandbox.finish(sandbox.start(command), 600) == status
    assert not slept
    endless = sandbox.start(["sleep", "600"])
    assert sandbox.finish(endless, 0) is None and endless.returncode == -9 and not slept


def test_the_end_of_a_process_is_known_without_its_descriptor(monkeypatch) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, "a kernel before 5.3")

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert sandbox.finish(sandbox.start(["sh", "-c", "exit 3"]), 600) == 3
    assert sandbox.finish(sandbox.start(["sleep", "600"]), 0) is None


def test_without_a_compiler_the_script_makes_the_view(monkeypatch) -> None:
    def compiled(source: Path) -> Path:
        raise UserError(f"no C compiler for {source}")

    monkeypatch.setattr(sandbox, "compiled", compiled)
    assert sandbox._view_maker.__wrapped__() == sandbox._SCRIPT


# mount(NULL, folder, NULL, MS_REMOUNT | MS_BIND), then a file there; also from a user namespace of its own
REMOUNT = """
import ctypes, os, sys
libc, folder = ctypes.CDLL(None), sys.argv[1]
for flags in (0, 0x10000000 | 0x20000):
    if flags:
        libc.unshare(flags)
    libc.mount(b"none", folder.encode(), None, 32 | 4096, None)
    try:
        open(folder + "/escaped", "w").close()
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_sandboxed_command_cannot_make_a_folder_writable_again(kind: sandbox.Kind, tmp_path: Path) -> None:
    if not works(kind, tmp_path):
        pytest.skip(f"{kind} does not work on this machine")
    work, readable = tmp_path / "work", tmp_path / "readable"
    for folder in (work, readable):
        folder.mkdir()
    python = [sys.executable, "-I", "-c", REMOUNT, str(readable)]
    reads = [readable, Path(sys.prefix), Path(sys.base_prefix)]
    done = sandbox.run(sandbox.wrap(python, work, using=kind, reads=reads), 600, cwd=work)
    assert done.output == "Read-only file system\n" * 2, done
    assert not (readable / "escaped").exists()


def test_bubblewraps_command_has_a_session_without_the_users_terminal(tmp_path: Path) -> None:
    assert "--new-session" in sandbox.wrap(["/bin/true"], tmp_path, using=sandbox.Kind.BUBBLEWRAP)
    if not works(sandbox.Kind.BUBBLEWRAP, tmp_path):
        pytest.skip("bubblewrap does not work on this machine")
    script = [sys.executable, "-I", "-c", "import os; print(os.getsid(0) == os.getpgrp() != 0)"]
    reads = [Path(sys.prefix), Path(sys.base_prefix)]
    done = sandbox.run(sandbox.wrap(script, tmp_path, using=sandbox.Kind.BUBBLEWRAP, reads=reads), 600, cwd=tmp_path)
    assert done.output == "True\n"


def test_a_sandbox_has_few_processes_and_the_machine_keeps_its_own_number(tmp_path) -> None:
    assert [sandbox._most_tasks(release) for release in ("6.8.0-31-generic", "5.15.0", "weird")] == [""] * 3
    assert int(sandbox._most_tasks("6.14.2")) == sandbox.MOST_TASKS
    if not (works(sandbox.Kind.NAMESPACES, tmp_path) and sandbox._most_tasks()):
        pytest.skip("this kernel does not limit a namespace's processes")
    limit = Path("/proc/sys/kernel/pid_max")
    before = limit.read_text()
    script = ["/bin/sh", "-c", f"cat {limit}; (echo {sandbox.MOST_TASKS + 1} >{limit}) 2>/dev/null; cat {limit}"]
    done = sandbox.run(sandbox.wrap(script, tmp_path, using=sandbox.Kind.NAMESPACES, proc=True), 600, cwd=tmp_path)
    assert done.output.split() == [str(sandbox.MOST_TASKS)] * 2 and limit.read_text() == before


@pytest.mark.parametrize("kind", list(sandbox.Kind))
def test_a_command_that_outruns_its_time_is_killed_with_its_children(kind: sandbox.Kind, tmp_path: Path) -> None:
    if not works(kind, tmp_path):
        pytest.skip(f"{kind} does not work on this machine")
    arguments = sandbox.wrap(["/bin/sh", "-c", "sleep 1000 & sleep 1000"], tmp_path, using=kind)
    assert sandbox.run(arguments, 0.3, cwd=tmp_path).status is None


def test_what_a_killed_build_left_is_swept_up_later(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path))
    old, young = tmp_path / "scratch" / "old", tmp_path / "scratch" / "young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    scratch.make_folder()
    assert young.exists() and not old.exists()


def test_a_full_disk_is_not_taken_for_a_bad_source(own_cache, target) -> None:
    candidate = Candidate(honest_source() + "\n/* full */\n")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="free some space"):
        patch.setattr("cuda_l2.build.cpu.sandbox.run", lambda *_, **options: sandbox.Finished(1, "cannot write"))
        patch.setattr("cuda_l2.build.cpu.shutil.disk_usage", lambda path: SimpleNamespace(free=0))
        build(candidate, target)
    assert build(candidate, target).status is BuildStatus.BUILT


def test_a_line_comes_whole_or_not_at_all(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"{}")
        theirs.sendall(b"\n")
        assert sandbox.receive_line(ours, 30, 100) == b"{}\n"
        theirs.sendall(b"x" * 200)
        with pytest.raises(ConnectionError, match="too long"):
            sandbox.receive_line(ours, 30, 100)
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.01):
                theirs.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError):  # though something always comes
            sandbox.receive_line(ours, 0.1, 1 << 20)
        ended.set()
        thread.join()
        theirs.close()
        with pytest.raises(ConnectionError, match="no answer"):
            sandbox.receive_line(ours, 30, 1 << 20)


def test_no_link_is_followed_to_what_a_sandbox_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("left")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert sandbox.read_left(tmp_path / "file", 2) == b"le"
    assert sandbox.read_all_left(tmp_path / "file", 4) == b"left"
    assert [sandbox.read_all_left(tmp_path / "file", size) for size in (3, 5, 1 << 60)] == [None] * 3
    for name in ("link", "pipe", ".", "none"):
        assert sandbox.read_left(tmp_path / name, 9) is sandbox.read_all_left(tmp_path / name, 4) is None
