"""The nouns of a task: its tensors, a matrix product, any other operation. Part of `records`, which offers them all."""

import enum
import functools
import math
import operator
import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from cuda_l2.system.errors import UserError
from cuda_l2.system.values import member, require, short


class Layout(enum.StrEnum):
    """How B lies in memory; A (M x K) and C (M x N) are row-major."""

    NN = "nn"  # B is K x N row-major
    TN = "tn"  # B is column-major: N x K row-major in memory


class Accumulate(enum.StrEnum):
    """The least precision in which a kernel may sum products."""

    FP32 = "fp32"
    FP16 = "fp16"


DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
"""Element types a task's tensors may have, under torch's names."""
SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
"""Element types of matrix products, with their names in shapes and messages."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a task names it, by its logical shape; rank 0 for a single number."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    column_major: bool = False  # a matrix whose columns lie one after the other; all other tensors are row-major

    def __post_init__(self) -> None:
        if not self.name.isascii() or not self.name.isidentifier():
            raise ValueError(f"{self.name!r} cannot name a tensor")
        if self.dtype not in DTYPE_BYTES or min(self.shape, default=1) < 0:
            raise ValueError(f"{self.name} cannot be of {self.dtype} and shape {self.shape}")
        if self.column_major and len(self.shape) != 2:
            raise ValueError(f"{self.name} is no matrix: it cannot be column-major")

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements in memory from one index of each dimension to the next."""
        if self.column_major:
            return 1, self.shape[0]
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * self.elements

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


class _Computation:
    """What every task has: tensors by name."""

    __slots__ = ()

    @property
    @abstractmethod
    def inputs(self) -> tuple[Tensor, ...]: ...
    @property
    @abstractmethod
    def weights(self) -> tuple[Tensor, ...]: ...
    @property
    @abstractmethod
    def outputs(self) -> tuple[Tensor, ...]: ...

    @property
    def given(self) -> tuple[Tensor, ...]:
        """What a kernel reads: inputs and weights."""
        return (*self.inputs, *self.weights)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, outputs last."""
        return (*self.given, *self.outputs)

    @property
    def parts(self) -> tuple[tuple[str, Tensor], ...]:
        """The same, each after its part: input, weight or output."""
        groups = {"input": self.inputs, "weight": self.weights, "output": self.outputs}
        return tuple((part, tensor) for part, group in groups.items() for tensor in group)

    @property
    def bytes(self) -> int:
        """Bytes that must move: each tensor read or written once."""
        return sum(tensor.bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, order=True)
class Gemm(_Computation):
    """C = A B, alpha 1, beta 0 (paper section 2.1). A, B and C have one 16-bit element type, dtype.

    fp16 sums are a class of fp16 elements alone.
    """

    product: ClassVar[Literal[True]] = True

    m: int
    n: int
    k: int
    layout: Layout = Layout.NN
    accumulate: Accumulate = Accumulate.FP32
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if not type(self.m) is type(self.n) is type(self.k) is int:  # NumPy's whole numbers become Python's
            self._make({name: _whole(getattr(self, name)) for name in "mnk"})
        for name, kind in (("layout", Layout), ("accumulate", Accumulate)):
            if not isinstance(getattr(self, name), kind):
                self._make({name: member(kind, str(getattr(self, name)), name)})
        if self.dtype not in SHORT_DTYPES:  # fp16, or a dtype of torch's
            written = str(self.dtype).removeprefix("torch.")
            self._make({"dtype": next((name for name, brief in SHORT_DTYPES.items() if brief == written), written)})
        if self.dtype not in SHORT_DTYPES:
            raise UserError(f"a matrix product's type is {' or '.join(SHORT_DTYPES)}, not {self.dtype!r}")
        if self.dtype != "float16" and self.accumulate is Accumulate.FP16:
            raise UserError(f"{self}: only fp16 elements may be summed in fp16; leave :fp16 out")
        if min(self.m, self.n, self.k) < 1:
            raise UserError(f"{self}: M, N and K must be whole numbers of at least 1, as in 512x512x512")

    def _make(self, fields: dict[str, object]) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `MxNxK`, `MxNxK:tn`, `MxNxK:tn:fp16` (fp16 sums), `MxNxK:tn:bf16` (bf16 elements)."""
        require(text, str, "a shape is a text as in 512x512x512:tn")
        size, *options = text.strip().lower().split(":")
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", size)
        if not match:
            raise UserError(f"cannot read the shape {text!r}: write MxNxK in whole numbers, as in 8192x512x2048:tn")
        m, n, k = map(int, match.groups())
        layout, accumulate, dtype = Layout.NN, Accumulate.FP32, "float16"
        for option in options:
            if option in list(Layout):
                layout = Layout(option)
            elif option in list(Accumulate):
                accumulate = Accumulate(option)
            elif option == SHORT_DTYPES["bfloat16"]:
                dtype = "bfloat16"
            elif option in ("nt", "tt"):
                raise UserError(
                    f"{text!r}: A is row-major. Where A, B and C are all column-major write {n}x{m}x{k}: its kernel"
                    " takes them as C' = B' A', exactly. Elsewhere copy A with a.contiguous()"
                )
            else:
                known = ", ".join([*Layout, *Accumulate, SHORT_DTYPES["bfloat16"]])
                raise UserError(f"{text!r}: {option!r} is no layout, accumulator or type; choose from {known}")
        return cls(m, n, k, layout, accumulate, dtype)

    def __str__(self) -> str:
        layout = "" if self.layout is Layout.NN else f":{self.layout}"
        accumulate = "" if self.accumulate is Accumulate.FP32 else f":{self.accumulate}"
        dtype = "" if self.dtype == "float16" else f":{SHORT_DTYPES.get(self.dtype, self.dtype)}"
        return f"{self.m}x{self.n}x{self.k}{layout}{accumulate}{dtype}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        return ("m", self.m), ("n", self.n), ("k", self.k)

    @property
    def any_layout(self) -> "Gemm":
        """What products that differ in layout alone have in common: the one of row-major B."""
        return replace(self, layout=Layout.NN)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """A, M x K, and B, K x N."""
        return _product_tensors(self)[:2]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return _product_tensors(self)[2:]


