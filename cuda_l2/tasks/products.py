"""Cases of matrix products, and who computes what their results are compared with.

Some checks draw operands of their own and say exactly what C must be. All others draw standard normal operands, of
which some rows of C are computed in fp32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from cuda_l2.machine.tensors import laid_out
from cuda_l2.records import Accumulate, Element, Gemm, Layout, Task
from cuda_l2.system.errors import MachineError, UserError
from cuda_l2.tasks.cases import IMPRECISE, INFINITY, NAN, SPECIAL, Case, Cases
from cuda_l2.tasks.values import Distribution, put

CACHE_BYTES = {"cpu": 2 << 30, "cuda": 16 << 30}
ALLOWED_SHARE, ALLOWED_NOISE, ALLOWED_AFTER_A_CHANGE = 0.01, 0.05, 0.02
"""An element of C may be off by this share of itself and by this times the square root of K: by less in the one row or
column that a changed element changes, where few are looked at."""
CLOSE, CLOSE_STEPS, CLOSE_PRODUCTS = 1.01, 16, 8
"""Where C is looked at closely an element may be off by half a step of its type, times the first, and by the product of
the lengths of its row of A and its column of B times the second and one for each of the third's products, in steps of
fp32: as much as one chain of equal products loses, the worst that is drawn."""
NATIVE_FLOPS = 1 << 26
"""torch.matmul in the operands' type joins the baselines up to here; CPUs without fp16 arithmetic take minutes beyond.
"""
CPU_FLOPS = 1 << 29
"""Products up to here are computed on the CPU, also for operands on a GPU."""
HINT_COLUMNS = 64
"""Columns of `SPOT_ROWS` rows that tell whether B was read in the other layout."""
SPOT_ROWS = 4
"""Rows of a larger product that are computed there too."""
ORDER_SHARE = 2.0**-20
"""Share of its terms' magnitudes by which the order of an fp32 sum may move it: 16 roundings."""


