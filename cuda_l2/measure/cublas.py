"""cuBLAS and cuBLASLt by ctypes: the libraries that torch brings, called as a C program would call them.

Row-major C = A B is computed as the column-major C^T = B^T A^T, so the operands change places: the libraries' first
matrix is our B, their m is our N. Enumerations and structures are those of cublas_api.h and cublasLt.h.
"""

import ctypes
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass

from cuda_l2.measure.configurations import LIBRARYS_SPLIT, UNREAD, Capabilities, Configuration
from cuda_l2.records import Accumulate, Gemm, Layout
from cuda_l2.system.errors import MachineError, UserError

Launch = Callable[[int, int, int, int, int], None]
"""Enqueues one product: stream, then device addresses of A, B as K x N, B as N x K (the one not read may be 0), C."""

ALIGNMENT = 256
"""Bytes: what cuBLASLt's heuristic takes operands to be aligned to unless told otherwise."""
REQUESTED_ALGORITHMS, REQUESTED_IDS = 100, 256


class MatmulAlgo(ctypes.Structure):
    """cublasLtMatmulAlgo_t: may be stored and restored for the same version of the library."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", MatmulAlgo),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class DataType(enum.IntEnum):
    R_32F = 0
    R_16F = 2
    R_16BF = 14


class ComputeType(enum.IntEnum):
    F16 = 64
    F32 = 68


class AlgoConfig(enum.IntEnum):
    """Attributes of an algorithm, named as `Algorithm` has them."""

    ID = 0
    TILE = 1
    SPLIT_K = 2
    REDUCTION = 3
    SWIZZLE = 4
    CUSTOM_OPTION = 5
    STAGES = 6
    INNER_SHAPE = 7
    CLUSTER = 8


class AlgoCap(enum.IntEnum):
    """Capabilities of an algorithm. Tiles and stages are arrays."""

    SPLIT_K = 0
    REDUCTIONS = 1
    SWIZZLE = 2
    TILES = 6
    CUSTOM_OPTION_MAX = 7
    STAGES = 13


_SHORT_ATTRIBUTES = (AlgoConfig.INNER_SHAPE, AlgoConfig.CLUSTER)  # 16 bits; the others have 32
REDUCTIONS = {0: "none", 1: "in place", 2: "compute type", 4: "output type"}
"""In what type the parts of a split K are summed; 'output type' rounds every part to fp16 first."""
ROUNDED = ("in place", "output type")
"""Reductions that round each part of a sum to fp16 or bf16."""
_DESC_TRANSA = 3
_PREFERENCE_MAX_WORKSPACE_BYTES = 1
_PREFERENCE_MIN_ALIGNMENTS = (5, 6, 7, 8)  # of the first matrix, the second, C and D
_TRANSPOSE = 1
_UNSIGNED_SPLIT = (1 << 32) - 1
_GEMM_DEFAULT_TENSOR_OP = 99
_NOT_SUPPORTED = 15
_STATUSES = {
    1: "not initialised",
    3: "allocation failed",
    7: "invalid value",
    8: "architecture mismatch",
    11: "mapping error",
    13: "execution failed",
    14: "internal error",
    _NOT_SUPPORTED: "not supported",
}


class CublasError(MachineError):
    """A library call failed."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call}: {_STATUSES.get(status, f'status {status}')}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One of cuBLASLt's algorithms for one product. Tile, stages, inner shape and cluster are the library's own ids."""

    data: str  # the opaque descriptor, hex
    id: int
    tile: int
    stages: int
    split_k: int
    reduction: str
    swizzle: int
    custom_option: int
    inner_shape: int
    cluster: int
    workspace_bytes: int
    waves: float

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.data)) != ctypes.sizeof(MatmulAlgo):
            raise ValueError("an algorithm's descriptor has 64 bytes")

    @property
    def configuration(self) -> Configuration:
        """What is set of it, so that others like it can be tried."""
        values = {each.name.lower(): getattr(self, each.name.lower()) for each in AlgoConfig}
        values["reduction"] = next((scheme for scheme, name in REDUCTIONS.items() if name == self.reduction), 0)
        known = {name: value for name, value in values.items() if value != UNREAD}
        return Configuration(**known | ({"split_k": LIBRARYS_SPLIT} if self.split_k == _UNSIGNED_SPLIT else {}))


