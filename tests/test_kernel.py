"""A winner outlives its search: saved, loaded, pickled, copied, exported, found in the archive."""

import copy
import ctypes
import json
import multiprocessing
import os
import pickle
import pickletools
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from default_kernel import GEMM, default_kernel, operands
from made import near, trial

import cuda_l2
from cuda_l2.build import cpu
from cuda_l2.library import saved
from cuda_l2.library.kernel import Kernel, TorchKernel
from cuda_l2.library.saved import TorchsOwn
from cuda_l2.machine.cpu.target import find_compiler
from cuda_l2.optimizer import Result
from cuda_l2.records import Candidate, Gemm
from cuda_l2.search import Progress
from cuda_l2.system.errors import UserError


@pytest.fixture(scope="module")
def kernel(target) -> Kernel:
    return default_kernel(GEMM, target)


@pytest.fixture
def file(kernel, tmp_path) -> Path:
    kernel.save(tmp_path / "winner.json")
    return tmp_path / "winner.json"


def same(one: Kernel, other: Kernel) -> bool:
    a, b = operands()
    return torch.equal(one(a, b), other(a, b)) and (one.candidate, one.gemm) == (other.candidate, other.gemm)


def rewritten(file: Path, **changes: object) -> Path:
    """The file with other fields and the hash that they have."""
    fields = json.loads(file.read_text()) | changes
    del fields["sha256"]
    file.write_text(json.dumps({**fields, "sha256": saved._digest(fields)}))
    return file


def test_a_saved_kernel_is_plain_json_with_source_task_contract_and_hash(kernel, file) -> None:
    fields = json.loads(file.read_text())
    assert fields["source"] == kernel.candidate.source and fields["task"] == "70x50x90:tn"
    assert fields["contract"]["entry"] == "gemm" and fields["machine"] == kernel.machine
    assert len(fields["sha256"]) == 64
    assert same(cuda_l2.load(file), kernel) and same(cuda_l2.load(str(file)), kernel)


def test_a_new_process_loads_without_a_search(kernel, file, tmp_path) -> None:
    a, b = operands()
    torch.save((a, b), tmp_path / "operands.pt")
    script = (
        "import sys, torch, cuda_l2\n"
        "a, b = torch.load(sys.argv[2])\n"
        "torch.save(cuda_l2.load(sys.argv[1])(a, b), sys.argv[3])\n"
        "print(*sorted(name for name in sys.modules if name.startswith('cuda_l2')))"
    )
    paths = [str(file), str(tmp_path / "operands.pt"), str(tmp_path / "c.pt")]
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "c.pt"), kernel(a, b))
    assert "cuda_l2.library.kernel" in done.stdout.split() and "cuda_l2.search" not in done.stdout.split()


@pytest.mark.parametrize("field", ["source", "task", "machine", "contract"])
def test_a_file_that_was_changed_is_refused(file, field) -> None:
    fields = json.loads(file.read_text())
    fields[field] = {"entry": "other"} if field == "contract" else fields[field].replace("0", "1")
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="was changed after it was written"):
        cuda_l2.load(file)


def test_a_contract_that_the_source_does_not_state_is_refused(file) -> None:
    with pytest.raises(UserError, match="not the one that its source states"):
        cuda_l2.load(rewritten(file, contract={"entry": "gemm", "threads": 1, "workspace": "0"}))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "\x00", '{"format": "cuda-l2 kernel, version 2"}', "cos\nsystem\n(S'true'\ntR."]
)
def test_what_is_no_saved_kernel_is_refused(tmp_path, text) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(UserError, match="not a saved kernel"):
        cuda_l2.load(tmp_path / "other.json")


def test_a_file_of_brackets_or_of_another_task_is_refused(file, tmp_path) -> None:
    with pytest.raises(UserError, match=r"not a saved kernel.*: the contract declares"):
        cuda_l2.load(rewritten(file, task=f"{GEMM}:bf16"))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="not a saved kernel"):
        cuda_l2.load(tmp_path / "deep.json")


def test_a_shape_is_loaded_as_optimize_takes_it_and_an_archive_needs_a_path(tmp_path) -> None:
    with pytest.raises(UserError, match="there is no archive"):
        cuda_l2.load("64X512X512:tn", archive=str(tmp_path / "none.db"))
    with pytest.raises(UserError, match="File name too long"):
        cuda_l2.load("64x512x512:tn", archive="x" * 300)


