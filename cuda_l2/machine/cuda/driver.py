"""Loads a compiled CUDA candidate and launches it as its plan says: kernels, tensor maps, graphs, events.

Runs in the candidate's worker process and wherever a kernel is deployed; imports no torch. Every function works in
the current CUDA context. PTX and driver names as in the CUDA driver API's reference.
"""

import ctypes
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuda.bindings import driver

from cuda_l2.contract.cuda import MAX_CLUSTER, TENSOR_MAP_BYTES, LaunchPlan, MapPlan, Plan
from cuda_l2.system.errors import MachineError
from cuda_l2.system.text import counted

_FILLS = {
    "zeros": driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    "nan": driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
}
PORTABLE_CLUSTER = 8
HANDLE_TYPE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


LAUNCH = "launch of "
MACHINE_FAULTS = frozenset(
    {"OUT_OF_MEMORY", "MAP_FAILED", "UNMAP_FAILED", "OPERATING_SYSTEM", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE"}
    | {"NO_DEVICE", "DEVICE_UNAVAILABLE", "DEVICE_NOT_LICENSED", "NOT_INITIALIZED", "DEINITIALIZED", "SYSTEM_NOT_READY"}
    | {"SYSTEM_DRIVER_MISMATCH", "MPS_CONNECTION_FAILED", "MPS_RPC_FAILURE", "MPS_SERVER_NOT_READY"}
)


class LaunchError(RuntimeError):
    """The candidate cannot be launched as its contract says."""


class DriverError(MachineError):
    """A driver call failed: the context is unusable after most of these."""

    def __init__(self, call: str, status: driver.CUresult) -> None:
        super().__init__(f"{call}: {status.name.removeprefix('CUDA_ERROR_').lower().replace('_', ' ')}")
        self.status = status
        self.of_machine = status.name.removeprefix("CUDA_ERROR_") in MACHINE_FAULTS and not call.startswith(LAUNCH)
        """Whether no candidate can be the cause; a launch that lacks memory asked for too much of it."""


def check(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or DriverError."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(call, status)
    return values[0] if len(values) == 1 else tuple(values)


class Module:
    """A cubin in the context."""

    def __init__(self, cubin: bytes) -> None:
        self.handle = check("cuModuleLoadData", driver.cuModuleLoadData(cubin))

    def unload(self) -> None:
        check("cuModuleUnload", driver.cuModuleUnload(self.handle))


class Loaded:
    """A cubin's kernels, checked against a plan. Lives as long as the context; several may share a module."""

    def __init__(self, cubin: bytes | Module, plan: Plan) -> None:
        self.plan = plan
        self._module = cubin if isinstance(cubin, Module) else Module(cubin)
        self._kernels = [_Kernel(self._module.handle, launch) for launch in plan.launches]
        self.local_bytes = max(kernel.local_bytes for kernel in self._kernels)
        """Local memory of a thread."""

    def bind(self, pointers: Mapping[str, int]) -> "Bound":
        """The launches on these device addresses: a, b, c and every workspace of the plan."""
        maps = {
            tensor_map.name: _encode(tensor_map, pointers[tensor_map.tensor]) for tensor_map in self.plan.tensor_maps
        }
        return Bound([kernel.bind(pointers, maps) for kernel in self._kernels])

    def unload(self) -> None:
        self._module.unload()


class Bound:
    """Launches ready to be enqueued, any number of times."""

    def __init__(self, launches: Sequence[Callable[[int], None]]) -> None:
        self._launches = launches

    def launch(self, stream: int) -> None:
        """Enqueue every launch on the stream; works under stream capture."""
        for launch in self._launches:
            launch(stream)


class _Kernel:
    """One launch of a plan: function, attributes and where its parameters lie."""

    def __init__(self, module: Any, launch: LaunchPlan) -> None:
        self.launch = launch
        status, self.function = driver.cuModuleGetFunction(module, launch.kernel.encode())
        if status != driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"the source defines no kernel {launch.kernel}")
        self._layout = self._parameters()
        self._stream = -1  # that the configuration names
        self._prepare()

    def bind(self, pointers: Mapping[str, int], maps: Mapping[str, bytes]) -> Callable[[int], None]:
        """A function that enqueues this launch with these addresses."""
        values = []
        for argument in self.launch.arguments:
            if argument.kind == "pointer":
                values.append(pointers[argument.name].to_bytes(8, "little"))
            elif argument.kind == "tensor_map":
                values.append(maps[argument.name])
            else:
                values.append(bytes.fromhex(argument.data))
        buffers = [
            ctypes.create_string_buffer(value + bytes(size - len(value)), size)
            for value, size in zip(values, self._layout, strict=True)
        ]
        array = (ctypes.c_void_p * max(1, len(buffers)))(*(ctypes.addressof(buffer) for buffer in buffers))
        address = ctypes.addressof(array)

        def enqueue(stream: int) -> None:
            config = self.config
            if stream != self._stream:
                config.hStream, self._stream = driver.CUstream(stream), stream
            (status,) = driver.cuLaunchKernelEx(config, self.function, address, 0)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise DriverError(LAUNCH + self.launch.kernel, status)

        enqueue.keep = (buffers, array)  # type: ignore[attr-defined]
        return enqueue

    def _parameters(self) -> list[int]:
        """Bytes of each parameter; LaunchError where the contract passes something else."""
        sizes: list[int] = []
        while True:
            status, _, size = driver.cuFuncGetParamInfo(self.function, len(sizes))
            if status != driver.CUresult.CUDA_SUCCESS:
                break
            sizes.append(int(size))
        given = [
            8 if a.kind == "pointer" else TENSOR_MAP_BYTES if a.kind == "tensor_map" else len(a.data) // 2
            for a in self.launch.arguments
        ]
        if len(given) != len(sizes):
            takes = counted(len(sizes), "parameter")
            raise LaunchError(f"{self.launch.kernel} takes {takes}, the contract passes {len(given)}")
        for index, (argument, has, wants) in enumerate(zip(self.launch.arguments, given, sizes, strict=True)):
            # a structure around a table may end in padding, or be declared for the longest of several
            if has != wants and not (argument.kind == "table" and has < wants):
                raise LaunchError(
                    f"parameter {index + 1} of {self.launch.kernel} takes {counted(wants, 'byte')}, the contract passes"
                    f" {has} ({argument.kind} {argument.name})"
                )
        return sizes

    def _prepare(self) -> None:
        launch, function = self.launch, self.function
        attributes = driver.CUfunction_attribute
        if launch.shared_bytes:
            attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuFuncSetAttribute(function, attribute, launch.shared_bytes)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise LaunchError(
                    f"{launch.kernel} asks for {launch.shared_bytes} bytes of shared memory, more than a block may have"
                )
        threads = math.prod(launch.block)
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        most = check("cuFuncGetAttribute", driver.cuFuncGetAttribute(attribute, function))
        if threads > most:
            raise LaunchError(f"{launch.kernel} can run {most} threads a block, the contract asks for {threads}")
        attribute = attributes.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        self.local_bytes = int(check("cuFuncGetAttribute", driver.cuFuncGetAttribute(attribute, function)))
        size = math.prod(launch.cluster)
        assert size <= MAX_CLUSTER
        if size > PORTABLE_CLUSTER:
            attribute = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            check("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, attribute, 1))
        self.config = launch_config(
            launch.grid, launch.block, launch.shared_bytes, cluster=launch.cluster, programmatic=launch.programmatic
        )
        blocks = math.prod(launch.grid)
        if size > 1:
            status, clusters = driver.cuOccupancyMaxActiveClusters(function, self.config)
            if status != driver.CUresult.CUDA_SUCCESS or not clusters:
                raise LaunchError(f"{launch.kernel} cannot run in clusters of {size} blocks here")
            resident = clusters * size
        else:
            found = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, launch.shared_bytes)
            per_sm = check("cuOccupancyMaxActiveBlocksPerMultiprocessor", found)
            if not per_sm:
                raise LaunchError(f"{launch.kernel} needs more registers or shared memory than a multiprocessor has")
            resident = per_sm * device_attribute("MULTIPROCESSOR_COUNT")
        if launch.coresident and blocks > resident:
            raise LaunchError(f"{launch.kernel} needs {blocks} blocks at once, {resident} fit")


def launch_config(
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    *,
    cluster: tuple[int, ...] = (1, 1, 1),
    programmatic: bool = False,
) -> driver.CUlaunchConfig:
    """How a kernel is launched, but for the stream. Kept by who launches: making one takes longer than a launch."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    attributes = []
    if cluster != (1, 1, 1):
        clusters = driver.CUlaunchAttribute()
        clusters.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        clusters.value.clusterDim.x, clusters.value.clusterDim.y, clusters.value.clusterDim.z = cluster
        attributes.append(clusters)
    if programmatic:
        edge = driver.CUlaunchAttribute()
        edge.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        edge.value.programmaticStreamSerializationAllowed = 1
        attributes.append(edge)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


@functools.lru_cache(maxsize=4096)
def _encode(tensor_map: MapPlan, address: int) -> bytes:
    """The 128 bytes of a CUtensorMap."""
    promotion = tensor_map.l2_promotion if tensor_map.l2_promotion == "none" else f"L2_{tensor_map.l2_promotion}"
    status, encoded = driver.cuTensorMapEncodeTiled(
        _member(driver.CUtensorMapDataType, "CU_TENSOR_MAP_DATA_TYPE", tensor_map.dtype),
        len(tensor_map.dims),
        address,
        [driver.cuuint64_t(dim) for dim in tensor_map.dims],
        [driver.cuuint64_t(stride) for stride in tensor_map.strides],
        [driver.cuuint32_t(size) for size in tensor_map.box],
        [driver.cuuint32_t(step) for step in tensor_map.element_strides],
        _member(driver.CUtensorMapInterleave, "CU_TENSOR_MAP_INTERLEAVE", tensor_map.interleave),
        _member(driver.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE", tensor_map.swizzle),
        _member(driver.CUtensorMapL2promotion, "CU_TENSOR_MAP_L2_PROMOTION", promotion),
        _FILLS[tensor_map.out_of_bounds],
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"the driver refuses the tensor map {tensor_map.name}: {status.name}")
    return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)


def _member(kind: type, prefix: str, name: str) -> Any:
    """The member of one of the driver's enums that a contract's word names."""
    return getattr(kind, f"{prefix}_{name.upper()}")


def device_attribute(name: str) -> int:
    """An attribute of the context's device by its name in the driver's enum."""
    device = check("cuCtxGetDevice", driver.cuCtxGetDevice())
    attribute = _member(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE", name)
    return int(check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, device)))


def start(streams: int) -> list[int]:
    """Make the first GPU's primary context the current one; streams in it that do not wait for the default one."""
    check("cuInit", driver.cuInit(0))
    device = check("cuDeviceGet", driver.cuDeviceGet(0))
    context = check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
    check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    return [int(check("cuStreamCreate", driver.cuStreamCreate(flag))) for _ in range(streams)]


class Replays(ABC):
    """Work on a stream that can be enqueued again and again, timed as one."""

    def __init__(self, stream: int) -> None:
        self.stream = driver.CUstream(stream)
        self._events = [check("cuEventCreate", driver.cuEventCreate(0)) for _ in range(2)]

    @abstractmethod
    def replay(self) -> None:
        """Enqueue once, without waiting."""

    def time(self, warm: int = 1, between: Callable[[], None] | None = None, before: "Replays | None" = None) -> float:
        """Device seconds of one replay by events, after `warm` replays back to back.

        before: what is replayed before it, if not the same. between: enqueues what comes behind those, and is not in
        the device's time. The warm replay keeps the stream busy while the host enqueues the timed one, so that no host
        time is in it.
        """
        start, end = self._events
        check("cuStreamSynchronize", driver.cuStreamSynchronize(self.stream))
        for _ in range(warm):
            (before or self).replay()
        if between:
            between()
        check("cuEventRecord", driver.cuEventRecord(start, self.stream))
        self.replay()
        check("cuEventRecord", driver.cuEventRecord(end, self.stream))
        check("cuEventSynchronize", driver.cuEventSynchronize(end))
        return float(check("cuEventElapsedTime", driver.cuEventElapsedTime(start, end))) * 1e-3

    def once(self) -> float:
        """Host seconds from the call to the end of one replay on an idle stream."""
        began = time.perf_counter()
        self.replay()
        check("cuStreamSynchronize", driver.cuStreamSynchronize(self.stream))
        return time.perf_counter() - began

    def destroy(self) -> None:
        for event in self._events:
            check("cuEventDestroy", driver.cuEventDestroy(event))


class Graph(Replays):
    """A captured sequence of launches."""

    def __init__(self, stream: int, enqueue: Callable[[int], None]) -> None:
        """Capture what `enqueue` puts on the stream."""
        super().__init__(stream)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check("cuStreamBeginCapture", driver.cuStreamBeginCapture(self.stream, mode))
        try:
            enqueue(stream)
        finally:
            result = driver.cuStreamEndCapture(self.stream)
        graph = check("cuStreamEndCapture", result)
        self._exec = check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
        check("cuGraphDestroy", driver.cuGraphDestroy(graph))

    def replay(self) -> None:
        check("cuGraphLaunch", driver.cuGraphLaunch(self._exec, self.stream))

    def destroy(self) -> None:
        check("cuGraphExecDestroy", driver.cuGraphExecDestroy(self._exec))
        super().destroy()


class MappedMemory:
    """Memory in a reserved address range of its own, unmapped space on both sides."""

    @classmethod
    def imported(cls, descriptor: int, size: int, grain: int, *, writable: bool = True, far: int = 0) -> "MappedMemory":
        """Map memory that another process exported; the descriptor stays the caller's.

        writable: else writing there faults. far: bytes of addresses, of whole grains, that stay free before it.
        """
        handle = check("cuMemImportFromShareableHandle", driver.cuMemImportFromShareableHandle(descriptor, HANDLE_TYPE))
        mapping = cls(handle, size, grain, writable=writable, far=far)
        check("cuMemRelease", driver.cuMemRelease(handle))  # the mapping keeps it
        return mapping

    def __init__(self, handle: Any, size: int, grain: int, *, writable: bool = True, far: int = 0) -> None:
        self._reserved, self._size = far + size + 2 * grain, size
        self._base = check("cuMemAddressReserve", driver.cuMemAddressReserve(self._reserved, 0, 0, 0))
        self.address = int(self._base) + far + grain
        check("cuMemMap", driver.cuMemMap(self.address, size, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = memory_properties().location
        kinds = driver.CUmemAccess_flags
        access.flags = kinds.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else kinds.CU_MEM_ACCESS_FLAGS_PROT_READ
        check("cuMemSetAccess", driver.cuMemSetAccess(self.address, size, [access], 1))

    def close(self) -> None:
        check("cuMemUnmap", driver.cuMemUnmap(self.address, self._size))
        check("cuMemAddressFree", driver.cuMemAddressFree(self._base, self._reserved))


def bus_id() -> str:
    """PCI address of the GPU in use: CUDA's first, which CUDA_VISIBLE_DEVICES chooses."""
    check("cuInit", driver.cuInit(0))
    device = check("cuDeviceGet", driver.cuDeviceGet(0))
    name = check("cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId(32, device))
    return str(name.partition(b"\0")[0].decode())


def memory_properties() -> driver.CUmemAllocationProp:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.requestedHandleTypes = HANDLE_TYPE
    return properties