def compute_type(accumulate: Accumulate) -> ComputeType:
    return ComputeType.F32 if accumulate is Accumulate.FP32 else ComputeType.F16


def element_type(gemm: Gemm) -> DataType:
    """The type of A, B and C."""
    return DataType.R_16BF if gemm.dtype == "bfloat16" else DataType.R_16F


def scale_type(accumulate: Accumulate) -> DataType:
    """The type of alpha and beta; anything but the compute type's own is refused or, worse, silently slow."""
    return DataType.R_32F if accumulate is Accumulate.FP32 else DataType.R_16F


def _one_and_zero(
    accumulate: Accumulate,
) -> tuple[ctypes.c_float, ctypes.c_float] | tuple[ctypes.c_uint16, ctypes.c_uint16]:
    if accumulate is Accumulate.FP32:
        return ctypes.c_float(1.0), ctypes.c_float(0.0)
    return ctypes.c_uint16(0x3C00), ctypes.c_uint16(0)  # fp16 bits


@functools.cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """cuBLAS and cuBLASLt, the copies that torch has loaded; UserError where it has none."""
    import torch  # noqa: PLC0415 - loads the libraries

    try:
        blas, lt = (ctypes.CDLL(file_name(name)) for name in ("cublas", "cublasLt"))
    except OSError as error:
        raise UserError(
            f"no cuBLAS beside torch {torch.__version__} ({error}): install a build of torch for CUDA"
        ) from None
    pointer, size, integer, wide = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    _declare(blas, "cublasCreate_v2", pointer)
    _declare(blas, "cublasDestroy_v2", pointer)
    _declare(blas, "cublasSetStream_v2", pointer, pointer)
    _declare(blas, "cublasSetWorkspace_v2", pointer, pointer, size)
    matrix = (pointer, integer, integer)  # address, type, leading dimension
    sizes = [integer] * 5  # two operations, m, n, k
    _declare(blas, "cublasGemmEx", pointer, *sizes, pointer, *matrix, *matrix, pointer, *matrix, integer, integer)
    _declare(lt, "cublasLtCreate", pointer)
    _declare(lt, "cublasLtDestroy", pointer)
    _declare(lt, "cublasLtMatmulDescCreate", pointer, integer, integer)
    _declare(lt, "cublasLtMatmulDescSetAttribute", pointer, integer, pointer, size)
    _declare(lt, "cublasLtMatmulDescDestroy", pointer)
    _declare(lt, "cublasLtMatrixLayoutCreate", pointer, integer, ctypes.c_uint64, ctypes.c_uint64, wide)
    _declare(lt, "cublasLtMatrixLayoutDestroy", pointer)
    _declare(lt, "cublasLtMatmulPreferenceCreate", pointer)
    _declare(lt, "cublasLtMatmulPreferenceSetAttribute", pointer, integer, pointer, size)
    _declare(lt, "cublasLtMatmulPreferenceDestroy", pointer)
    _declare(lt, "cublasLtMatmulAlgoGetHeuristic", *[pointer] * 7, integer, pointer, pointer)
    _declare(lt, "cublasLtMatmulAlgoCheck", *[pointer] * 8)
    _declare(lt, "cublasLtMatmulAlgoConfigGetAttribute", pointer, integer, pointer, size, pointer)
    _declare(lt, "cublasLtMatmulAlgoConfigSetAttribute", pointer, integer, pointer, size)
    _declare(lt, "cublasLtMatmulAlgoCapGetAttribute", pointer, integer, pointer, size, pointer)
    types = [integer] * 6  # compute, scale, A, B, C, D
    _declare(lt, "cublasLtMatmulAlgoGetIds", pointer, *types, integer, pointer, pointer)
    _declare(lt, "cublasLtMatmulAlgoInit", pointer, *types, integer, pointer)
    _declare(lt, "cublasLtMatmul", *[pointer] * 14, size, pointer)
    lt.cublasLtGetVersion.restype = size
    return blas, lt


