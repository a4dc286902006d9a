"""Variables of a user's shell that slow an arm: no process that runs one has them, and the run's record names them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_l2.measure.torch_baselines import TorchBaselines
from cuda_l2.rigs.cpu import CpuRig
from cuda_l2.system import variables

SLOWING = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "DNNL_VERBOSE": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "GOMP_SPINCOUNT": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_LOG_LEVEL": "5",
    "NVIDIA_TF32_OVERRIDE": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TRITON_INTERPRET": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
}
HARMLESS = {
    "TORCHINDUCTOR_CACHE_DIR": "/somewhere",
    "TRITON_PTXAS_PATH": "/somewhere/ptxas",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "NVIDIA_VISIBLE_DEVICES": "all",
}


@pytest.fixture
def shell(monkeypatch) -> None:
    """The shell of a user with every variable set."""
    for name in [name for name in os.environ if name.startswith(variables.PREFIXES)]:
        monkeypatch.delenv(name)
    for name, value in (SLOWING | HARMLESS).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(variables, "_stripped", {})


def test_variables_that_slow_an_arm_are_stripped_and_no_others(shell) -> None:
    environment = variables.clean(os.environ)
    assert not environment.keys() & SLOWING.keys() and environment.keys() >= HARMLESS.keys()
    assert os.environ.keys() - environment.keys() == SLOWING.keys()


def test_the_baselines_process_starts_without_them(shell) -> None:
    with TorchBaselines(1) as baselines:
        environment = Path(f"/proc/{baselines._process.pid}/environ").read_text()
    assert not [name for name in SLOWING if f"{name}=" in environment]


def test_a_command_strips_its_own_process_and_the_run_records_it(shell) -> None:
    stripped = ", ".join(f"{name}={value}" for name, value in sorted(SLOWING.items()))
    assert variables.recorded() == {"stripped_variables": stripped}
    assert variables.recorded(own_process=True) == {"variables": stripped}  # a program of the user's that set them
    variables.clean_process()
    assert not os.environ.keys() & SLOWING.keys() and os.environ["OMP_WAIT_POLICY"] == "passive"
    assert variables.recorded() == variables.recorded(own_process=True) == {"stripped_variables": stripped}


def test_a_run_on_a_cpu_records_them(shell, rig: CpuRig) -> None:
    assert "MKL_NUM_THREADS=1" in rig.environment()["stripped_variables"]


def test_a_command_that_a_command_starts_records_the_same(shell) -> None:
    variables.clean_process()
    recorded, code = (
        variables.recorded(),
        "from cuda_l2.system import variables as v; v.clean_process(); print(v.recorded())",
    )
    said = subprocess.run(
        [sys.executable, "-c", code], env=variables.given(), capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == repr(recorded)