@dataclass(frozen=True)
class ProductCase(Case):
    """A and B as the task lays them out.

    expected: what checks compare against, by their own names; `rows` are the numbers of the rows of C that stand in
    `fp32`, or `alters` says which elements do; `allowed` is what they may be off by, where all are finite.
    """

    task: Gemm
    expected: dict[str, torch.Tensor] = field(default_factory=dict, kw_only=True)

    @property
    def a(self) -> torch.Tensor:
        """A, M x K."""
        return self.tensors["a"]

    @property
    def b(self) -> torch.Tensor:
        """B as K x N, however it lies in memory."""
        return self.tensors["b"]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.tensors.values(), *self.expected.values()))

    def wrong(self, found: Mapping[str, torch.Tensor]) -> torch.Tensor:
        ours, exact = self._compared(found)
        if "allowed" in self.expected:  # at most the same, in a third of the kernels
            return ~((ours - exact).abs_() <= self.expected["allowed"])
        noise = ALLOWED_AFTER_A_CHANGE if self.alters else ALLOWED_NOISE
        return ~torch.isclose(ours, exact, rtol=ALLOWED_SHARE, atol=noise * self.task.k**0.5, equal_nan=True)

    def violation(self, found: Mapping[str, torch.Tensor]) -> str:
        """Why C is not the product, where it is known; empty where it is. Coarse where a case does not look closely."""
        wrong = self.wrong(found)
        if not wrong.any():
            return ""
        ours, exact = self._compared(found)
        at = tuple(int(i) for i in wrong.nonzero()[0])
        element = self.first_wrong(found)
        place = f" {element.place} is" if element else ""
        return (
            f"c is wrong in {int(wrong.sum())} of {wrong.numel()} elements looked at, for instance{place}"
            f" {ours[at].item():g}, exact {exact[at].item():g}"
        )

    def first_wrong(self, found: Mapping[str, torch.Tensor]) -> Element | None:
        wrong = self.wrong(found)
        if self.alters or not wrong.any():
            return None
        ours, exact = self._compared(found)
        row, column = (int(i) for i in wrong.nonzero()[0])
        return Element(int(self.expected["rows"][row]), column, float(exact[row, column]), float(ours[row, column]))

    def hint(self, found: Mapping[str, torch.Tensor]) -> str:
        (k, n), column_major = self.b.shape, self.task.layout is Layout.TN
        misread = self.b.t().reshape(k, n) if column_major else self.b.reshape(n, k).t()
        rows, columns = slice(SPOT_ROWS), slice(HINT_COLUMNS)
        right, other = (self.a[rows].float() @ b[:, columns].float() for b in (self.b, misread))
        near = partial(
            torch.allclose, found["c"][rows, columns].float(), rtol=ALLOWED_SHARE, atol=ALLOWED_NOISE * k**0.5
        )
        if near(right) or not near(other):
            return ""
        task = replace(self.task, layout=Layout.NN if column_major else Layout.TN)
        return f"; it is right for {task}, where B is {'row' if column_major else 'column'}-major"

    def imprecise(self, found: Mapping[str, torch.Tensor]) -> bool:
        ours, exact = self._compared(found)
        return bool((ours - exact).abs().max() <= IMPRECISE * exact.abs().max())

    def errors(self, found: Mapping[str, torch.Tensor]) -> tuple[float, float]:
        ours, exact = self._compared(found)
        error = ours - exact
        return float(error.square().mean().sqrt()), float(error.abs().max())

    def _compared(self, found: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Some elements of C, and what they are in fp32."""
        at = self.alters.get("c") or (self.expected["rows"],)
        return found["c"][at].float(), self.expected["fp32"]


class References(ABC):
    """Who computes what a candidate's results are compared with, and on which device. Never the candidate's process."""

    device: torch.device
    exact_flops: int
    """Beyond this an fp64 product takes about a second: then a random set of rows is compared."""
    compared_flops: int
    """Rows that are computed for a case of normal numbers cost at most about this."""

    @abstractmethod
    def product_fp32(self, case: ProductCase) -> torch.Tensor:
        """A B, fp32 M x N, summed in fp32: exact for integers whose partial sums stay below 2^24."""

    @abstractmethod
    def baselines(self, case: ProductCase, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """What each baseline of the task's class computes, in the task's type, the given rows of C."""


class CpuReferences(References):
    """torch on this CPU."""

    device = torch.device("cpu")
    exact_flops = compared_flops = 1 << 31

    def product_fp32(self, case: ProductCase) -> torch.Tensor:
        return case.a.float() @ case.b.float()

    def baselines(self, case: ProductCase, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        outputs = [self.product_fp32(case)[rows].to(case.a.dtype)]
        if case.task.flops <= NATIVE_FLOPS:
            outputs.append((case.a @ case.b)[rows])
        if case.task.accumulate is Accumulate.FP16:
            outputs.append(_summed_in_halves(case.a[rows], case.b))
        return outputs


def same_but_for_order(ours: torch.Tensor, theirs: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two products of a, M x K, and b, K x N, M x N on the CPU, are fp32 sums of the same numbers.

    The order of its terms moves a sum by a share of their magnitudes, which is much beside a sum in which they cancel.
    """
    sizes_a, sizes_b = (operand.abs().float().nan_to_num_(0, 0, 0) for operand in (a, b))
    slack = ORDER_SHARE * (sizes_a @ sizes_b).cpu()
    near = (ours - theirs).abs() <= slack + 1e-4 * theirs.abs()
    return bool((near | (ours == theirs) | (ours.isnan() & theirs.isnan())).all())


class CudaReferences(References):
    """Products on the CPU where that takes well under a second, else in fp32 on the GPU with TF32 off.

    Some rows of a product on the GPU are computed on the CPU too and must agree. baselines: what NVIDIA's libraries
    compute for A, M x K, and B, K x N in the task's layout, on the GPU, each M x N.
    """

    exact_flops, compared_flops = 1 << 37, 1 << 33

    def __init__(self, baselines: Callable[[Gemm, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]) -> None:
        self.device = torch.device("cuda")
        self._baselines = baselines

    def product_fp32(self, case: ProductCase) -> torch.Tensor:
        gemm, a, b = case.task, case.a, case.b
        if gemm.flops <= CPU_FLOPS:
            return (a.cpu().float() @ b.cpu().float()).to(self.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        product = a.float() @ b.float()
        rows = torch.linspace(0, gemm.m - 1, min(SPOT_ROWS, gemm.m)).long()
        theirs = a[rows.to(self.device)].cpu().float() @ b.cpu().float()
        ours = product[rows.to(self.device)].cpu()
        if not same_but_for_order(ours, theirs, a[rows.to(self.device)], b):
            raise UserError(f"the GPU's fp32 product of {gemm} differs from the CPU's: is the GPU's memory sound?")
        return product

    def baselines(self, case: ProductCase, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return [output[rows] for output in self._baselines(case.task, case.a, case.b)]


STEP = 16
"""Elements of K that an instruction of tensor cores multiplies."""
ALL_ALONG_A_STEP = "NaN at each place of a step of K"
KINDS = {**SPECIAL, "infinity beside zeros": (INFINITY, -INFINITY), ALL_ALONG_A_STEP: (NAN,) * STEP}
"""What stands in place of elements of one operand, by what it is called: each at a random place, but for the last."""
BESIDE: dict[str, tuple[Callable[[torch.Tensor], object], ...]] = {
    **dict.fromkeys(("NaN", "infinity beside zeros", ALL_ALONG_A_STEP), (torch.Tensor.zero_,)),
    "infinity": (lambda other: other.zero_().fill_diagonal_(1),),
    "minus infinity": (
        *(torch.Tensor.triu_, torch.Tensor.tril_, lambda other: other.triu_().tril_()),
        *(lambda other: other[::2].zero_(), lambda other: other[:, 1::2].zero_()),
    ),
}
"""What the other operand holds beside a special value, by its kind; one is drawn. The usual numbers beside others."""


class ProductCases(Cases):
    """Cases of one matrix product."""

    task: Gemm
    usual = "normal numbers"
    distributions = ()
    others = ()
    special_kinds = tuple(KINDS)
    element_changes = 2

    def __init__(self, gemm: Gemm, seed: int, references: References) -> None:
        super().__init__(gemm, seed, references.device, CACHE_BYTES[references.device.type])
        self.references = references

    def get(self, name: str, index: int, make: Callable[["ProductCases", torch.Generator], ProductCase]) -> ProductCase:
        """A check's own case: made with a generator that depends on its name and number."""

        def made() -> ProductCase:
            mixed = np.random.SeedSequence([self._seed, index, *name.encode()]).generate_state(1, np.uint64)[0]
            return make(self, torch.Generator(self.device).manual_seed(int(mixed >> 1)))

        found = self._get(f"{name} {index}", made)
        assert isinstance(found, ProductCase)
        return found

    def normal(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """A (M x K) and B (K x N) of standard normal numbers, fp32."""
        gemm = self.task
        a = torch.randn(gemm.m, gemm.k, generator=generator, device=self.device)
        return a, torch.randn(gemm.k, gemm.n, generator=generator, device=self.device)

    def operands(self, a: torch.Tensor, b: torch.Tensor) -> ProductCase:
        """A case from A (M x K) and B (K x N) of any type, laid out as the task asks."""
        values = zip(self.task.inputs, (a, b), strict=True)
        return ProductCase(self.task, {tensor.name: laid_out(value, tensor) for tensor, value in values})

    def product_fp32(self, case: ProductCase) -> torch.Tensor:
        return self.references.product_fp32(case)

    def drawn(self, name: str, distribution: Distribution | None = None, task: Task | None = None) -> ProductCase:
        assert distribution is None and task is None, "a matrix product has no other values and sizes"
        return self.get(name, 0, lambda _, generator: self.with_rows(self.operands(*self.normal(generator))))

    def timed(self, index: int) -> ProductCase:
        return self.drawn(f"timed {index}")

    def exactly(self, case: Case) -> Case:
        return case

    def changed(self, case: Case, tensor: str, *, wholly: bool) -> ProductCase:
        """One element is another each time; of C the row or column that it changes is computed."""
        assert isinstance(case, ProductCase)
        if wholly:
            other = self.get(f"changed {tensor}", 0, lambda _, generator: self.operands(*self.normal(generator)))
            return self.with_rows(replace(case, tensors={**case.tensors, tensor: other.tensors[tensor]}))
        gemm = self.task
        p, row, column = (int(self.rng.integers(size)) for size in (gemm.k, gemm.m, gemm.n))
        element, at = ((row, p), (row, slice(None))) if tensor == "a" else ((p, column), (slice(None), column))
        new = case.tensors[tensor].clone()
        new[element] = 4 - 2 * new[element]
        changed = replace(case, tensors={**case.tensors, tensor: new}, alters={"c": at})
        return self._with_altered(changed)

    def exchanged(self, case: Case, tensor: str) -> ProductCase | None:
        """Others each time."""
        assert isinstance(case, ProductCase)
        old = case.tensors[tensor]
        rows, columns = (self.rng.integers(size, size=2).tolist() for size in old.shape)
        if bool(old[rows[0], columns[0]] == old[rows[1], columns[1]]):
            return None
        new = old.clone()
        new[rows, columns] = old[rows[::-1], columns[::-1]]
        lines = torch.tensor(sorted({*(rows if tensor == "a" else columns)}), device=self.device)
        at = (lines, slice(None)) if tensor == "a" else (slice(None), lines)
        return self._with_altered(replace(case, tensors={**case.tensors, tensor: new}, alters={"c": at}))

    def _with_altered(self, case: ProductCase) -> ProductCase:
        """The case with what of C it alters."""
        rows, columns = case.alters["c"]
        return replace(case, expected={"fp32": case.a[rows].float() @ case.b[:, columns].float()})

    @property
    def real_tensors(self) -> list[str]:
        return ["a", "b"]

    def special(self, tensor: str, kind: str) -> ProductCase | None:
        base = self.drawn("special elements")

        def make(_: ProductCases, generator: torch.Generator) -> ProductCase:
            beside = "b" if tensor == "a" else "a"
            new, other, rows = base.tensors[tensor].clone(), base.tensors[beside], list[int]()
            draw = self._along_a_step if kind == ALL_ALONG_A_STEP else self._anywhere
            for at, value in zip(draw(tensor, generator), KINDS[kind], strict=False):
                put(new[at], value)
                rows += at[:1] if tensor == "a" else ()
            if kind in BESIDE:
                shapes, other = BESIDE[kind], other.clone()
                shapes[int(torch.randint(len(shapes), (), generator=generator, device=self.device))](other)
            return self.with_rows(replace(base, tensors={**base.tensors, tensor: new, beside: other}), rows)

        return self.get(f"special {tensor} {kind}", 0, make)

    def _anywhere(self, tensor: str, generator: torch.Generator) -> Iterator[tuple[int, int]]:
        """Random places of an operand, without end."""
        rows, columns = (self.task.m, self.task.k) if tensor == "a" else (self.task.k, self.task.n)
        while True:
            yield self._below(rows, generator), self._below(columns, generator)

    def _along_a_step(self, tensor: str, generator: torch.Generator) -> Iterator[tuple[int, int]]:
        """A place of an operand for each place of a step of K, in lines far apart; with fewer lines some of them."""
        lines, k = self.task.m if tensor == "a" else self.task.n, self.task.k
        places = torch.randperm(min(STEP, k), generator=generator, device=self.device)[:lines].tolist()
        for number, place in enumerate(places):
            apart = lines // len(places)
            line = number * apart + self._below(apart, generator)
            along = place + STEP * self._below((k - place + STEP - 1) // STEP, generator)
            yield (line, along) if tensor == "a" else (along, line)

    def _below(self, end: int, generator: torch.Generator) -> int:
        return int(torch.randint(end, (), generator=generator, device=self.device))

    def alone(self, task: Task) -> None:
        return None

    def with_rows(self, case: ProductCase, among: Sequence[int] = ()) -> ProductCase:
        """The case with some rows of C in fp32, all where they cost little. among: rows that are to be among them."""
        gemm = self.task
        count = max(1, min(gemm.m, self.references.compared_flops // (2 * gemm.n * gemm.k)))
        drawn = self.rng.permutation(gemm.m)[:count]
        rows = torch.from_numpy(np.unique([*drawn, *among])).to(self.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        fp32 = case.a[rows].float() @ case.b.float()
        expected = {"rows": rows, "fp32": fp32}
        if fp32.isfinite().all():
            expected["allowed"] = fp32.abs().mul_(ALLOWED_SHARE).add_(ALLOWED_NOISE * gemm.k**0.5)
        return replace(case, expected=expected)

    def closely(self, case: ProductCase) -> ProductCase:
        """The case where C may be off by what fp32 sums that are rounded once are off by, where that is less.

        The same case with fp16 sums, and where not all of C is finite. The bound holds for tensor cores that cut sums
        at each eighth product or later.
        """
        if self.task.accumulate is not Accumulate.FP32 or "allowed" not in case.expected:
            return case
        limits, rows = torch.finfo(case.a.dtype), case.expected["rows"]
        sizes = case.a[rows].float().norm(dim=1)[:, None] * case.b.float().norm(dim=0)
        sums = sizes * (torch.finfo(torch.float32).eps * (CLOSE_STEPS + self.task.k / CLOSE_PRODUCTS))
        rounded = case.expected["fp32"].abs() * (CLOSE * limits.eps / 2) + limits.smallest_normal * limits.eps / 2
        allowed = torch.minimum(case.expected["allowed"], rounded + sums)
        return replace(case, expected={**case.expected, "allowed": allowed})


def require_finite(gemm: Gemm, **tensors: torch.Tensor) -> None:
    """MachineError where one of these, by name, holds what is no finite number: nothing can be judged by it.

    For operands and references of inputs that give finite results only.
    """
    bad = {name: int((~tensor.isfinite()).sum()) for name, tensor in tensors.items() if not tensor.isfinite().all()}
    if bad:
        found = ", ".join(f"{count} of {tensors[name].numel()} of {name}" for name, count in bad.items())
        raise MachineError(
            f"references for {gemm} are not finite ({found}), though its inputs are drawn so that they must be: is the"
            " memory of this machine sound?"
        )


def _summed_in_halves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B with every product and every sum rounded to the operands' type, in the order of K."""
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for p in range(a.shape[1]):
        c = c + a[:, p, None] * b[None, p]
    return c