def file_name(library: str) -> str:
    """The file of cublas or cublasLt that torch has loaded."""
    import torch  # noqa: PLC0415 - knows its version of CUDA

    return f"lib{library}.so.{(torch.version.cuda or 'none').split('.')[0]}"


def _declare(library: ctypes.CDLL, name: str, *argument_types: type) -> None:
    """Give a function its argument types; it answers a status, and raises CublasError where that is no success."""

    def checked(status: int, function: object, arguments: object) -> int:
        if status:
            raise CublasError(name.removesuffix("_v2"), status)
        return status

    function = getattr(library, name)
    function.argtypes, function.restype, function.errcheck = argument_types, ctypes.c_int, checked


def lt_version() -> int:
    """As in 130100 for 13.1.0."""
    return int(libraries()[1].cublasLtGetVersion())


def _made(create: Callable[..., int], *arguments: int) -> ctypes.c_void_p:
    """What a library's function creates."""
    handle = ctypes.c_void_p()
    create(ctypes.byref(handle), *arguments)
    return handle


class Cublas:
    """One handle of each library on the current context, with a workspace of the caller's that both use.

    For launches of one thread; products on several streams at once would share the workspace.
    """

    def __init__(self, workspace: int, workspace_bytes: int) -> None:
        self.workspace, self.workspace_bytes = workspace, workspace_bytes
        self._blas, self.lt = libraries()
        self._handle, self.lt_handle = _made(self._blas.cublasCreate_v2), _made(self.lt.cublasLtCreate)
        self._stream: int | None = None

    def gemm_ex(self, gemm: Gemm, layout: Layout) -> Launch:
        """cublasGemmEx with its own choice of algorithm (paper listing 6)."""
        m, n, k = gemm.m, gemm.n, gemm.k
        one, zero = _one_and_zero(gemm.accumulate)
        alpha, beta = ctypes.byref(one), ctypes.byref(zero)
        row_major = layout is Layout.NN
        transpose, b_rows = (0, n) if row_major else (_TRANSPOSE, k)
        half, compute = int(element_type(gemm)), int(compute_type(gemm.accumulate))
        function, handle = self._blas.cublasGemmEx, self._handle

        def launch(stream: int, a: int, b_nn: int, b_tn: int, c: int) -> None:
            b = b_nn if row_major else b_tn
            if stream != self._stream:
                self._use(stream)
            function(
                *(handle, transpose, 0, n, m, k, alpha, b, half, b_rows, a, half, k, beta, c, half, n),
                *(compute, _GEMM_DEFAULT_TENSOR_OP),
            )

        return launch

    def close(self) -> None:
        if self._handle:
            self._blas.cublasDestroy_v2(self._handle)
            self.lt.cublasLtDestroy(self.lt_handle)
            self._handle = ctypes.c_void_p()

    def _use(self, stream: int) -> None:
        self._blas.cublasSetStream_v2(self._handle, stream)
        # setting a stream puts the library's own small workspace back
        self._blas.cublasSetWorkspace_v2(self._handle, self.workspace, self.workspace_bytes)
        self._stream = stream


