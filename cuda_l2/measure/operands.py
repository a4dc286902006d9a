"""What timed launches on the CPU read and write, and whether each of them gave its own result.

Every launch of a sample has tensors of its own, in random slots. Of a matrix product every launch is checked by a
random projection, one launch a sample element by element; of another task every launch by the task's tolerance.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuda_l2.machine.cpu.arena import Arena
from cuda_l2.machine.tensors import dtype_of
from cuda_l2.measure.outputs import WrongOutput, require_own, require_precise, rounding_step
from cuda_l2.records import DTYPE_BYTES, Gemm, Task, Tensor
from cuda_l2.tasks.cases import Case, Cases
from cuda_l2.tasks.tolerances import SUMMATION_NOISE

SLOT_BYTES = 24 << 20
"""Tensors of all launches of a timed round together take at most this, but for a single launch's. With more of them a
last-level cache of 32 MB does not keep what launches back to back are to find there (docs/log.md)."""
MOST_SLOTS, MOST_PRODUCT_SLOTS = 64, 128
SIGN_PATTERNS = 4096


class Operands(ABC):
    """The tensors in the arena's slots."""

    fresh_processes = False
    """Whether a candidate has a new process for every sample: what it kept of earlier inputs would be of use."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.workspace_bytes = 0
        """Workspace of the candidate that is timed."""

    @property
    def slots(self) -> int:
        return self.arena.slots

    def begin_warm_up(self) -> None:  # noqa: B027 - where `refresh` changes all that a warm-up meets
        """Leave nothing in memory that a launch which does not count could keep for those that do."""

    def forget(self) -> None:  # noqa: B027 - where one process serves every sample
        """Before a candidate's process starts: nothing that an earlier one met, computed or wrote is left in memory."""

    @abstractmethod
    def refresh(self, count: int) -> None:
        """Put other inputs into the first slots than the last launch met there, and poison the outputs."""

    @abstractmethod
    def check(self, slots: Sequence[int], *, element_wise: bool) -> float:
        """The largest difference of one launch from its reference, or NaN where none is compared element by element.

        WrongOutput where a launch on these slots did not produce its own result.
        """

    @abstractmethod
    def require_untouched(self, count: int) -> None:
        """WrongOutput where a launch on the first slots changed inputs or wrote outside outputs and workspace."""

    def require_bounds_kept(self) -> None:
        """WrongOutput where a launch wrote outside outputs and workspace."""
        if not self.arena.gaps_intact():
            raise WrongOutput("wrote outside its outputs and its workspace in a timed round")


class CaseOperands(Operands):
    """Cases out of a pool, one more than there are slots.

    A candidate has a new process for every sample, in memory where nothing of earlier ones is left, and between its
    warm-up and the clock everything is exchanged: what an earlier launch computed is of no use to any that counts.
    """

    fresh_processes = True

    def __init__(self, arena: Arena, cases: Cases, rng: np.random.Generator) -> None:
        super().__init__(arena)
        self._cases, self._rng = cases, rng
        self._pool: list[Case] = []
        self._current: list[Case] = []

    def begin_warm_up(self) -> None:
        """One case, in the first slot, that none of the launches after it will meet."""
        self.refresh(1)

    def forget(self) -> None:
        self.arena.clear()
        self._current = []

    def refresh(self, count: int) -> None:
        """Workspaces hold garbage, as a new process would find it."""
        while len(self._pool) < count + 1:
            self._pool.append(self._cases.timed(len(self._pool)))
        met = self._current[:1]
        free = [case for case in self._pool if not any(case is other for other in met)]
        self._current = [free[int(index)] for index in self._rng.permutation(len(free))[:count]]
        for slot, case in enumerate(self._current):
            self.arena.write(slot, case.tensors)
        self.arena.poison_outputs(range(count))
        self.arena.poison_workspace(self.workspace_bytes)

    def check(self, slots: Sequence[int], *, element_wise: bool) -> float:
        for slot in slots:
            require_own_result(self._cases, self._current[slot], self.arena.outputs(slot))
        if not element_wise:
            return float("nan")
        slot = int(self._rng.choice(np.asarray(slots)))
        return self._current[slot].errors(self.arena.outputs(slot))[1]

    def require_untouched(self, count: int) -> None:
        for slot, case in enumerate(self._current[:count]):
            if not self.arena.untouched(slot, case.tensors):
                raise WrongOutput("changed its inputs or weights in a timed round")
        self.require_bounds_kept()


