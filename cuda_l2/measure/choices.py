"""The algorithms that autotuning chose, for many shapes in one file: chosen in one run, met by the next, elsewhere too.

Gzipped JSON lines: first the machine and the library they hold for, then one product a line. In between they live one
file a product in the cache.
"""

import gzip
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path

from cuda_l2.measure.tuned import Tuned, recall, store
from cuda_l2.records import Accumulate, Gemm, from_json, to_json
from cuda_l2.system.errors import UserError

KIND = "cuda-l2 cublaslt choices"
Place = Callable[[Gemm, str], Path]
"""Where the cache keeps the choice for a product, by the method it was made with."""


def unpack(path: Path, machine: str, place: Place, gemms: Collection[Gemm]) -> None:
    """Put a file's choices for these products, by any method, into the cache, unless something is there already.

    UserError where it is no such file, or another machine's.
    """
    held, lines = _read(path)
    if held != machine:
        raise UserError(f"{path} holds choices for {held}, not for {machine}: choose another file")
    wanted = frozenset(gemms)
    targets = {place(gemm, method): line for (gemm, method), line in lines.items() if gemm in wanted}
    try:
        found = {target: from_json(Tuned, line) for target, line in targets.items() if not target.exists()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _malformed(path, error) from None
    for target, tuned in found.items():
        store(target, tuned)


def pack(path: Path, machine: str, place: Place, gemms: Collection[Gemm], method: str, *, renewed: bool = True) -> int:
    """Write what the cache holds for these products to a file, which keeps what it held for others; how many it holds.

    What it held for another machine goes. renewed: whether choices were made since the file was unpacked; if not, it
    stays as it is where it has all of these products.
    """
    held, lines = _read(path) if path.exists() else ("", {})
    kept = lines if held == machine else {}
    if not renewed and all((gemm, method) in kept for gemm in gemms):
        return len(kept)
    kept |= {(gemm, method): to_json(tuned) for gemm in gemms if (tuned := recall(place(gemm, method), gemm, method))}
    text = "\n".join([json.dumps({"kind": KIND, "machine": machine}), *kept.values()])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.new")
        partial.write_bytes(gzip.compress(text.encode() + b"\n", mtime=0))
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return len(kept)


def _read(path: Path) -> tuple[str, dict[tuple[Gemm, str], str]]:
    """Whose choices a file holds, and its lines by product and method."""
    try:
        first, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        header, found = json.loads(first), {}
        if header["kind"] != KIND:
            raise ValueError("another kind of file")
        for line in lines:
            said = json.loads(line)
            gemm = Gemm(said["m"], said["n"], said["k"], accumulate=Accumulate(said["accumulate"]))
            found[gemm, str(said["method"])] = line
        return str(header["machine"]), found
    except (OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _malformed(path, error) from None


def _malformed(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} holds no choices of `cuda-l2 bench --choices`: {error!r}")
