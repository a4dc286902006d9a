"""While modules load nobody looks for garbage, and afterwards it is looked for again, whatever happened."""

import gc
import os
import subprocess

import pytest
from drawing import ROOT

from cuda_l2.system.loading import PROGRAM, loading


def test_garbage_waits_until_modules_are_loaded() -> None:
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()


def test_a_program_has_its_own_arguments_and_looks_for_garbage_in_what_it_makes(tmp_path) -> None:
    text = "import gc, sys\nloading = gc.isenabled()\n"
    text += "def main(): print(loading, gc.isenabled(), gc.get_freeze_count() > 1000, sys.argv[1:])\n"
    (tmp_path / "program.py").write_text(text)
    given = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = subprocess.run([*PROGRAM, "program", "a", "b"], env=given, capture_output=True, text=True)
    assert run.stdout == "False True True ['a', 'b']\n", run.stderr