def test_a_field_that_is_missing_is_named(file) -> None:
    fields = json.loads(file.read_text())
    del fields["task"], fields["sha256"]
    file.write_text(json.dumps({**fields, "sha256": saved._digest(fields)}))
    with pytest.raises(UserError, match=r"not a saved kernel.*: 'task'"):
        cuda_l2.load(file)


def test_code_that_would_run_when_loaded_is_refused_by_the_contracts_rules(file, kernel, tmp_path) -> None:
    trace = tmp_path / "ran"
    source = kernel.candidate.source + (
        "\nextern int creat(const char *, int);\n"
        f'__attribute__((constructor)) static void early(void) {{ creat("{trace}", 0600); }}\n'
    )
    with pytest.raises(UserError, match=r"does not build here: .*constructor"):
        cuda_l2.load(rewritten(file, source=source))
    assert not trace.exists()


def test_a_pickle_names_one_function_and_holds_text(kernel) -> None:
    data = pickle.dumps(kernel)
    strings = [value for code, value, _ in pickletools.genops(data) if "UNICODE" in code.name]
    assert strings == ["cuda_l2.library.kernel", "restore", saved.to_text(kernel._saved)]
    assert same(pickle.loads(data), kernel)


def test_a_pickle_that_was_changed_is_refused(kernel) -> None:
    data = pickle.dumps(kernel).replace(b"70x50x90", b"70x50x91")
    with pytest.raises(UserError, match="was changed"):
        pickle.loads(data)


def test_copies_are_the_kernel_itself(kernel) -> None:
    module = torch.nn.Linear(90, 50)
    module.kernel = kernel
    assert copy.copy(kernel) is kernel and copy.deepcopy(module).kernel is kernel


def _product(kernel: Kernel, a: torch.Tensor, b: torch.Tensor) -> list[list[float]]:
    return kernel(a, b).tolist()


def test_a_process_of_a_pool_gets_the_kernel(kernel) -> None:
    a, b = operands()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_product, (kernel, a.clone(), b.clone())) == kernel(a, b).tolist()


def test_a_kernel_of_another_machine_loads_with_a_warning(file, kernel) -> None:
    with pytest.warns(RuntimeWarning, match=r"verified and timed on cpu:other, and this is cpu:.*cuda_l2\.evaluate"):
        assert cuda_l2.load(rewritten(file, machine="cpu:other")).candidate.id == kernel.candidate.id


def test_without_a_compiler_loading_says_what_to_install(file, monkeypatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(saved, "detect", find_compiler)
    with pytest.raises(UserError, match=r"no C compiler: 'no-such-compiler' was not found; install gcc or clang"):
        cuda_l2.load(file)


def test_a_path_that_cannot_be_read_or_written_is_named(kernel, tmp_path) -> None:
    with pytest.raises(UserError, match=r"there is no file 'nowhere\.json'; write a saved kernel's path, or a shape"):
        cuda_l2.load("nowhere.json")
    with pytest.raises(UserError, match="cannot read"):
        cuda_l2.load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        kernel.save(tmp_path / "file" / "winner.json")


def test_a_kernel_is_saved_over_a_saved_one_and_over_no_other_file(kernel, tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.touch()
    for own in (kernel, TorchKernel(TorchsOwn(GEMM, "torch fp16", "it is slower", "")), kernel):
        own.save(path)
        assert type(cuda_l2.load(path)) is type(own)
    for other in (b"import cuda_l2\n", b"{}", b"\x7fELF\0", b'# "format": "cuda-l2 kernel, version 1"'):
        path.write_bytes(other)
        with pytest.raises(UserError, match=r"mine\.py is there, and is no saved kernel: choose another path"):
            kernel.save(path)
        assert path.read_bytes() == other
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UserError, match="is there, and is no saved kernel"):
            kernel.save(other)


@pytest.mark.parametrize("there", ["fast.h", "libfast.so"])
def test_an_export_replaces_an_earlier_one_and_no_other_file(kernel, tmp_path, there) -> None:
    other = tmp_path / "others" / there
    other.parent.mkdir()
    other.write_text("mine")
    with pytest.raises(UserError, match=rf"{there} is there.* an exported kernel: choose another name or folder"):
        kernel.export(other.parent, "fast")
    assert other.read_text() == "mine" and list(other.parent.iterdir()) == [other]
    kernel.export(tmp_path, "fast")
    (tmp_path / "libfast.so").write_text("old")
    assert kernel.export(tmp_path, "fast").read_bytes().startswith(b"\x7fELF")


def test_a_write_that_fails_leaves_the_file_that_was_there(kernel, tmp_path) -> None:
    file, limits = tmp_path / "winner.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    kernel.save(file)
    before = file.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError, match="File too large"):
            kernel.save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


