"""The algorithms that autotuning chose, for many shapes in one file: chosen in one run, met by the next, elsewhere too.

Gzipped JSON lines: first the machine and the library they hold for, then one product a line. In between they live one
file a product in the cache.
"""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from cuda_l2.errors import UserError
from cuda_l2.measure.tuned import Tuned, recall, store
from cuda_l2.records import Gemm, from_json, to_json

KIND = "cuda-l2 cublaslt choices"
Place = Callable[[Gemm, str], Path]
"""Where the cache keeps the choice for a product, by the method it was made with."""


def unpack(path: Path, machine: str, place: Place) -> int:
    """Put a file's choices into the cache, unless something is there already; how many it held.

    UserError where it is no such file, or another machine's.
    """
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        header = json.loads(lines[0])
        if header["kind"] != KIND:
            raise ValueError("another kind of file")
        found = [from_json(Tuned, line) for line in lines[1:]]
    except (OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"{path} holds no choices of `cuda-l2 bench --choices`: {error!r}") from None
    if header["machine"] != machine:
        raise UserError(f"{path} holds choices for {header['machine']}, not for {machine}: choose another file")
    for tuned in found:
        target = place(Gemm(tuned.m, tuned.n, tuned.k, accumulate=tuned.accumulate), tuned.method)
        if not target.exists():
            store(target, tuned)
    return len(found)


def pack(path: Path, machine: str, place: Place, gemms: Iterable[Gemm], method: str) -> int:
    """Write what the cache holds for these products to a file, in place of what was there; how many those are."""
    found = [tuned for gemm in gemms if (tuned := recall(place(gemm, method), gemm, method))]
    text = "\n".join([json.dumps({"kind": KIND, "machine": machine}), *map(to_json, found)])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.new")
        partial.write_bytes(gzip.compress(text.encode() + b"\n", mtime=0))
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return len(found)
