"""Answers the op's question what serves a shape: the tuned choice, its kernel of the pack, and its plan.

The op asks once a shape, device and process. Whatever goes wrong, the answer is torch, after one warning.
"""

import dataclasses
import functools
import warnings

import torch

from cuda_l2 import contract
from cuda_l2.library.deploy import choices, imported
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.entries import Key, gemm_of, packed
from cuda_l2.library.deploy.native import native
from cuda_l2.library.deploy.pack import Pack, installed
from cuda_l2.library.deploy.recipes import ARCH, candidate
from cuda_l2.library.table import family_of, schedule_of
from cuda_l2.machine.cuda.target import CudaTarget, compile_only
from cuda_l2.records import Candidate, Gemm
from cuda_l2.system.errors import UserError

FAILURES = (UserError, contract.ContractError, ValueError, KeyError, OSError, RuntimeError, MemoryError)


def serve(key: Key) -> None:
    """Put what serves a shape into the op's table; raises nothing."""
    device, gemm = key[0], gemm_of(key)
    try:
        choice = known(device).get(gemm)
        if choice is None or not choice.served:
            return
        reason = put(choice, device)
    except FAILURES as error:
        reason = str(error)
    if reason:
        warn(f"torch's own kernel serves {gemm}: {reason}")


def put(choice: Choice, device: int) -> str:
    """Serve a shape by a choice's kernel. Why it cannot be, or empty; UserError where the pack is damaged."""
    if choice.family == imported.FAMILY:
        made, own = imported.find(choice.kernel)
        return launch(made, choice.gemm, device, choice.kernel, own)
    target, found = target_of(device), pack()
    if found is None:
        return "there is no pack of kernels: cuda-l2 library build"
    wanted = dict(schedule_of(choice.schedule))
    chosen = candidate(family_of(choice.family), wanted, choice.gemm, target)
    if chosen is None or contract.kernel_id(chosen.source) != choice.kernel:
        return f"kernel {choice.kernel} is not what this version writes for it: tune it again"
    return launch(chosen, choice.gemm, device, choice.kernel, found)


def launch(made: Candidate, gemm: Gemm, device: int, name: str, found: Pack) -> str:
    """Put a candidate's plan into the op's table. name: of its kernel in the pack. Why it cannot be, or empty."""
    plan = contract.parse_cuda(made.source).plan(gemm, target_of(device).sms)
    return native().put(packed(plan, gemm, device), name, found.cubin(name))


@functools.cache
def pack() -> Pack | None:
    """The pack; None, after one warning, where it is damaged."""
    try:
        return installed()
    except UserError as error:
        warn(f"torch's own kernels serve: {error}")
        return None


@functools.cache
def known(device: int) -> dict[Gemm, Choice]:
    """What was tuned on a device; none without a pack for it, nor, after one warning, where its file is damaged."""
    found = pack()
    if found is None or not serves(device):
        return {}
    try:
        return choices.read(choices.place_of(device, found.identity))
    except UserError as error:
        warn(f"torch's own kernels serve: {error}")
        return {}


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
    return dataclasses.replace(
        compile_only(ARCH),
        model=properties.name,
        capability=(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
    )


@functools.cache
def warn(text: str) -> None:
    """A warning, the same one once a process."""
    warnings.warn(f"cuda-l2: {text}", RuntimeWarning, stacklevel=3)