@functools.lru_cache(maxsize=256)
def _product_tensors(gemm: Gemm) -> tuple[Tensor, ...]:
    """A, B and C: asked for several times at every launch of a check."""
    b = Tensor("b", gemm.dtype, (gemm.k, gemm.n), column_major=gemm.layout is Layout.TN)
    return Tensor("a", gemm.dtype, (gemm.m, gemm.k)), b, Tensor("c", gemm.dtype, (gemm.m, gemm.n))


@dataclass(frozen=True, slots=True)
class Operation(_Computation):
    """Any computation on named tensors at one choice of sizes; `cuda_l2.tasks` has its reference.

    Its text, `name@revision:size=1,other=2:float16`, is its identity. revision: digits of the hash of a definition
    that is not ours; dtype: of the tensors whose type the definition leaves open.
    """

    product: ClassVar[Literal[False]] = False

    name: str
    sizes: tuple[tuple[str, int], ...] = ()
    dtype: str = "float32"
    revision: str = ""
    inputs: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()  # inputs that stay from call to call
    outputs: tuple[Tensor, ...] = ()
    flops: int = 0  # 0 where nobody counted

    def __post_init__(self) -> None:
        name, revision, sizes, dtype = self.read_identity(str(self))
        if (name, revision, tuple(sizes.items()), dtype) != (self.name, self.revision, self.sizes, self.dtype):
            raise ValueError(f"{self} does not read as the task it names")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two tensors have the same name among {', '.join(names)}")

    @staticmethod
    def read_identity(text: str) -> tuple[str, str, dict[str, int], str]:
        """Name, revision, sizes and dtype of a task's text; what is left out is empty, the dtype float32."""
        match = _IDENTITY.fullmatch(text)
        if not match:
            raise UserError(
                f"cannot read the task {text!r}: write a shape as in 512x512x512:tn,"
                " or a task's name with its sizes as in softmax:rows=64,columns=1024:float16"
            )
        sizes: dict[str, int] = {}
        for pair in (match["sizes"] or "").split(",") if match["sizes"] else []:
            name, _, value = pair.partition("=")
            if name in sizes:
                raise UserError(f"{text!r} gives {name} twice")
            sizes[name] = int(value)
        dtype = match["dtype"] or "float32"
        if dtype not in DTYPE_BYTES:
            raise UserError(f"{text!r}: there is no type {dtype!r}; choose from {', '.join(DTYPE_BYTES)}")
        return match["name"], match["revision"] or "", sizes, dtype

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        sizes = ":" + ",".join(f"{name}={value}" for name, value in self.sizes) if self.sizes else ""
        dtype = "" if self.dtype == "float32" else f":{self.dtype}"
        return f"{self.name}{revision}{sizes}{dtype}"


def _whole(size: object) -> int:
    try:
        return operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(f"M, N and K must be whole numbers of at least 1, not {short(size)}") from None


_IDENTITY = re.compile(
    r"(?P<name>[A-Za-z][\w.+-]*(?:/[\w.+-]+)*)(?:@(?P<revision>[0-9a-f]{4,64}))?"
    r"(?::(?P<sizes>[A-Za-z_]\w*=\d{1,18}(?:,[A-Za-z_]\w*=\d{1,18})*))?(?::(?P<dtype>[a-z]+\d*))?",
    re.ASCII,
)

Task = Gemm | Operation
"""What a candidate computes: sizes, named inputs, weights and outputs, flops, bytes, and a text that identifies it."""
