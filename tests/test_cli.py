"""The command line: bad input is one clear line and exit status 2, nothing half-written; help teaches; starts fast."""

import importlib.util
import json
import os
import py_compile
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch
from command_line import run, run_over
from conftest import CHEATS, honest_source
from cyclopts import CycloptsError
from drawing import ROOT
from made import trial
from waiting import CLI

from cuda_l2 import cli
from cuda_l2.build import cuda_compiler
from cuda_l2.commands import _app, doctor, throughput
from cuda_l2.machine.cpu import target as cpu
from cuda_l2.optimizer import LAUNCHES_OF_ONE_CHECK
from cuda_l2.records import Gemm
from cuda_l2.system import native, paths, scratch
from cuda_l2.system.errors import MachineError, UserError

COMMANDS = (
    *("optimize", "show", "check", "profile", "doctor", "bench", "prove", "record", "compare", "select"),
    *("throughput", "index", "prompts", "exchanges", "corpus", "collect", "train", "tasks"),
    *("library", "tune", "report", "watch"),
)


LONG = [
    *[(["show", "8x8x8", "--archive"], []), (["check"], ["8x8x8"]), (["check", "missing.c"], [])],
    *[(["archive", "check"], []), (["report"], ["-o", "page.html"])],
]
"""Words of commands before and after a path."""
FOLDER = ["show", "7x7x7", "--archive"], ["optimize", "7x7x7", "--archive"], ["archive", "check"]
"""Words of commands before an archive."""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["optimize", "0x5x5"], "at least 1"),
        (["optimize", "1.5x2x3"], "whole numbers"),
        (["optimize", "-1x2x3"], "-1x2x3: M, N and K must be whole numbers of at least 1"),
        (["tune", "64x64x64", "-64x64x64:tn"], "-64x64x64:tn: M, N and K must be whole numbers of at least 1"),
        (["optimize", "64x64x64", "--page", "/proc/nowhere/page.html"], "cannot write /proc/nowhere/page.html"),
        (["optimize", "64x64x64", "--page", "x" * 300], "File name too long"),
        (["optimize", "512x512x512:nt"], "A is row-major"),
        (["optimize", "512x512x512:row"], "layout"),
        (["optimize", "512x512x512", "banana"], "shape"),
        (["optimize", "64x64x64", "--budget", "-1"], "budget"),
        (["optimize", "64x64x64", "--budget", "soon"], "budget"),
        (["optimize", "64x64x64", "--budget", "nan"], "budget"),
        (["optimize", "64x64x64", "--trials", "0"], "trials"),
        (["optimize", "64x64x64", "--target", "tpu"], "target"),
        (["optimize", "64x64x64", "--policy", "nobody"], "policy"),
        (["optimize", "64x64x64", "--protocol", "quick"], "protocol"),
        (["optimize", "64x64x64", "--archive", "/proc/nowhere/archive.db"], "--archive"),
        (["optimize", "999999x999999x999999"], "memory"),
        (["optimize", "40000x400x4000", "--budget", "0.01s"], "budget"),
        (["show", "7x7x7", "--archive", "missing.db"], "optimize"),
        *[([*words, "/"], "/ is a folder; give an archive's file") for words in FOLDER],
        (["select", "--layouts", "nn,nt"], "layout"),
        (["select", "--accumulate", "fp8"], "accumulator"),
        (["select", "--weights", "1,2"], "four numbers"),
        (["select", "--most", "0"], "at least 1"),
        (["select", "--grid", "nowhere.txt"], "nowhere.txt"),
        (["check", "missing.c", "64x64x64"], "missing.c"),
        (["check", ".", "64x64x64"], "cannot read"),
        *[([*before, "x" * 300, *rest], "File name too long") for before, rest in LONG],
        (["check", "64x64x64", str(CHEATS / "honest.c")], "the kernel's file comes first"),
        (["record", "--out", "world.parquet"], "tasks are missing"),
        (["record", "64x64x64", "--out", "world.parquet", "--schedules", "0"], "at least 1"),
        (["record", "64x64x64", "--out", "world.parquet", "--part", "3/2"], "no part"),
        (["record", "64x64x64", "--out", "world.parquet", "--join", "a.parquet"], "measures nothing"),
        (["record", "--out", "world.parquet", "--join", "missing.parquet"], "there is no file"),
        (["record", "--out", "world.parquet", "--grid", "nowhere.txt"], "nowhere.txt"),
        (["compare", "--world", "missing.parquet"], "cuda-l2 record"),
        (["train", "--stage", "schedule"], "--world"),
        (["train", "--stage", "nothing"], "schedule"),
        (["optimize", "64x64x64", "--weights", "missing.safetensors"], "no weights"),
        (["optimize", "64x64x64", "--policy", "tpe", "--weights", "x.safetensors"], "not of tpe"),
        (["prove", "missing.csv"], "missing.csv"),
        (["tune"], "name the shapes"),
        (["tune", "8-4x64x64"], "range of rows"),
        (["tune", "64x64xq"], "cannot read the shape"),
        (["optimize", "64x64x64", "--seed", "-1"], "seed"),
        (["optimize", "64x64x64", "999999x999999x999999"], "memory"),
        (["show", "64x64x64", "--count", "0"], "at least 1"),
        (["show", "64x64x64", "--source", "--json"], "--source or for --json"),
        (["record", "64x64x64", "--out", "/proc/nowhere/world.parquet"], "cannot write"),
        (["bench", "64x64x64", "--out", "/proc/nowhere"], "cannot write"),
        (["optimize", "64x64x64", "--policy", "openai:m@http://"], "server"),
        (["optimize", "64x64x64", "--policy", "hf:nowhere/at/all"], "save_pretrained"),
        (["optimize", "64x64x64", "--money", "1"], "--price-in"),
        (["optimize", "64x64x64", "--policy", "openai:m@http://x/v1", "--prompts", "nowhere"], "cuda-l2 prompts"),
        (["prompts", "/proc/nowhere"], "cannot write"),
        (["optimize", "64x64x64", "--checker", "schedule"], "no language model"),
        (["optimize", "64x64x64", "--cheats", "nowhere"], "go with --checker"),
        (["optimize", "64x64x64", "--target", "cpu", "--tuning", "paper"], "--tuning needs one"),
        (["index", "--folder", "nowhere"], "not a folder"),
        (["corpus", "--out", "/proc/nowhere"], "cannot write"),
        (["tasks", "softmax", "--out", "found.jsonl"], "goes with --kernelbench"),
        (["exchanges", "--archive", "missing.db"], "docs/llm.md"),
        (["optimize", "64x64x64", "--contract", "none"], "short, long"),
        (["prompts"], "--measure"),
        (["mcp", "64x64"], "64x64"),
        (["mcp", "64x64x64", "--http", "99999"], "port"),
        (["mcp", "64x64x64", "--trials", "0"], "trials"),
        (["collect", "64x64x64", "--policy", "random", "--out", "collected", "--least-speedup", "nan"], "negative"),
        (["bench", "--tasks", "softmax", "--grid", "paper"], "--grid does not go with --tasks"),
        (["tasks", "--kernelbench", ".", "--timeout", "0"], "--timeout must be a positive time"),
        (["compare", "--world", "."], "is a directory"),
        (["optimize", "64x64x64", "--judges", "2"], "--judges: there is no GPU"),
        (["check", "/dev/zero", "64x64x64"], "it has more than 256 MiB"),
        (["check", "/bin/true", "64x64x64"], "it is no text in UTF-8"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(arguments, says, typed, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_L2_HOME", str(tmp_path / "home"))
    status, out, error = typed(*arguments)
    assert status == 2 and out == "", error
    assert len(error.splitlines()) == 1 and says in error
    kept = {path.name.split("-")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert kept <= {"archive.db"}  # an empty archive may be there, nothing else


def test_the_least_budget_that_is_named_suffices_and_is_no_zero(typed) -> None:
    status, _, error = typed("optimize", "512x512x512", "--target", "cpu", "--budget", "0.0000001s")
    (least,) = map(float, re.findall(r"takes at least (\S+) s on this machine", error))
    once = cpu.detect().bound_us(Gemm(512, 512, 512)) * 1e-6 * LAUNCHES_OF_ONE_CHECK
    assert status == 2 and once <= least < once + 0.0011


def test_options_that_do_not_exist_are_refused_with_status_2() -> None:
    done = run("optimize", "64x64x64", "--speed", "high")
    assert done.returncode == 2 and "--speed" in done.stdout + done.stderr


@pytest.mark.parametrize(("typed_as", "accepted"), [("1.5", False), ("1.2.3", False), ("1.0", True), ("2", True)])
def test_a_fraction_is_no_whole_number(typed_as, accepted) -> None:
    """Cyclopts alone rounds it."""
    try:
        _, bound, _ = _app.app.parse_args(
            ["optimize", "64x64x64", "--trials", typed_as], exit_on_error=False, print_error=False
        )
    except CycloptsError as error:
        assert not accepted and f"a whole number is wanted, not {typed_as}" in str(error)
    else:
        assert accepted and bound.arguments["settings"].trials == float(typed_as)


def test_a_corrupt_archive_is_refused_and_left_alone(tmp_path) -> None:
    path = tmp_path / "archive.db"
    path.write_text("this is no archive, whatever its name" * 40)
    done = run("optimize", "64x64x64", "--archive", str(path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert path.read_text() == "this is no archive, whatever its name" * 40


def test_without_a_compiler_the_way_to_get_one_is_named(tmp_path) -> None:
    for command in (["optimize", "64x64x64"], ["check", str(CHEATS / "honest.c"), "64x64x64"]):
        done = run(*command, CC="no-such-compiler", CUDA_L2_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "gcc" in done.stderr
    done = run("doctor", CC="no-such-compiler")
    assert done.returncode == 2 and "apt install gcc" in done.stdout


def test_a_launcher_before_the_compiler_and_a_byte_order_mark_do_no_harm(tmp_path) -> None:
    source = tmp_path / "honest.c"
    source.write_text(honest_source(), "utf-8-sig")
    setting = {"CC": "ccache gcc -DUNUSED=1", "CUDA_L2_CACHE": str(tmp_path / "cache")}
    done = run("check", str(source), "16x16x16", "--protocol", "search", **setting)
    assert "correct" in done.stdout and not done.stderr.startswith("cuda-l2:"), done.stderr
    (compiler,) = (line for line in run("doctor", **setting).stdout.splitlines() if "C compiler" in line)
    assert compiler.startswith("ok")


@pytest.mark.parametrize(
    ("value", "command"),
    [
        (None, ["cc"]),
        ("", ["cc"]),
        ("gcc", ["gcc"]),
        ("ccache gcc", ["gcc"]),
        ("/usr/bin/ccache distcc clang -m64", ["clang", "-m64"]),
        ("ccache", ["cc"]),
        ("'/with space/gcc' -m64", ["/with space/gcc", "-m64"]),
        ("'never closed", ["'never closed"]),
    ],
)
def test_the_compiler_may_be_a_command(value, command, monkeypatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    if value is not None:
        monkeypatch.setenv("CC", value)
    assert paths.compiler_command() == command


def test_a_cache_on_a_mount_with_noexec_is_one_clear_line(tmp_path, monkeypatch) -> None:
    scratch.require_executable(tmp_path)
    flags = types.SimpleNamespace(f_flag=os.ST_NOEXEC, f_blocks=9, f_bfree=9, f_bavail=9, f_frsize=1 << 30)
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path))
    cache = next(finding for finding in doctor._folders() if finding.what == "cache")
    assert not cache.good and cache.needed and "noexec" in cache.found
    assert "set CUDA_L2_CACHE" in cache.found
    helper = tmp_path / "helper.c"
    helper.write_text("int main(void) { return 0; }")
    with pytest.raises(UserError, match="noexec"):
        native.compiled(helper)


def test_optimize_and_show_as_json_and_tables(tmp_path) -> None:
    archive = str(tmp_path / "archive.db")
    shapes, options = ("64x48x80", "33x7x9:tn"), ("--trials", "3", "--budget", "1h", "--protocol", "offline")
    done = run("optimize", *shapes, *options, "--archive", archive, "--json")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["gemm"] for result in results] == ["64x48x80", "33x7x9:tn"]
    for result in results:
        assert set(result["reports"]) == {"offline"}
        assert Path(result["source"]).read_text().startswith("/* cuda-l2")
        assert result["environment"]["torch"]
        assert isinstance(result["environment"]["peak_in_quiet"], bool)
    shown = json.loads(run("show", "64x48x80", "--archive", archive, "--json").stdout)
    assert shown[0]["protocol"] == "offline"
    table = run("show", "64x48x80", "--archive", archive).stdout
    assert "rows of the register tile" in table and "offline" in table
    lines = run("show", "64x48x80", "--archive", archive, COLUMNS="80").stdout.splitlines()
    (best,) = (line for line in lines if re.match(r"  [0-9a-f]{16}  offline ", line))
    told = lines[lines.index(best) + 1]
    ratios = shown[0]["timing"]["speedups"]
    assert any(f"[{ratio['low']:.3f}, " in best and f"against {name}; " in told for name, ratio in ratios)
    assert f"{shown[0]['created'][:16].replace('T', ' ')} UTC" in told
    assert f"on {shown[0]['machine']}:" in lines
    source = run("show", "64x48x80", "--archive", archive, "--source").stdout
    assert source.startswith("/* cuda-l2")
    mine = tmp_path / "mine.c"
    mine.write_text(source)
    judged = run("check", str(mine), "64x48x80", "--protocol", "search")
    assert judged.returncode == 0 and "correct" in judged.stdout and "reward" in judged.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["optimize"], "SHAPES requires an argument; see `cuda-l2 optimize --help`"),
        (["optimize", "8x8x8", "--budgt", "3s"], "Did you mean --budget?; see `cuda-l2 optimize --help`"),
        (["nosuch"], 'Unknown command "nosuch". Available commands: archive, bench'),
        (["archive", "check"], "see `cuda-l2 archive check --help`"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(arguments, says) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and not done.stdout and says in done.stderr
    assert done.stderr.startswith("cuda-l2: ") and done.stderr.count("\n") == 1


def test_a_compilers_words_are_printed_as_they_are(tmp_path) -> None:
    bad = tmp_path / "bad.c"
    bad.write_text('/* cuda-l2\ntarget = "cpu"\n*/\nint a[4], y;\nint x[/*c*/ 2] = nothing[a[y]];\n')
    done = run("check", str(bad), "45x40x64")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "x[/*c*/ 2]" in done.stdout and "[a[y]]" in done.stdout


@pytest.mark.parametrize("arguments", [(), ("--compile-only", "sm_90a"), ("--target", "cuda"), ("--full", "--json")])
def test_a_file_without_a_contract_is_told_first_what_it_lacks(arguments, tmp_path) -> None:
    (tmp_path / "mine.c").write_text("void gemm(void) {}\n")
    done = run("check", "mine.c", "64x64x64", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    path = re.search(r"\S*/docs/contract\.md", done.stderr)
    assert path and Path(path[0]).exists() and "begin it with a comment /* cuda-l2" in done.stderr


@pytest.mark.parametrize("package", ["cuda", "cuda.core"])
def test_compiling_without_the_packages_for_it_names_the_extra(package, typed, monkeypatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == package else real(name, *of))
    cuda_compiler.toolchain.cache_clear()
    status, _, err = typed("check", str(ROOT / "examples" / "mma_sync.cu"), "64x64x64", "--compile-only", "sm_90a")
    assert (status, err) == (
        2,
        "cuda-l2: compiling CUDA kernels needs the package cuda-core: pip install 'cuda-l2[cuda]'\n",
    )


def test_a_cpu_kernel_is_not_compiled_for_a_gpu(tmp_path) -> None:
    done = run("check", str(CHEATS / "zero_shortcut.c"), "64x64x64", "--compile-only", "sm_90a")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and 'target = "cpu"' in done.stderr


def test_a_python_file_is_judged_with_kernelbench_alone(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("class ModelNew: ...\n")
    done = run("check", "mine.py", "64x64x64", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--kernelbench" in done.stderr


def test_check_says_where_full_adds_nothing() -> None:
    assert "--full adds nothing" in run("check", str(CHEATS / "broken.c"), "45x40x64", "--full").stderr
    assert "--full" not in run("check", str(CHEATS / "broken.c"), "45x40x64").stderr


def test_check_names_the_failing_element_and_exits_with_1() -> None:
    done = run("check", str(CHEATS / "zero_shortcut.c"), "45x40x64")
    assert done.returncode == 1
    assert "C[" in done.stdout and "expected" in done.stdout
    trial = json.loads(run("check", str(CHEATS / "broken.c"), "45x40x64", "--json").stdout)[0]
    assert trial["build"]["status"] == "failed" and trial["verdict"] is None


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does(command, typed) -> None:
    status, said, _ = typed(command, "--help")
    assert status == 0 and len(said.splitlines()) > 4
    assert not re.search(r"[A-Z] --[a-z]|--empty-", said)  # options are options alone, each under one name


def test_help_fills_its_lines_however_the_code_is_wrapped() -> None:
    done = run("bench", "--help", COLUMNS="400")
    assert "what works and what is faster, by group and baseline: tasks.md and tasks.csv." in done.stdout
    assert "over a grid the one that optimize keeps." in done.stdout


def test_throughput_says_how_far_it_is(monkeypatch, capsys) -> None:
    monkeypatch.setattr(throughput, "WARM_UP", 1)
    throughput.command("64x64x64", target="cpu", candidates=2)
    done = capsys.readouterr()
    assert "2 of 64x64x64" in done.out and "candidates a second" in done.out
    first, *_, last = done.err.splitlines()
    assert "warming up" in first and last.startswith("2 of 2 candidates")


def test_doctor_says_which_folder_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").touch()
    for variable, name in (("CUDA_L2_HOME", "archive"), ("CUDA_L2_CACHE", "cache")):
        done = run("doctor", **{variable: str(tmp_path / "file" / "folder")})
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"--  {name} "))
        assert done.returncode == 2 and "cannot be written" in line and variable in line
        assert "apt install gcc" not in done.stdout  # which is there
    assert "cannot write the cache" in run("doctor", CUDA_L2_CACHE="/proc/nowhere").stdout


def test_doctor_says_where_torch_has_no_bytecode(tmp_path, monkeypatch) -> None:
    late = tmp_path / "torch" / "_dynamo" / "__init__.py"
    late.parent.mkdir(parents=True)
    for path in (late, late.parent.with_name("__init__.py")):
        path.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    (found,) = doctor._bytecode()
    assert not found.good and f"-m compileall -q {tmp_path / 'torch'}" in str(found)
    py_compile.compile(str(late))
    assert not list(doctor._bytecode())


def test_doctor_passes_here() -> None:
    done = subprocess.run([*CLI, "doctor"], capture_output=True, text=True)
    assert done.returncode == 0 and "C compiler" in done.stdout


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MachineError("the driver's\nown words"), "the machine failed: the driver's own words; `cuda-l2 doctor` says"),
        (torch.OutOfMemoryError("tried to\nallocate"), "out of GPU memory; choose a smaller shape"),
    ],
)
def test_a_failure_of_the_machine_is_one_line_and_status_2(error, said, monkeypatch, capsys) -> None:
    def fails(**given: bool) -> None:
        raise error

    monkeypatch.setattr(_app, "app", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"cuda-l2: {said}")


@pytest.mark.parametrize("arguments", [["show", "64x64x64"], ["tasks"], ["--version"]])
def test_an_output_that_cannot_be_written_is_one_line_and_status_2(arguments, archive) -> None:
    errors = archive.path.with_name("errors")
    errors.touch()
    files = {"input": os.devnull, "output": "/dev/full", "errors": str(errors)}
    archive.append(trial("", 2.0, task=Gemm.parse("64x64x64")))
    status = run_over(files, *arguments, CUDA_L2_HOME=str(archive.path.parent))
    assert errors.read_text() == "cuda-l2: cannot write the output: No space left on device\n"
    assert status == 2


def test_ctrl_c_is_said(monkeypatch, capsys) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_app.app["prompts"], "default_command", interrupted)
    monkeypatch.setattr("sys.argv", ["cuda-l2", "prompts"])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capsys.readouterr().err == "cuda-l2: interrupted\n"


def test_ctrl_c_is_said_while_modules_load(tmp_path) -> None:
    (tmp_path / "cyclopts.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    given = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([*paths.CLI, "show", "8x8x8"], env=given, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "cuda-l2: interrupted\n")


def test_the_cause_of_a_failed_compilation_is_said(tmp_path, monkeypatch) -> None:
    source = tmp_path / "helper.c"
    source.write_text('#include "missing.h"\n')
    monkeypatch.setattr(native, "_text", Path.read_bytes)  # which would read the file that is missing
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"missing\.h: No such file or directory"):  # and not "compilation terminated."
        native.compiled(source)


@pytest.mark.parametrize("kept", [0, 3000])
def test_a_damaged_helper_is_compiled_again(kept, tmp_path, monkeypatch) -> None:
    source = tmp_path / "helper.c"
    source.write_text("int answer(void) { return 42; }\n")
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path / "cache"))

    def loaded() -> Path:
        native.compiled.cache_clear()  # as in a later process
        return native.compiled(source, "-shared", "-fPIC")

    helper = loaded()
    written, whole = helper.stat().st_ino, helper.read_bytes()
    assert loaded().stat().st_ino == written, "a whole one is not compiled again"
    os.truncate(helper, kept)
    assert loaded().read_bytes() == whole


def test_a_variable_that_is_empty_moves_no_folder(monkeypatch) -> None:
    for name in ("CUDA_L2_HOME", "CUDA_L2_CACHE"):
        monkeypatch.delenv(name, raising=False)
    usual = paths.data_dir(), paths.cache_dir()
    for name in ("CUDA_L2_HOME", "CUDA_L2_CACHE"):
        monkeypatch.setenv(name, "")
    assert (paths.data_dir(), paths.cache_dir()) == usual


def test_doctor_names_every_extra_and_the_pip_of_its_own_python(monkeypatch) -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    said = [str(finding) for finding in doctor._packages()][1:]
    for line in said:
        assert f"{sys.executable} -m pip install 'cuda-l2[" in line
    assert {line.split("[")[1].split("]")[0] for line in said} == extras - {"cuda", "dev"}