class LtProduct:
    """One product with B in one layout: cuBLASLt's descriptors, its algorithms, and launches of any of them.

    alignment: bytes to which addresses are aligned.
    """

    def __init__(self, blas: Cublas, gemm: Gemm, layout: Layout, alignment: int = ALIGNMENT) -> None:
        self._blas, self._accumulate, self._alignment, lt = blas, gemm.accumulate, alignment, blas.lt
        self._element, self._row_major = element_type(gemm), layout is Layout.NN
        m, n, k = gemm.m, gemm.n, gemm.k
        types = compute_type(gemm.accumulate), scale_type(gemm.accumulate)
        self._types = (*types, *[self._element] * 4)
        self._operation = _made(lt.cublasLtMatmulDescCreate, *types)
        if not self._row_major:
            transpose = ctypes.c_int32(_TRANSPOSE)
            lt.cublasLtMatmulDescSetAttribute(self._operation, _DESC_TRANSA, ctypes.byref(transpose), 4)
        # columns are contiguous: the library's B^T is our rows of B
        self._b = self._matrix(n, k, n) if self._row_major else self._matrix(k, n, k)
        self._a = self._matrix(k, m, k)
        self._c = self._matrix(n, m, n)

    @functools.cached_property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """What the heuristic returns, its own choice first; empty where the library cannot compute this product."""
        lt, requested = self._blas.lt, REQUESTED_ALGORITHMS
        preference = _made(lt.cublasLtMatmulPreferenceCreate)
        limit = ctypes.c_uint64(self._blas.workspace_bytes)
        lt.cublasLtMatmulPreferenceSetAttribute(
            preference, _PREFERENCE_MAX_WORKSPACE_BYTES, ctypes.byref(limit), ctypes.sizeof(limit)
        )
        aligned = ctypes.c_uint32(self._alignment)
        for operand in _PREFERENCE_MIN_ALIGNMENTS:
            lt.cublasLtMatmulPreferenceSetAttribute(preference, operand, ctypes.byref(aligned), 4)
        results, found = (HeuristicResult * requested)(), ctypes.c_int(0)
        try:
            lt.cublasLtMatmulAlgoGetHeuristic(
                *(self._blas.lt_handle, self._operation, self._b, self._a, self._c, self._c, preference),
                *(requested, results, ctypes.byref(found)),
            )
        except CublasError as error:
            if error.status == _NOT_SUPPORTED:
                return ()
            raise
        finally:
            lt.cublasLtMatmulPreferenceDestroy(preference)
        return tuple(self._algorithm(result) for result in results[: found.value] if result.state == 0)

    def supports(self, algorithm: Algorithm) -> bool:
        """Whether a stored algorithm still runs here within the workspace."""
        return self._checked(MatmulAlgo.from_buffer_copy(bytes.fromhex(algorithm.data))) is not None

    def algorithm_ids(self) -> list[int]:
        """The algorithms for the product's types, whatever its shape."""
        ids, found = (ctypes.c_int * REQUESTED_IDS)(), ctypes.c_int(0)
        self._blas.lt.cublasLtMatmulAlgoGetIds(
            self._blas.lt_handle, *self._types, REQUESTED_IDS, ids, ctypes.byref(found)
        )
        return list(ids[: found.value])

    def capabilities(self, algorithm_id: int) -> Capabilities | None:
        """What may be set of an algorithm; None where it is not for the product's types."""
        try:
            algo = self._initial(algorithm_id)
            caps = {cap: self._capability(algo, cap) for cap in AlgoCap}
        except CublasError:
            return None
        one = {cap: values[0] if values else 0 for cap, values in caps.items()}
        splits, further = one[AlgoCap.SPLIT_K] != 0, (AlgoCap.REDUCTIONS, AlgoCap.SWIZZLE, AlgoCap.CUSTOM_OPTION_MAX)
        return Capabilities(
            algorithm_id, caps[AlgoCap.TILES], caps[AlgoCap.STAGES], splits, *(one[each] for each in further)
        )

    def configured(self, configuration: Configuration) -> Algorithm | None:
        """The algorithm of a configuration; None where the library refuses it or it needs more workspace."""
        try:
            algo = self._initial(configuration.id)
            for attribute in AlgoConfig:
                value = getattr(configuration, attribute.name.lower())
                if attribute is not AlgoConfig.ID and value:
                    kind = ctypes.c_uint16 if attribute in _SHORT_ATTRIBUTES else ctypes.c_int32
                    self._blas.lt.cublasLtMatmulAlgoConfigSetAttribute(
                        ctypes.byref(algo), attribute, ctypes.byref(kind(value)), ctypes.sizeof(kind)
                    )
        except CublasError:
            return None
        result = self._checked(algo)
        if result is None:
            return None
        result.algo = algo  # the check leaves it as it was
        return self._algorithm(result)

    def launcher(self, algorithm: Algorithm) -> Launch:
        """cublasLtMatmul with this algorithm (paper listings 7 and 8)."""
        blas, operation = self._blas, self._operation
        one, zero = _one_and_zero(self._accumulate)
        stored = MatmulAlgo.from_buffer_copy(bytes.fromhex(algorithm.data))
        alpha, beta, algo = ctypes.byref(one), ctypes.byref(zero), ctypes.byref(stored)
        function, handle, workspace, size = blas.lt.cublasLtMatmul, blas.lt_handle, blas.workspace, blas.workspace_bytes
        a_layout, b_layout, c_layout, row_major = self._a, self._b, self._c, self._row_major
        alignment = self._alignment

        def launch(stream: int, a: int, b_nn: int, b_tn: int, c: int) -> None:
            b = b_nn if row_major else b_tn
            if (a | b | c) % alignment:
                raise ValueError(f"cuBLASLt's algorithms were chosen for operands aligned to {alignment} bytes")
            function(
                *(handle, operation, alpha, b, b_layout, a, a_layout, beta, c, c_layout, c, c_layout),
                *(algo, workspace, size, stream),
            )

        return launch

    def close(self) -> None:
        lt = self._blas.lt
        for matrix in (self._a, self._b, self._c):
            lt.cublasLtMatrixLayoutDestroy(matrix)
        lt.cublasLtMatmulDescDestroy(self._operation)

    def _checked(self, algo: MatmulAlgo) -> HeuristicResult | None:
        """What an algorithm needs, without the algorithm; None where it does not run here within the workspace."""
        result = HeuristicResult()
        try:
            self._blas.lt.cublasLtMatmulAlgoCheck(
                *(self._blas.lt_handle, self._operation, self._b, self._a, self._c, self._c),
                *(ctypes.byref(algo), ctypes.byref(result)),
            )
        except CublasError:
            return None
        return result if result.workspace_size <= self._blas.workspace_bytes else None

    def _initial(self, algorithm_id: int) -> MatmulAlgo:
        algo = MatmulAlgo()
        self._blas.lt.cublasLtMatmulAlgoInit(self._blas.lt_handle, *self._types, algorithm_id, ctypes.byref(algo))
        return algo

    def _capability(self, algo: MatmulAlgo, cap: AlgoCap) -> tuple[int, ...]:
        """32-bit numbers: of tiles and stages as many as there are, of others one."""
        get, written = self._blas.lt.cublasLtMatmulAlgoCapGetAttribute, ctypes.c_size_t()
        get(ctypes.byref(algo), cap, None, 0, ctypes.byref(written))
        values = (ctypes.c_int32 * (written.value // 4))()
        if written.value:
            get(ctypes.byref(algo), cap, values, ctypes.sizeof(values), ctypes.byref(written))
        return tuple(values)

    def _matrix(self, rows: int, columns: int, leading: int) -> ctypes.c_void_p:
        """A column-major matrix of the product's type."""
        return _made(self._blas.lt.cublasLtMatrixLayoutCreate, self._element, rows, columns, leading)

    def _algorithm(self, result: HeuristicResult) -> Algorithm:
        config = {attribute.name.lower(): self._config(result.algo, attribute) for attribute in AlgoConfig}
        reduction = config.pop("reduction")
        return Algorithm(
            data=bytes(result.algo).hex(),
            reduction=REDUCTIONS.get(reduction, str(reduction)),
            workspace_bytes=result.workspace_size,
            waves=result.waves_count,
            **config,
        )

    def _config(self, algo: MatmulAlgo, attribute: AlgoConfig) -> int:
        value = ctypes.c_uint16() if attribute in _SHORT_ATTRIBUTES else ctypes.c_uint32()
        written = ctypes.c_size_t()
        try:
            self._blas.lt.cublasLtMatmulAlgoConfigGetAttribute(
                *(ctypes.byref(algo), attribute, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written))
            )
        except CublasError:
            return UNREAD
        return int(value.value)
