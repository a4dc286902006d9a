"""What torch.compile's processes are told: the same kernels, without asking in each what the compiler knows."""

import os
import platform
import subprocess
import sys

import pytest

from cuda_l2.measure import inductor

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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors' vectors are asked for as ever")
def test_the_vectors_that_inductor_picks_are_the_same_without_compiling_for_it(tmp_path) -> None:
    vectors, compiled = picked(tmp_path / "asked", {})
    assert compiled, "or else there is nothing to save"
    told, without = picked(tmp_path / "told", inductor.environment())
    assert told == vectors and without < compiled


def test_a_compiler_that_knows_no_vectors_or_is_not_there_decides_nothing(tmp_path) -> None:
    old = tmp_path / "old-compiler"
    old.write_text('#!/bin/sh\ncase "$*" in *amx*) exit 1; esac\n')
    old.chmod(0o755)
    for compiler in (str(old), str(tmp_path / "none")):
        assert inductor.environment(compiler) == {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
