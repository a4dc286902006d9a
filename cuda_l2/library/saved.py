"""Kernels in files: source, task, contract and hash as JSON; or a shared library with a C header."""

import hashlib
import json
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_l2 import contract
from cuda_l2.archive import Archive
from cuda_l2.build import cpu
from cuda_l2.machine.cpu.target import detect
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm
from cuda_l2.system import paths, scratch
from cuda_l2.system.errors import UserError
from cuda_l2.system.native import compiled

FORMAT = "cuda-l2 kernel, version 1"
EXPORTED = Path(__file__).with_name("exported.c")
REPORTED = ("offline", "paper", "server", "search")
"""Protocols by which the archive's best is chosen, the first that has one."""


@dataclass(frozen=True)
class Saved:
    """A kernel without compiled code: what a file or a pickle of it holds."""

    gemm: Gemm
    candidate: Candidate
    machine: str  # identity of the one on which it was verified and timed; empty where nobody said


def to_text(kernel: Saved) -> str:
    """A kernel as JSON."""
    candidate = kernel.candidate
    fields: dict[str, Any] = {
        "format": FORMAT,
        "task": str(kernel.gemm),
        "machine": kernel.machine,
        "proposer": candidate.proposer,
        "family": candidate.family,
        "schedule": dict(candidate.schedule),
        "contract": _terms(candidate.source),
        "source": candidate.source,
    }
    return json.dumps({**fields, "sha256": _digest(fields)}, indent=1) + "\n"


def from_text(text: str) -> Saved:
    """The kernel that `to_text` wrote; UserError where the text is another's or was changed. Runs nothing of it."""
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise UserError(f"not a saved kernel: the file's format must be {FORMAT!r}")
        if fields.pop("sha256", None) != _digest(fields):
            raise UserError("the saved kernel was changed after it was written: its hash is another; save it again")
        schedule = tuple((str(name), int(value)) for name, value in fields["schedule"].items())
        candidate = Candidate(fields["source"], fields["proposer"], schedule, fields["family"])
        if _terms(candidate.source) != fields["contract"]:
            raise UserError("the saved kernel's contract is not the one that its source states")
        return Saved(Gemm.parse(fields["task"]), candidate, fields["machine"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a saved kernel: {error}") from None


def write(kernel: Saved, path: Path) -> None:
    """Write a kernel's file; UserError where it cannot be written."""
    try:
        path.write_text(to_text(kernel))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def find(name: Path | str, archive: Path | str | None = None) -> Saved:
    """A saved kernel by its file's path, or the archive's best for a shape on this machine."""
    if isinstance(name, str) and not Path(name).exists():
        if re.match(r"\d+x\d+x", name):
            return _best(Gemm.parse(name), Path(archive or paths.default_archive()))
        raise UserError(f"there is no file {name!r}; write a saved kernel's path, or a shape as in 512x512x512")
    try:
        return from_text(Path(name).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {name}: {error}") from None


def built(kernel: Saved) -> Build:
    """The kernel compiled for this machine under the rules of the contract; UserError where they refuse it."""
    target = detect()
    if kernel.machine and kernel.machine != target.machine:
        warnings.warn(
            f"the kernel for {kernel.gemm} was verified and timed on {kernel.machine}, and this is {target.machine}:"
            " verify it here with cuda_l2.evaluate(kernel.candidate.source, kernel.gemm)",
            RuntimeWarning,
            stacklevel=2,
        )
    build = cpu.build(kernel.candidate, target)
    if build.status is not BuildStatus.BUILT:
        raise UserError(f"the kernel for {kernel.gemm} does not build here: {build.reason}")
    return build


def export(kernel: Saved, folder: Path, name: str = "") -> Path:
    """Write lib<name>.so, which needs nothing but the C library, and <name>.h; the library's path."""
    gemm, terms = kernel.gemm, contract.parse_cpu(kernel.candidate.source)
    name = name or re.sub(r"\W", "_", f"gemm_{gemm}")
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise UserError(f"{name!r} cannot name a C function")
    built(kernel)  # the rules judge the text
    macros = {
        **{"NAME": name, "ENTRY": terms.entry, "M": gemm.m, "N": gemm.n, "K": gemm.k},
        **{"POOL_THREADS": terms.threads, "WORKSPACE": max(1, terms.workspace_bytes(gemm))},
    }
    defined = [f"-D{macro}={value}" for macro, value in macros.items()]
    helper = compiled(EXPORTED, "-c", "-fPIC", "-pthread", "-fvisibility=hidden", *defined)
    library = folder / f"lib{name}.so"
    try:
        with scratch.folder() as work:
            reason = cpu.link(kernel.candidate, detect(), helper, work)
            if reason:
                raise UserError(f"the library for {gemm} cannot be linked: {reason}")
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(work / "library.so", library)
            (folder / f"{name}.h").write_text(_header(name, kernel))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from None
    return library


def _best(gemm: Gemm, path: Path) -> Saved:
    if not path.exists():
        raise UserError(f"there is no archive {path}; run `cuda-l2 optimize {gemm}` first")
    machine = detect().machine
    with Archive(path, reading=True) as archive:
        for protocol in REPORTED:
            for trial in archive.best(gemm, machine, protocol, count=100):
                # what a language model wrote is loaded by its path alone, by somebody who has read it
                if trial.candidate.schedule:
                    return Saved(gemm, trial.candidate, machine)
    raise UserError(
        f"{path} has no kernel for {gemm} on {machine} that a schedule of this package wrote;"
        f" run `cuda-l2 optimize {gemm}` first"
    )


def _terms(source: str) -> dict[str, Any]:
    terms = asdict(contract.parse_cpu(source))
    del terms["interface"]  # a matrix product's
    return terms


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _header(name: str, kernel: Saved) -> str:
    gemm = kernel.gemm
    b = f"{gemm.k} x {gemm.n} row-major" if gemm.layout == "nn" else f"{gemm.k} x {gemm.n} column-major"
    return f"""\
/* C = A B in fp16, kernel {kernel.candidate.id}, written by cuda-l2 for {kernel.machine or "a machine not named"}.
 *
 * a: {gemm.m} x {gemm.k} row-major; b: {b}; c: {gemm.m} x {gemm.n} row-major.
 * Elements are IEEE fp16 as 16-bit words, addresses multiples of 64, c apart from a and b.
 * Returns 0, or the errno value with which its threads cannot be started. Calls from several threads take turns.
 * Link with -l{name} -pthread. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C"
#endif
int {name}(const uint16_t *a, const uint16_t *b, uint16_t *c);
"""
