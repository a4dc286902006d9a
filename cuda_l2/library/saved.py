"""Kernels in files: source, task, contract and hash as JSON; or a shared library with a C header."""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_l2 import contract, tasks
from cuda_l2.archive import Archive
from cuda_l2.build import cpu
from cuda_l2.machine.cpu.target import detect
from cuda_l2.measure.baselines._base import TorchProduct, baselines_of, named, strongest_first
from cuda_l2.measure.baselines.torch_cpu import Half
from cuda_l2.records import SHORT_DTYPES, Build, BuildStatus, Candidate, Gemm, Task, Timing, Trial
from cuda_l2.system import paths, scratch
from cuda_l2.system.errors import MissingError, UserError
from cuda_l2.system.files import read_text, require_own, whole, write_text
from cuda_l2.system.native import compiled
from cuda_l2.system.place import Place, Server, is_there, place_of
from cuda_l2.system.values import short

FORMAT = "cuda-l2 kernel, version 1"
FORMAT_TORCH = "cuda-l2 torch product, version 1"
SOURCES = ".c", ".cu"
EXPORTED = Path(__file__).with_name("exported.c")
SAVED_MARK = r'\s*\{\s*"format": "cuda-l2 (kernel|torch product),'
HEADER_MARK = r"/\* C = A B in \w+, kernel \w+, written by cuda-l2 "
REPORTED = ("offline", "paper", "server")
"""Protocols of reports, the headline first."""


@dataclass(frozen=True)
class Saved:
    """A kernel without compiled code: what a file or a pickle of it holds."""

    gemm: Gemm
    candidate: Candidate
    machine: str  # identity of the one on which it was verified and timed; empty where nobody said


@dataclass(frozen=True)
class TorchsOwn:
    """Torch's own product, where no kernel wins. It holds a name and no code."""

    gemm: Gemm
    baseline: str  # name of the strongest
    why: str  # no kernel is handed out
    machine: str


class Reports(dict[str, Trial]):
    """A winner's reports by protocol. MissingError for one that is missing."""

    why = ""
    """Why one is missing that was to be there, and what to do."""

    def __missing__(self, protocol: str) -> Trial:
        why = self.why or f"there are {', '.join(self)}; the setting protocol chooses"
        raise MissingError(f"there is no report {protocol!r}: {why}")


def why_no_win(reports: Sequence[Trial]) -> str:
    """Why a kernel does not win by its reports, the headline first; empty where it does.

    It wins where the interval of its ratio to the strongest baseline lies above 1 in the headline, and below 1 in none.
    """
    ratios = [(trial, trial.timing.speedup) for trial in reports if trial.timing and trial.timing.speedup]
    for number, (trial, ratio) in enumerate(ratios):
        if ratio.high < 1 or (number == 0 and ratio.low <= 1):
            return f"the best kernel found has {ratio_text(trial)}; its interval must lie above 1 to win"
    return "" if ratios else "no kernel was timed beside all baselines after the search"


def ratio_text(trial: Trial) -> str:
    """A trial's speedup with its interval, over which baseline, under which protocol. The trial has one."""
    assert trial.timing and trial.timing.speedup
    return f"{trial.timing.speedup.text('.3f')} of the speed of {trial.timing.reference} ({trial.protocol})"


def torchs_best(task: Task, timing: Timing | None) -> str:
    """The way to use torch that is handed out where no kernel wins: the strongest by a timing, or the usual strongest.

    The usual one keeps its buffers, so it is taken unless another is surely faster: a call that allocates may take a
    third longer in a caller's process than in the one that timed it. So it is where it was not timed, as beside a
    search's later kernels, but where torch.matmul, which allocates nothing, was the strongest. How many threads torch
    has is for the caller to say, so that what ran on one is not handed out.
    """
    usual: TorchProduct = strongest_first(baselines_of(TorchProduct, "cpu"), task)[0]
    if timing is None:
        return usual.name
    ratios = {name: ratio for name, ratio in timing.speedups if not torch_baseline(name).threads}
    if not ratios:
        return usual.name
    strongest = min(ratios, key=lambda name: ratios[name].estimate)
    if usual.name in ratios:
        surely_slower = ratios[usual.name].low > ratios[strongest].high
    else:
        surely_slower = isinstance(torch_baseline(strongest), Half)
    return strongest if surely_slower else usual.name


def to_text(kernel: Saved | TorchsOwn) -> str:
    """What is kept, as JSON."""
    fields: dict[str, Any] = {"format": FORMAT, "task": str(kernel.gemm), "machine": kernel.machine}
    if isinstance(kernel, TorchsOwn):
        fields |= {"format": FORMAT_TORCH, "baseline": kernel.baseline, "why": kernel.why}
    else:
        candidate = kernel.candidate
        fields |= {
            "proposer": candidate.proposer,
            "family": candidate.family,
            "schedule": dict(candidate.schedule),
            "contract": _terms(candidate.source),
            "source": candidate.source,
        }
    return json.dumps({**fields, "sha256": _digest(fields)}, indent=1) + "\n"


