"""Answers the op's question what serves a shape: the tuned choice, its kernel of the pack, and its plan.

The op asks once a shape, rule, device and process. Whatever goes wrong no kernel serves, after one warning: then torch
does, or a call that must be batch-invariant fails.
"""

import functools
import warnings
from dataclasses import replace

import torch

from cuda_l2 import contract
from cuda_l2.contract.cuda import CudaContract
from cuda_l2.library.deploy import choices, imported, rules, vendor
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.entries import AHEAD, DETERMINISTIC, TUNED, Key, gemm_of, packed
from cuda_l2.library.deploy.native import native
from cuda_l2.library.deploy.pack import Pack, installed
from cuda_l2.library.deploy.recipes import ARCH, named, texts
from cuda_l2.library.table import family_of, schedule_of
from cuda_l2.machine.cuda.target import CudaTarget, compile_only
from cuda_l2.records import Candidate, Gemm
from cuda_l2.system.errors import UserError

FAILURES = (UserError, contract.ContractError, ValueError, KeyError, OSError, RuntimeError, MemoryError)


def serve(key: Key) -> None:
    """Put what serves a shape into the op's table; raises nothing."""
    device, rule, gemm = key[0], key[3], gemm_of(key)
    try:
        reason = put_tuned(gemm, device, rule) if rule in (TUNED, AHEAD) else put_by_rule(gemm, device, rule)
    except FAILURES as error:
        reason = str(error)
    if reason:
        warn(f"no kernel of cuda-l2 serves {gemm}: {reason}")


def put_tuned(gemm: Gemm, device: int, rule: int = TUNED) -> str:
    """Serve a shape by what was tuned for it or its neighbours. Why it cannot be, or empty, also where torch is."""
    tuned = known(device, rule)
    choice = tuned.get(gemm)
    if choice is not None:
        return put(choice, device, rule) if choice.served else ""
    larger = choices.between(tuned, gemm)
    return put_near(larger, gemm, device, rule) if larger else ""


def put_by_rule(gemm: Gemm, device: int, rule: int) -> str:
    """Serve a shape by the kernel that a rule names. Why it cannot be, or empty, also where the rule names none."""
    found = pack()
    if found is None or not serves(device):
        return ""
    named = rules.deterministic if rule == DETERMINISTIC else rules.invariant
    made = named(gemm, target_of(device), found)
    if made is None:
        return ""
    return launch(made, gemm, device, contract.kernel_id(made.source, terms(made.source)), found, rule)


def put(choice: Choice, device: int, rule: int = TUNED) -> str:
    """Serve a shape by a choice's kernel. Why it cannot be, or empty; UserError where the pack is damaged."""
    if choice.family == imported.FAMILY:
        made, own = imported.find(choice.kernel)
        return launch(made, choice.gemm, device, choice.kernel, own, rule)
    if choice.family == vendor.FAMILY:
        return vendor.put(dict(schedule_of(choice.schedule)), choice.gemm, device, rule)
    target, found = target_of(device), pack()
    if found is None:
        return "there is no pack of kernels: cuda-l2 library build"
    wanted = dict(schedule_of(choice.schedule))
    chosen = named(family_of(choice.family), wanted, choice.gemm, target, choice.kernel)
    if chosen is None:
        return f"kernel {choice.kernel} is not what this version writes for it: tune it again"
    return launch(chosen, choice.gemm, device, choice.kernel, found, rule)


def put_near(choice: Choice, gemm: Gemm, device: int, rule: int = TUNED) -> str:
    """Serve a shape by the schedule of a choice for more rows, where the pack has its kernel; else torch serves it."""
    target, found = target_of(device), pack()
    if found is None:
        return ""
    rows = choice.gemm.m, choice.gemm.m - 1, gemm.m  # whole tiles, a last one that is cut, and this M's own orders
    for near in (replace(gemm, m=m) for m in rows):
        for made, name in _written(choice.family, choice.schedule, near, target):
            if name in found.kernels and _accepts(made, gemm, target):
                return launch(made, gemm, device, name, found, rule)
    return ""


def launch(made: Candidate, gemm: Gemm, device: int, name: str, found: Pack, rule: int = TUNED) -> str:
    """Put a candidate's plan into the op's table. name: of its kernel in the pack. Why it cannot be, or empty."""
    if made.family == vendor.FAMILY:
        return vendor.put(dict(made.schedule), gemm, device, rule)
    stated = terms(made.source)
    if stated.constant and rule != AHEAD:
        return f"kernel {name} reads {', '.join(stated.constant)} ahead, which callers must allow"
    plan = stated.plan(gemm, target_of(device).sms)
    return native().put(packed(plan, gemm, device, rule), name, found.cubin(name))


@functools.cache
def pack() -> Pack | None:
    """The pack; None, after one warning, where it is damaged."""
    try:
        return installed()
    except UserError as error:
        warn(f"torch's own kernels serve: {error}")
        return None


def required_pack() -> Pack:
    """The pack; UserError where there is none, or a damaged one."""
    found = pack() or installed()
    if found is None:
        raise UserError("there is no pack of kernels: run `cuda-l2 library build`")
    return found


@functools.cache
def known(device: int, rule: int = TUNED) -> dict[Gemm, Choice]:
    """What was tuned on a device for a rule, TUNED or AHEAD; none without a pack for it.

    None either, after one warning, where its file is damaged.
    """
    found = pack()
    if found is None or not serves(device):
        return {}
    try:
        return choices.read(place_of(device, found, rule))
    except UserError as error:
        warn(f"torch's own kernels serve: {error}")
        return {}


def place_of(device: int, found: Pack, rule: int = TUNED) -> choices.Place:
    """What choices are valid for."""
    return choices.place_of(device, found.identity + (" weights ahead" if rule == AHEAD else ""))


def forget() -> None:
    """Read packs and choices again, and ask again for every shape."""
    pack.cache_clear()
    known.cache_clear()
    native().clear()


def serves(device: int) -> bool:
    """Whether the pack's kernels run on a device."""
    return target_of(device).runs(ARCH)


@functools.cache
def target_of(device: int) -> CudaTarget:
    """The device as schedules see it."""
    properties = torch.cuda.get_device_properties(device)
    return replace(
        compile_only(ARCH),
        model=properties.name,
        capability=(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
    )


@functools.lru_cache(maxsize=512)
def _written(family: str, schedule: str, gemm: Gemm, target: CudaTarget) -> list[tuple[Candidate, str]]:
    """A schedule's candidates for a shape and their kernels' ids; kept, since models meet many M between two tuned."""
    made = texts(family_of(family), dict(schedule_of(schedule)), gemm, target)
    return [(each, contract.kernel_id(each.source)) for each in made]


def _accepts(made: Candidate, gemm: Gemm, target: CudaTarget) -> bool:
    """Whether a candidate's contract accepts a shape.

    A family writes none where another schedule would be better, as a tile of 64 rows is for 40; the contract decides
    what can be computed.
    """
    try:
        terms(made.source).plan(gemm, target.sms)
    except contract.ContractError:
        return False
    return True


@functools.lru_cache(maxsize=512)
def terms(source: str) -> CudaContract:
    """A source's launch contract."""
    return contract.parse_cuda(source)


@functools.cache
def warn(text: str) -> None:
    """A warning, the same one once a process."""
    warnings.warn(f"cuda-l2: {text}", RuntimeWarning, stacklevel=3)