class ProductOperands(Operands):
    """A and B of every slot, with private copies where candidates cannot reach."""

    def __init__(self, arena: Arena, gemm: Gemm, rng: np.random.Generator) -> None:
        super().__init__(arena)
        self.gemm, self.rng = gemm, rng
        self._word = np.dtype(f"u{DTYPE_BYTES[gemm.dtype]}")
        self._words = {tensor.name: self._normal(tensor) for tensor in gemm.inputs}
        """Raw words of A and B in their order in memory, slots x elements."""
        most = max(tensor.elements for tensor in gemm.inputs)
        sign = self._word.type(1 << 8 * self._word.itemsize - 1)
        self._signs = rng.integers(0, 2, most + SIGN_PATTERNS, dtype=self._word) * sign

    def _normal(self, tensor: Tensor) -> npt.NDArray[np.unsignedinteger]:
        drawn = self.rng.standard_normal((self.slots, tensor.elements), dtype=np.float32)
        return torch.from_numpy(drawn).to(dtype_of(tensor)).view(torch.uint8).numpy().view(self._word)

    def refresh(self, count: int) -> None:
        """Elements move on by a random number and random signs flip: nothing kept from before tells or is of use."""
        self.arena.poison_outputs(range(count))
        for tensor in self.gemm.inputs:
            words = self._words[tensor.name]
            for slot in range(count):
                start, by = int(self.rng.integers(SIGN_PATTERNS)), int(self.rng.integers(words.shape[1]))
                signs = self._signs[start : start + words.shape[1]]
                np.bitwise_xor(np.roll(words[slot], by), signs, out=words[slot])
            for slot in range(count):
                self.arena.row(slot, tensor).view(self._word)[:] = words[slot]

    def _shared(self, tensor: Tensor, count: int) -> npt.NDArray[np.unsignedinteger]:
        """A copy of a tensor's raw words in the first slots of the arena, count x elements."""
        return np.stack([self.arena.row(slot, tensor).view(self._word) for slot in range(count)])

    def values(self, tensor: Tensor, count: int) -> torch.Tensor:
        """A or B of the first slots from the private copies, fp32 count x its logical shape."""
        return _matrices(self._words[tensor.name][:count], tensor)

    def check(self, slots: Sequence[int], *, element_wise: bool) -> float:
        """Launches on the first slots, all of them, in whichever order they ran."""
        gemm, count = self.gemm, len(slots)
        (c,) = gemm.outputs
        signs_N = torch.from_numpy(self.rng.integers(0, 2, gemm.n).astype(np.float32) * 2 - 1)
        c_LMN = _matrices(self._shared(c, count), c)
        a_LMK, b_LKN = (self.values(tensor, count) for tensor in gemm.inputs)
        expected_LM = (a_LMK @ (b_LKN @ signs_N)[..., None])[..., 0]
        # rounding to C's type, and where C is near zero the order of fp32 sums
        noise_LM = rounding_step(dtype_of(c)) * torch.linalg.vector_norm(c_LMN, dim=2)
        noise_LM += SUMMATION_NOISE * (gemm.k * gemm.n) ** 0.5
        deviation_LM = (c_LMN @ signs_N - expected_LM) / noise_LM
        rms_L, largest_L = deviation_LM.square().mean(1).sqrt(), deviation_LM.abs().amax(1)
        require_own(zip(rms_L.tolist(), largest_L.tolist(), strict=True), gemm.accumulate, gemm.m, gemm.k)
        if not element_wise:
            return float("nan")
        slot = int(self.rng.integers(count))
        return self._compared(c_LMN[slot], a_LMK[slot] @ b_LKN[slot])

    def _compared(self, c_MN: torch.Tensor, reference_MN: torch.Tensor) -> float:
        """The largest difference of one launch from the fp32 reference; WrongOutput where it is imprecise."""
        gemm = self.gemm
        rounded = reference_MN.to(dtype_of(gemm)).float()
        rounding = float((rounded - reference_MN).square().mean().sqrt())
        difference = c_MN - reference_MN
        rms = float(difference.square().mean().sqrt())
        require_precise(gemm.accumulate, gemm.k, rms, rounding)
        return float(difference.abs().max())

    def require_untouched(self, count: int) -> None:
        for tensor in self.gemm.inputs:
            words = self._words[tensor.name]
            if any(
                not np.array_equal(self.arena.row(slot, tensor).view(self._word), words[slot]) for slot in range(count)
            ):
                raise WrongOutput(f"changed its input {tensor.name.upper()} in a timed round")
        self.require_bounds_kept()


def open_operands(arena: Arena, cases: Cases, rng: np.random.Generator) -> Operands:
    """What timed launches on an arena read and write."""
    task = cases.task
    return ProductOperands(arena, task, rng) if task.product else CaseOperands(arena, cases, rng)


def require_own_result(cases: Cases, case: Case, found: Mapping[str, torch.Tensor]) -> None:
    """WrongOutput where a timed launch's outputs are not those of its case."""
    violation = why_not(cases, case, found)
    if violation:
        raise WrongOutput(f"a timed launch did not produce its own result: {violation}")


def why_not(cases: Cases, case: Case, found: Mapping[str, torch.Tensor]) -> str:
    """Why outputs are not those of a case for timing, in one line; empty where they are."""
    return case.violation(found) and cases.exactly(case).violation(found)


def slots_for(task: Task) -> int:
    """How many launches of a timed round have tensors of their own at once."""
    return max(1, min(MOST_PRODUCT_SLOTS if task.product else MOST_SLOTS, SLOT_BYTES // max(1, task.bytes)))


def _matrices(words: npt.NDArray[np.unsignedinteger], tensor: Tensor) -> torch.Tensor:
    """Matrices in fp32, count x their logical shape, from their words in the order of memory."""
    storage = torch.from_numpy(words.view(np.uint8)).view(dtype_of(tensor))
    strides = (storage.stride(0), *tensor.strides)
    return storage.as_strided((len(words), *tensor.shape), strides).float()