def from_text(text: str) -> Saved | TorchsOwn:
    """What `to_text` wrote; UserError where the text is another's or was changed. Runs nothing of it."""
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("format") not in (FORMAT, FORMAT_TORCH):
            raise UserError(f"not a saved kernel: the file's format must be {FORMAT!r} or {FORMAT_TORCH!r}")
        if fields.pop("sha256", None) != _digest(fields):
            raise UserError("the saved kernel was changed after it was written: its hash is another; save it again")
        if fields["format"] == FORMAT_TORCH:
            torch_baseline(fields["baseline"])
            return TorchsOwn(Gemm.parse(fields["task"]), fields["baseline"], str(fields["why"]), fields["machine"])
        schedule = tuple((str(name), int(value)) for name, value in fields["schedule"].items())
        candidate = Candidate(fields["source"], fields["proposer"], schedule, fields["family"])
        if _terms(candidate.source) != fields["contract"]:
            raise UserError("the saved kernel's contract is not the one that its source states")
        gemm = Gemm.parse(fields["task"])
        contract.parse_cpu(candidate.source).workspace_bytes(gemm)  # ValueError where the source is of another task
        return Saved(gemm, candidate, fields["machine"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"not a saved kernel, as `result.save` writes one: {error}") from None


def torch_baseline(name: str) -> TorchProduct:
    """A product of torch on the CPU by its baseline's name; UserError where that is another's."""
    baseline = named(name)
    if not isinstance(baseline, TorchProduct):
        raise UserError(f"not a saved kernel: {name} is no product of torch on the CPU")
    return baseline


def path_of(given: object) -> Path:
    """A path as a caller gives it; UserError where it is none."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise UserError(f"a path is a text or a pathlib.Path, not {short(given)}")
    return Path(given)


def _archive_of(given: object) -> Place:
    return given if isinstance(given, Server) else place_of(path_of(given))


def write(kernel: Saved | TorchsOwn, path: Path) -> None:
    """Write a kernel's file; UserError where it cannot be, or another file than a saved kernel is there."""
    require_own(path, SAVED_MARK, "saved kernel", "choose another path")
    write_text(path, to_text(kernel), "choose another path")


def find(name: object, archive: Place | str | None = None, task: object = None) -> Saved | TorchsOwn:
    """What a file keeps, by its path, or for a shape on this machine what the archive's latest report says.

    task: of the kernel whose source the file is. UserError where it is given for anything else.
    """
    place = paths.default_archive() if archive is None else _archive_of(archive)
    if isinstance(name, os.PathLike) or (isinstance(name, str) and os.path.exists(name)):  # noqa: PTH110 - may be long
        text = read_text(Path(name))
        if Path(name).suffix in SOURCES or contract.states_contract(text):
            return _of_source(Path(name), text, task)
        if task is None:
            return from_text(text)
    if task is not None:
        raise UserError(f"task goes with the path of a kernel's source, and {short(name)} is none: leave it out")
    if isinstance(name, str):
        if re.match(r"(?i)\s*\d+x\d+(x|:|\s*$)", name) and not Path(name).suffix:
            return best(Gemm.parse(name), place)[0]
        raise UserError(f"there is no file {short(name)}; write a saved kernel's path, or a shape as in 512x512x512")
    if isinstance(name, Gemm | tuple | list):
        gemm = tasks.read(name)
        assert isinstance(gemm, Gemm)
        return best(gemm, place)[0]
    raise UserError(f"give a saved kernel's path, or a shape as in '512x512x512', not {short(name)}")


def _of_source(path: Path, text: str, task: object) -> Saved:
    """A kernel from its C source, of which nobody says on which machine it was verified and timed.

    task: where None, the one in the name under which a search keeps a source; the name's hash must be the text's.
    """
    if contract.target_of(text) == "cuda":
        raise UserError(f"{path} is for a GPU: `cuda-l2 library import {path} SHAPE` has cuda_l2.matmul call it")
    candidate = Candidate(text)
    shape, _, kept = path.stem.rpartition("-")
    if task is None and kept == candidate.id and shape[:1].isdigit():
        task = shape.replace("-", ":")
    if task is None:
        raise UserError(
            f"{path} is a kernel's source, which states no shape: give it, as in cuda_l2.load({str(path)!r},"
            " task='512x512x512:tn')"
        )
    gemm = tasks.read(task)
    if not isinstance(gemm, Gemm):
        raise UserError(f"kernels for tasks cannot be called from torch yet: {path} was not loaded for {gemm}")
    try:
        contract.parse_cpu(text).workspace_bytes(gemm)
    except contract.ContractError as error:
        raise UserError(f"{path} cannot be loaded for {gemm}: {error}") from None
    return Saved(gemm, candidate, "")


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
    """Write lib<name>.so, which needs nothing but the C library, and <name>.h; the library's path.

    UserError where one of them is there and was not exported.
    """
    gemm, terms = kernel.gemm, contract.parse_cpu(kernel.candidate.source)
    name = name or re.sub(r"\W", "_", f"gemm_{gemm}")
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise UserError(f"{name!r} cannot name a C function")
    if name == terms.entry:
        raise UserError(f"the kernel's own function is called {name} already; choose another name")
    built(kernel)  # the rules judge the text
    macros = {
        **{"NAME": name, "ENTRY": terms.entry, "M": gemm.m, "N": gemm.n, "K": gemm.k},
        **{"POOL_THREADS": terms.threads, "WORKSPACE": max(1, terms.workspace_bytes(gemm))},
    }
    defined = [f"-D{macro}={value}" for macro, value in macros.items()]
    helper = compiled(EXPORTED, "-c", "-fPIC", "-pthread", "-fvisibility=hidden", *defined)
    library, header = folder / f"lib{name}.so", folder / f"{name}.h"
    advice = "choose another name or folder"
    require_own(header, HEADER_MARK, "header of an exported kernel", advice)
    if library.exists() and not header.exists():
        raise UserError(f"{library} is there without the header of an exported kernel: {advice}")
    try:
        with scratch.folder() as work:
            reason = cpu.link(kernel.candidate, detect(), helper, work)
            if reason:
                raise UserError(f"the library for {gemm} cannot be linked: {reason}")
            folder.mkdir(parents=True, exist_ok=True)
            write_text(header, _header(name, kernel), advice)  # first: by it the library is known as ours
            with whole(library, advice) as partial:
                shutil.copyfile(work / "library.so", partial)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from None
    return library


def best(gemm: Gemm, path: Place) -> tuple[Saved | TorchsOwn, Timing | None]:
    """What an archive's latest report says of a shape on this machine, and its times; UserError where it has none."""
    if not is_there(path):
        raise UserError(f"there is no archive {path}; run `cuda-l2 optimize {gemm}` first")
    machine = detect().machine
    with Archive(path, reading=True) as archive:
        known = archive.standing(gemm, machine)
        measured = [trial for protocol in REPORTED for trial in known if trial.protocol == protocol]
        # what a language model wrote is loaded by its path alone, by somebody who has read it
        reports = [trial for trial in measured if trial.candidate.schedule and trial.speedup]
        searched = archive.best(gemm, machine, "search", 100)
        found = reports or [trial for trial in searched if trial.candidate.schedule]
    if not found and any(not trial.candidate.schedule for trial in [*measured, *searched]):
        raise UserError(
            f"what {path} knows for {gemm} was written by a language model: it is loaded by its file's path alone"
        )
    if not found:
        raise UserError(
            f"no kernel for {gemm} has been timed on this machine, by {path}: run `cuda-l2 optimize {gemm}` until it"
            " ends with a table, which needs quiet cores"
        )
    # each search compares its winner with those of earlier ones side by side, so the latest report decides
    latest = max(found, key=lambda trial: trial.created)
    own = {trial.protocol: trial for trial in reports if trial.candidate.id == latest.candidate.id}  # the last of each
    headline = next(iter(own.values()), latest)
    why = why_no_win(list(own.values()))
    if why:
        assert headline.timing
        return TorchsOwn(gemm, torchs_best(gemm, headline.timing), why, machine), headline.timing
    return Saved(gemm, latest.candidate, machine), headline.timing


def _terms(source: str) -> dict[str, Any]:
    terms = asdict(contract.parse_cpu(source))
    del terms["interface"]  # a matrix product's
    return terms


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _header(name: str, kernel: Saved) -> str:
    gemm, short = kernel.gemm, SHORT_DTYPES[kernel.gemm.dtype]
    b = f"{gemm.k} x {gemm.n} row-major" if gemm.layout == "nn" else f"{gemm.k} x {gemm.n} column-major"
    return f"""\
/* C = A B in {short}, kernel {kernel.candidate.id}, written by cuda-l2 for {kernel.machine or "a machine not named"}.
 *
 * a: {gemm.m} x {gemm.k} row-major; b: {b}; c: {gemm.m} x {gemm.n} row-major.
 * Elements are {short} as 16-bit words, addresses multiples of 64, c apart from a and b.
 * Returns 0, or the errno value with which its threads cannot be started. Calls from several threads take turns.
 * Link with -l{name} -pthread. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C"
#endif
int {name}(const uint16_t *a, const uint16_t *b, uint16_t *c);
"""
