"""What torch.compile's processes are told: the same kernels, without asking in each what the compiler knows."""

import os
import platform
import subprocess
import sys

import pytest

from cuda_l2.measure import inductor

TOLD = "TORCHINDUCTOR_VEC_ISA_OK"
PICKED = """
from torch._inductor import cpp_builder, cpu_vec_isa
asked = []
real = cpp_builder.CppBuilder.build
cpp_builder.CppBuilder.build = lambda self: asked.append(self) or real(self)
print(cpu_vec_isa.pick_vec_isa(), len(asked))
"""


def picked(folder, variables: dict[str, str]) -> tuple[str, int]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), **variables}
    done = subprocess.run([sys.executable, "-c", PICKED], env=environment, capture_output=True, text=True, check=True)
    vectors, _, compiled = done.stdout.strip().rpartition(" ")
    return vectors, int(compiled)


@pytest.mark.skipif(TOLD not in inductor.environment(), reason="this compiler does not know them all")
@pytest.mark.full
def test_the_vectors_that_inductor_picks_are_the_same_without_compiling_for_it(tmp_path) -> None:
    vectors, compiled = picked(tmp_path / "asked", {})
    assert compiled, "or else there is nothing to save"
    told, without = picked(tmp_path / "told", inductor.environment())
    assert told == vectors and without < compiled


def test_a_compiler_that_does_not_know_vectors_or_is_not_there_decides_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name, knows in (("new", "exit 0"), ("old", 'case "$*" in *amx*) exit 1; esac')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{knows}\n")
        (tmp_path / name).chmod(0o755)
    found = {name: inductor.environment(str(tmp_path / name)) for name in ("new", "old", "none")}
    assert found == {"new": {**found["none"], TOLD: "1"}, "old": found["none"], "none": found["none"]}
    assert found["none"] == {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    inductor.environment.cache_clear()
    assert inductor.environment(str(tmp_path / "new")) == found["none"], "whose vectors are others"
    inductor.environment.cache_clear()