@pytest.fixture
def result(kernel, target) -> Result:
    """What a search leaves, without the search."""
    build = cpu.build(kernel.candidate, target)
    found = trial("", 2.0, "offline", target.machine, task=GEMM, candidate=kernel.candidate, build=build)
    return Result(GEMM, target, Progress(), {"offline": found}, None)


def test_a_results_kernel_is_one_object_and_is_saved_by_it(result, kernel, tmp_path) -> None:
    assert result.kernel is result.kernel and same(result.kernel, kernel)
    result.save(tmp_path / "winner.json")
    assert same(cuda_l2.load(tmp_path / "winner.json"), kernel)
    assert result.export(tmp_path, "winner") == tmp_path / "libwinner.so"


def test_a_shape_loads_the_archives_best(result, archive, kernel) -> None:
    archive.append(result.best)
    slower = Candidate(kernel.candidate.source + "\n", "default", kernel.candidate.schedule, "cpu_gemm")
    archive.append(replace(result.best, candidate=slower, timing=replace(result.best.timing, speedup=near(0.5))))
    archive.append(replace(result.best, candidate=slower, machine="cpu:other"))
    assert same(cuda_l2.load("70x50x90:tn", archive=archive.path), kernel)
    with pytest.raises(
        UserError, match=r"no kernel for 70x50x91 has been timed .*run `cuda-l2 optimize 70x50x91` until"
    ):
        cuda_l2.load("70x50x91", archive=archive.path)
    with pytest.raises(UserError, match=r"there is no archive .*cuda-l2 optimize 70x50x90:tn"):
        cuda_l2.load("70x50x90:tn", archive=archive.path.with_name("none.db"))


def test_what_a_model_wrote_is_not_loaded_from_the_archive(result, archive) -> None:
    written = Candidate(result.best.candidate.source, "openai:stub")
    archive.append(replace(result.best, candidate=written))
    with pytest.raises(UserError, match="written by a language model: it is loaded by its file's path alone"):
        cuda_l2.load("70x50x90:tn", archive=archive.path)


def kept(kernel: Kernel, folder: Path) -> Path:
    """The kernel's source under the name that a search gives it."""
    path = folder / f"{str(kernel.gemm).replace(':', '-')}-{kernel.candidate.id}.c"
    path.write_text(kernel.candidate.source)
    return path


def test_a_source_that_a_search_kept_is_called_saved_and_exported_and_says_that_it_was_not_timed(
    kernel, tmp_path, recwarn
) -> None:
    path = kept(kernel, tmp_path)
    for loaded in (cuda_l2.load(path), cuda_l2.load(str(path)), cuda_l2.load(path, task="70x50x90:tn")):
        a, b = operands()
        assert torch.equal(loaded(a, b), kernel(a, b)) and loaded.candidate.id == kernel.candidate.id
        assert loaded.machine == "" and "no timing known: cuda_l2.evaluate(" in repr(loaded)
    loaded.save(tmp_path / "winner.json")
    assert "no timing known" in repr(cuda_l2.load(tmp_path / "winner.json"))
    assert "written by cuda-l2 for a machine not named" in loaded.export(tmp_path, "own").with_name("own.h").read_text()
    assert "no timing known" not in repr(kernel) and not recwarn.list


def test_a_source_under_another_name_needs_its_shape(kernel, tmp_path) -> None:
    path = kept(kernel, tmp_path)
    changed = path.with_name(path.name.replace(kernel.candidate.id, "0" * 16))
    for other in (path.rename(tmp_path / "mine.c"), changed):
        other.write_text(kernel.candidate.source)
        with pytest.raises(
            UserError, match=r"a kernel's source, which states no shape: give it, as in cuda_l2\.load\('"
        ):
            cuda_l2.load(other)
        assert cuda_l2.load(other, task=GEMM).gemm == GEMM


