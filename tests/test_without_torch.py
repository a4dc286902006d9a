"""Without torch, which our package does not bring: what works, and the one line that says how to get it."""

import subprocess
import sys

import pytest

from cuda_l2.commands import _options, library
from cuda_l2.commands._options import require_cuda_packages
from cuda_l2.machine.cuda import target
from cuda_l2.system.errors import UserError

BLOCKED = "import sys; sys.modules['torch'] = None; "


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED + code, *arguments], capture_output=True, text=True)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("from cuda_l2.cli import main; main()", *arguments)


@pytest.mark.parametrize("arguments", [("--version",), ("optimize", "--help")])
def test_what_needs_no_torch_works(arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert done.returncode == 0 and not done.stderr


def test_the_command_line_loads_nothing_slow_before_it_knows_the_command() -> None:
    done = python("import cuda_l2.commands._app; print(*{'numpy', 'pyarrow', 'sqlalchemy'} & sys.modules.keys())")
    assert done.returncode == 0 and not done.stdout.strip()


@pytest.mark.parametrize("arguments", [("optimize", "64x64x64"), ("tasks",)])
def test_a_command_that_needs_torch_says_how_to_get_it_in_one_line(arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    assert "pip install torch --index-url" in line and "'cuda-l2[cuda]'" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["optimize", "64x64x"], "cannot read the shape '64x64x'"),
        (["optimize", "64x64x64", "--policy", "nobody"], "no policy 'nobody'"),
        (["optimize", "64x64x64", "--tuning", "quick"], "no way of tuning 'quick'"),
        (["optimize", "64x64x64", "--weights", "missing.safetensors"], "no weights at missing.safetensors"),
        (["optimize", "64x64x64", "--checker", "schedule"], "no language model"),
        (["bench", "--grid", "64x64x64", "--protocols", "ofline"], "no protocol 'ofline'"),
        (["optimize", "64x64x64", "--workers", "0"], "--workers is auto"),
        (["optimize", "64x64x64", "--archive", __file__], "not a usable archive"),
        (
            ["optimize", "64x64x64", "--archive", "nowhere/archive.db"],
            "there is no folder nowhere; make it, or choose",
        ),
        (["bench", "64x64x64", "--policy", "nobody"], "no policy 'nobody'"),
        (["library", "bench", "64x64x"], "cannot read the shape '64x64x'"),
        (["profile", "missing.cu", "64x64x64"], "cannot read missing.cu"),
        (["record", "64x64x64", "--out", "world.parquet", "--seed", "-1"], "seed must not be negative"),
        (["compare", "--world", "missing.parquet", "--out", "."], "no file missing.parquet"),
        (["report", "missing"], "missing is not there"),
        (["optimize", "64x64x64", "--page", "/proc/nowhere/page.html"], "cannot write /proc/nowhere/page.html"),
    ],
)
def test_a_mistake_is_said_before_torch_is_loaded(arguments: list[str], says: str) -> None:
    assert says in command(*arguments).stderr


def test_a_gpu_that_is_not_there_is_said_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_options, "gpu_present", lambda: False)
    with pytest.raises(UserError, match="no GPU: this machine has no NVIDIA driver or device"):
        _options.require_target("cuda")
    monkeypatch.setattr(_options, "gpu_present", lambda: True)
    _options.require_target("cuda")


@pytest.mark.parametrize("present", [False, True])
def test_without_a_device_no_gigabytes_are_advised(present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (target, _options):
        monkeypatch.setattr(module, "gpu_present", lambda: present)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(UserError) as refused:
        require_cuda_packages()
    with pytest.raises(UserError, match=r"^the kernels of the pack need an NVIDIA GPU; ") as unbuilt:
        library.build()
    for said in (target.missing(), str(refused.value), str(unbuilt.value)):
        assert ("this machine has no NVIDIA driver or device" in said) is not present
        assert ("is not installed: pip install 'cuda-l2[cuda]'" in said) is present


@pytest.mark.parametrize("target", [[], ["--target", "cpu"]])
def test_what_its_contract_refuses_is_judged_before_torch_or_a_worker_is_loaded(target, tmp_path) -> None:
    kernel = tmp_path / "kernel.c"
    kernel.write_text('/* cuda-l2\ntarget = "cpu"\nthread = 2\n*/\nvoid gemm(void) {}\n')
    started = (
        "import subprocess; sys.addaudithook(lambda *seen: seen[0] == 'subprocess.Popen' and print(seen[1][1][1:]));"
    )
    done = python(f"{started} from cuda_l2.cli import main; main()", "check", str(kernel), "64x64x64", *target)
    says = "build    refused: the contract: unknown fields: thread; known fields: buffer, dtype, entry"
    compiler, refused, reward = done.stdout.splitlines()
    assert done.returncode == 1 and refused.startswith(says) and reward == "reward   -1.0000", done
    assert compiler == "['--version']", "of the compiler, which names the machine"


def test_the_package_imports_and_its_calls_say_how_to_get_torch() -> None:
    code = "import cuda_l2; print(cuda_l2.Gemm.parse('64x64x64'))\ntry: cuda_l2.optimize\n"
    done = python(code + "except cuda_l2.UserError as error: print(error)")
    shape, line = done.stdout.splitlines()
    assert shape == "64x64x64" and "pip install torch --index-url" in line


def test_another_missing_package_is_not_taken_for_torch() -> None:
    done = python("sys.modules['numpy'] = None; import cuda_l2; cuda_l2.optimize")
    assert "ModuleNotFoundError" in done.stderr and "numpy" in done.stderr
