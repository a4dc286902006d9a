"""The process that launches CUDA candidates alone. Started by `cuda_alone`, under a tool that watches it.

Memory is of the driver's plain kind, each array exactly as long as it is, so that a sanitizer knows its bounds. No
torch. Jobs are lines of a JSON file, the result is one: a digest of the outputs for each job and launch, up to what
went wrong.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from cuda_l2.machine.cuda.alone import Job
from cuda_l2.machine.cuda.driver import DriverError, LaunchError, Loaded, check, start
from cuda_l2.machine.fills import POISONS, SCRATCH_BYTE
from cuda_l2.records import Tensor, from_json

SCRATCH_WORD = 0x01010101 * SCRATCH_BYTE
WORKSPACE_ALIGN = 1024
PATTERN = 65521
"""Numbers that are not given repeat after this many normal ones: a prime, so that rows differ."""


class _Memory:
    """What one job allocates. A context manager.

    kept: it stays allocated, so that every later job finds memory at addresses that nothing has written yet.
    """

    def __init__(self, kept: bool) -> None:
        self._kept = kept
        self._addresses: list[int] = []

    def allocate(self, size: int) -> int:
        address = int(check("cuMemAlloc", driver.cuMemAlloc(max(1, size))))
        self._addresses.append(address)
        return address

    def allocate_aligned(self, size: int) -> int:
        """As the contract promises of workspaces; the driver aligns small arrays to less."""
        for _ in range(8):
            address = self.allocate(size)
            if address % WORKSPACE_ALIGN == 0:
                return address
            self.allocate(1)  # the next one lies elsewhere
        address = self.allocate(size + WORKSPACE_ALIGN)
        return -(-address // WORKSPACE_ALIGN) * WORKSPACE_ALIGN

    def __enter__(self) -> "_Memory":
        return self

    def __exit__(self, *error: object) -> None:
        if self._kept or error[0] is not None:  # after a fault the driver only repeats it
            return
        for address in self._addresses:
            check("cuMemFree", driver.cuMemFree(address))


def _given(job: Job) -> dict[str, npt.NDArray[np.uint8]]:
    """Bytes of every input and weight by name."""
    if not job.given:
        return {tensor.name: _normal(tensor, job.seed, number) for number, tensor in enumerate(job.task.given)}
    values, start, found = np.fromfile(job.given, np.uint8), 0, {}
    for tensor in job.task.given:
        found[tensor.name] = values[start : start + tensor.bytes]
        start += tensor.bytes
    return found


def _normal(tensor: Tensor, seed: int, number: int) -> npt.NDArray[np.uint8]:
    """Bytes of a tensor of standard normal numbers, others for each number of a tensor."""
    drawn = np.random.default_rng(seed).standard_normal(PATTERN, dtype=np.float32)
    if tensor.dtype == "bfloat16":  # numpy has none: the upper half of an fp32 number
        pattern: npt.NDArray[Any] = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    else:
        pattern = drawn.astype(tensor.dtype)
    return np.resize(np.roll(pattern, number), tensor.elements).view(np.uint8)


def _launch(job: Job, stream: int, memory: _Memory) -> list[str]:
    """A digest of the outputs for each launch; they and, unless told not to, scratch hold garbage before each."""
    workspaces, pointers = job.plan.workspaces, dict[str, int]()
    for name, values in _given(job).items():
        pointers[name] = memory.allocate(values.nbytes)
        _write(pointers[name], values)
    poisons = {}
    for output in job.task.outputs:
        poison = np.frombuffer(POISONS[output.dtype], np.uint8)
        poisons[output.name] = np.tile(poison, output.elements)
        pointers[output.name] = memory.allocate(output.bytes)
    for workspace in workspaces:
        pointers[workspace.name] = memory.allocate_aligned(workspace.bytes)
        if workspace.persistent:
            _fill(pointers[workspace.name], workspace.bytes, workspace.fill)
    loaded = Loaded(Path(job.cubin).read_bytes(), job.plan)
    bound = loaded.bind(pointers)
    digests = []
    for _ in range(job.launches):
        for name, poison in poisons.items():
            _write(pointers[name], poison)
        for workspace in workspaces:
            if job.fills_scratch and not workspace.persistent:
                _fill(pointers[workspace.name], workspace.bytes, SCRATCH_WORD)
        check("cuCtxSynchronize", driver.cuCtxSynchronize())
        bound.launch(stream)
        check("cuStreamSynchronize", driver.cuStreamSynchronize(driver.CUstream(stream)))
        digest = hashlib.sha256()
        for name, poison in poisons.items():
            written = np.empty_like(poison)
            if written.nbytes:
                check("cuMemcpyDtoH", driver.cuMemcpyDtoH(written.ctypes.data, pointers[name], written.nbytes))
            digest.update(written.tobytes())
        digests.append(digest.hexdigest()[:16])
    loaded.unload()
    return digests


def _write(address: int, values: npt.NDArray[np.uint8]) -> None:
    if values.nbytes:
        check("cuMemcpyHtoD", driver.cuMemcpyHtoD(address, np.ascontiguousarray(values).ctypes.data, values.nbytes))


def _fill(address: int, size: int, word: int) -> None:
    check("cuMemsetD32", driver.cuMemsetD32(address, word, size // 4))


def main() -> None:
    jobs = [from_json(Job, line) for line in Path(sys.argv[1]).read_text().splitlines()]
    digests: list[list[str]] = []
    result: dict[str, object] = {"digests": digests}
    try:
        (stream,) = start(streams=1)
        for job in jobs:
            with _Memory(kept=not job.fills_scratch) as memory:
                digests.append(_launch(job, stream, memory))
    except LaunchError as error:
        result["refused"] = str(error)
    except DriverError as error:
        result["machine" if error.of_machine else "fault"] = str(error)
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.exit(int("fault" in result or "machine" in result))


if __name__ == "__main__":
    main()