@pytest.mark.parametrize(
    ("source", "task", "says"),
    [
        ("int main(void) { return 0; }", GEMM, r"cannot be loaded for 70x50x90:tn: the source does not begin with a"),
        ("/* cuda-l2\ntarget = 'cuda'\n*/", GEMM, r"mine\.c is for a GPU: `cuda-l2 library import .*mine\.c SHAPE`"),
        (None, f"{GEMM}:bf16", r"cannot be loaded for 70x50x90:tn:bf16: the contract declares"),
        (None, "softmax", "kernels for tasks cannot be called from torch yet"),
        (None, "70x50", "cannot read the shape"),
    ],
)
def test_a_source_that_cannot_be_loaded_is_one_clear_line(kernel, tmp_path, source, task, says) -> None:
    (tmp_path / "mine.c").write_text(source or kernel.candidate.source)
    with pytest.raises(UserError, match=says):
        cuda_l2.load(tmp_path / "mine.c", task=task)


def test_a_source_is_loaded_under_the_contracts_rules_alone(kernel, tmp_path) -> None:
    (tmp_path / "mine.c").write_text(kernel.candidate.source + '\nvoid early(void) { __asm__("nop"); }\n')
    with pytest.raises(UserError, match="does not build here"):
        cuda_l2.load(tmp_path / "mine.c", task=GEMM)


def test_a_task_goes_with_a_source_alone(file) -> None:
    for name in (file, "70x50x90:tn", "nowhere.c", GEMM):
        with pytest.raises(UserError, match=r"task goes with the path of a kernel's source, and .* is none"):
            cuda_l2.load(name, task=GEMM)


def test_a_bf16_kernel_is_called_saved_and_exported_as_one(target, tmp_path) -> None:
    kernel = default_kernel(Gemm.parse("70x50x90:tn:bf16"), target)
    a, b = torch.randn(70, 90).bfloat16(), torch.randn(50, 90).bfloat16().t()
    assert torch.allclose(kernel(a, b).float(), a.float() @ b.float(), atol=0.5)
    kernel.save(tmp_path / "winner.json")
    assert torch.equal(cuda_l2.load(tmp_path / "winner.json")(a, b), kernel(a, b))
    kernel.export(tmp_path, "fast")
    header = (tmp_path / "fast.h").read_text()
    assert "C = A B in bf16" in header and "Elements are bf16 as" in header
    assert "fp16" not in header.replace(target.machine, "").replace("bf16", "")


def test_an_exported_library_computes_the_product_from_python_and_from_c(kernel, tmp_path) -> None:
    library = kernel.export(tmp_path, "fast")
    a, b = operands()
    out = torch.empty(70, 50).half()
    assert ctypes.CDLL(str(library)).fast(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, out))) == 0
    assert torch.equal(out, kernel(a, b))
    # a program with functions of the kernel's own names: the library calls its own
    (tmp_path / "main.c").write_text(
        '#include "fast.h"\n#include <stdio.h>\n#include <stdlib.h>\n'
        "int gemm(void) { abort(); }\nint pool_start(void) { abort(); }\nint product_call(void) { abort(); }\n"
        "static _Alignas(64) uint16_t a[70 * 90], b[90 * 50], c[70 * 50];\n"
        "int main(void) {\n"
        "    for (int i = 0; i < 70 * 90; ++i) a[i] = 0x3c00;\n"  # 1
        "    for (int i = 0; i < 90 * 50; ++i) b[i] = 0x4000;\n"  # 2
        "    if (fast(a, b, c)) return 1;\n"
        '    printf("%x %x", c[0], c[70 * 50 - 1]);\n'
        "    return 0;\n}\n"
    )
    compiler, _ = find_compiler()
    flags = ["-rdynamic", f"-L{tmp_path}", "-lfast", "-pthread", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([compiler, tmp_path / "main.c", "-o", tmp_path / "main", *flags], check=True)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "59a0 59a0")  # 180


def test_an_exported_function_needs_a_name_of_c(kernel, tmp_path) -> None:
    with pytest.raises(UserError, match="cannot name a C function"):
        kernel.export(tmp_path, "7; int x")
    with pytest.raises(UserError, match="is called gemm already"):
        kernel.export(tmp_path, "gemm")
    assert kernel.export(tmp_path).name == "libgemm_70x50x90_tn.so"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        kernel.export(tmp_path / "file")
