"""The query for a task's references, and the excerpts that fit into a prompt."""

from collections.abc import Callable, Sequence

from cuda_l2.llm._base import one_line
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Task, Trial
from cuda_l2.retrieve.index import Index
from cuda_l2.retrieve.sources import USER
from cuda_l2.system.text import fenced
from cuda_l2.tasks.kinds import operation_kind

PIECES = 12
"""Largest number of pieces looked up; tokens usually allow fewer."""
PIECE_CHARS = 6_000
NAME_CHARS = 200
"""Limit of a file's name, which stands outside of the fence."""
SOURCES = {"cpu": ("aten", USER), "cuda": ("cuda", "cccl", "cutlass", "aten", USER)}
_TOPICS = {
    "cpu": "vectorized half float convert fused multiply add fmadd gemm kernel pack block",
    "sm80": "mma sync m16n8k16 ldmatrix cp.async commit wait group swizzle",
    "sm90": "wgmma mma_async SM90 SS warpgroup fence commit wait descriptor swizzle TMA load mbarrier cluster pipeline",
    "later": "tcgen05 mma SM100 tmem alloc ld TMA load mbarrier cluster",
}
_SUMS = {"fp32": "f32 f16", "fp16": "f16"}
_TASK_TOPICS = {"cpu": "", "cuda": "kernel block threads"}
"""Words for tasks other than matrix products, beside their own; more words hide those (docs/log.md)."""


def query(task: Task, target: Target, failures: Sequence[Trial]) -> str:
    """The instruction in the headers' own words, and the last failure."""
    if not task.product:
        topic = f"{operation_kind(task).code_words(task)} {_TASK_TOPICS[target.name]}".strip()
    elif isinstance(target, CudaTarget):
        major = target.capability[0]
        instructions = _TOPICS["sm80" if major == 8 else "sm90" if major == 9 else "later"]
        topic = f"{instructions} {_SUMS[task.accumulate]}"
    else:
        topic = _TOPICS["cpu"]
    said = failures[-1].reason[:200] if failures else ""
    return f"{topic} {said}".strip()


def excerpts(
    index: Index,
    target: Target,
    text: str,
    tokens: int,
    count_tokens: Callable[[str], int],
    hidden: Callable[[str], bool] = lambda text: False,
) -> list[str]:
    """Pieces of headers for a query, fenced and named, the nearest first.

    tokens: limit of all excerpts together. hidden: whether a piece must not be shown.
    """
    chosen: list[str] = []
    left = tokens
    for piece in index.search(text, PIECES, SOURCES[target.name]):
        if hidden(piece.text):
            continue
        name = one_line(piece.name.replace("`", ""), NAME_CHARS)
        excerpt = f"{name}, line {piece.line}:\n{fenced(piece.text, 'cpp', PIECE_CHARS)}"
        size = count_tokens(excerpt)
        if size <= left:
            chosen.append(excerpt)
            left -= size
    return chosen
