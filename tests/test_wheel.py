"""What is packed: every file of the package that the repository keeps, and nothing of the rest."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FROM_ELSEWHERE = {"cuda_l2/contract/contract.md", "cuda_l2/contract/tasks.md"}
"""Files of docs/, which prompts quote."""


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder], cwd=ROOT, capture_output=True
    )
    if listed.returncode or not listed.stdout:
        pytest.skip("not in a git checkout")
    return {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()}


def test_a_wheel_holds_all_of_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == tracked("cuda_l2") | FROM_ELSEWHERE
    kinds = {Path(name).suffix for name in packed}
    assert {".py", ".c", ".cu"} <= kinds
    assert any(name.startswith("cuda_l2/build/nvrtc_headers/") for name in packed)


def test_nothing_that_is_kept_is_ignored() -> None:
    """The build backend leaves out what .gitignore names, kept or not."""
    tracked("cuda_l2")
    command = ["git", "ls-files", "-z", "--cached", "--ignored", "--exclude-standard", "cuda_l2"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).stdout == b""
