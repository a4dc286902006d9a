"""Launches of one product from device addresses: put on buffers, repeated, captured into graphs, named."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from cuda_l2.machine.cuda.driver import Graph, check
from cuda_l2.measure.cublas import Launch

Enqueue = Callable[[int], None]
"""Puts work on a stream."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Device addresses, operands filled: A M x K, B as K x N and as N x K, C M x N; fp16 row-major."""

    a: int
    b_nn: int
    b_tn: int
    c: int


def on(launch: Launch, buffers: Buffers) -> Enqueue:
    return lambda stream: launch(stream, buffers.a, buffers.b_nn, buffers.b_tn, buffers.c)


def repeated(enqueue: Enqueue, count: int) -> Enqueue:
    def run(stream: int) -> None:
        for _ in range(count):
            enqueue(stream)

    return run


@contextlib.contextmanager
def graphs(stream: int, enqueues: Sequence[Enqueue]) -> Iterator[list[Graph]]:
    """A graph of each; destroyed at the end."""
    with contextlib.ExitStack() as stack:
        made: list[Graph] = []
        for enqueue in enqueues:
            made.append(Graph(stream, enqueue))
            stack.callback(made[-1].destroy)
        yield made


def wait(stream: int) -> None:
    check("cuStreamSynchronize", driver.cuStreamSynchronize(driver.CUstream(stream)))


def captured_kernels(stream: int, enqueue: Enqueue) -> list[str]:
    """Names and grids of the kernels that `enqueue` puts on a stream, in order; nothing runs."""
    handle = driver.CUstream(stream)
    # relaxed: a library may load code or allocate at its first launch on this stream
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check("cuStreamBeginCapture", driver.cuStreamBeginCapture(handle, mode))
    try:
        enqueue(stream)
    finally:
        ended = driver.cuStreamEndCapture(handle)
    graph = check("cuStreamEndCapture", ended)
    try:
        _, count = check("cuGraphGetNodes", driver.cuGraphGetNodes(graph))
        nodes, _ = check("cuGraphGetNodes", driver.cuGraphGetNodes(graph, count)) if count else ([], 0)
        return [_node_name(node) for node in nodes]
    finally:
        check("cuGraphDestroy", driver.cuGraphDestroy(graph))


def _node_name(node: Any) -> str:
    kind = check("cuGraphNodeGetType", driver.cuGraphNodeGetType(node))
    if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        return str(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower())
    parameters = check("cuGraphKernelNodeGetParams", driver.cuGraphKernelNodeGetParams(node))
    if int(parameters.func):
        name = check("cuFuncGetName", driver.cuFuncGetName(parameters.func))
    else:
        name = check("cuKernelGetName", driver.cuKernelGetName(parameters.kern))
    return f"{name.decode()} {parameters.gridDimX}x{parameters.gridDimY}x{parameters.gridDimZ}"
