"""The algorithms that autotuning chose, for many shapes in one file: chosen in one run, met by the next, elsewhere too.

Gzipped JSON lines: first the machine and the library they hold for, then one product a line. In between they live one
file a product in the cache.
"""

import gzip
import json
from collections.abc import Callable, Collection
from pathlib import Path

from cuda_l2.measure.tuned import Tuned, recall, store
from cuda_l2.records import Accumulate, Gemm, from_json, to_json
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_bytes

KIND = "cuda-l2 cublaslt choices"
Place = Callable[[Gemm, str], Path]
"""Where the cache keeps the choice for a product, by the method it was made with."""


class Choices:
    """A file's choices for one machine; it may not be there yet.

    UserError where it is no such file, or another machine's.
    """

    def __init__(self, path: Path, machine: str) -> None:
        self.path, self.machine = path, machine
        self._lines = self._held()

    def unpack(self, target: Path, gemm: Gemm, method: str) -> None:
        """Put the choice for a product into the cache's file, unless something is there already."""
        line = self._lines.get((gemm, method))
        if line is None or target.exists():
            return
        try:
            tuned = from_json(Tuned, line)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _malformed(self.path, error) from None
        store(target, tuned)

    def pack(self, place: Place, gemms: Collection[Gemm], method: str, *, renewed: bool = True) -> int:
        """Write what the cache holds for these products, beside what was held for others; how many the file holds.

        renewed: whether choices were made since the file was read; if not, it stays as it is where it has all of these.
        """
        if not renewed and all((gemm, method) in self._lines for gemm in gemms):
            return len(self._lines)
        kept = self._lines = self._held()  # another run may have added to it
        made = {(gemm, method): recall(place(gemm, method), gemm, method) for gemm in gemms}
        kept |= {key: to_json(tuned) for key, tuned in made.items() if tuned}
        text = "\n".join([json.dumps({"kind": KIND, "machine": self.machine}), *kept.values()])
        packed = gzip.compress(text.encode() + b"\n", mtime=0)
        write_bytes(self.path, packed, "choose another file with --choices")
        return len(kept)

    def _held(self) -> dict[tuple[Gemm, str], str]:
        """The file's lines by product and method."""
        held, found = _read(self.path) if self.path.exists() else (self.machine, {})
        if held != self.machine:
            raise UserError(f"{self.path} holds choices for {held}, not for {self.machine}: choose another file")
        return found


def _read(path: Path) -> tuple[str, dict[tuple[Gemm, str], str]]:
    """Whose choices a file holds, and its lines by product and method."""
    try:
        first, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        header, found = json.loads(first), {}
        if header["kind"] != KIND:
            raise ValueError("another kind of file")
        for line in lines:
            said = json.loads(line)
            dtype = str(said.get("dtype", "float16"))
            gemm = Gemm(said["m"], said["n"], said["k"], accumulate=Accumulate(said["accumulate"]), dtype=dtype)
            found[gemm, str(said["method"])] = line
        return str(header["machine"]), found
    except (OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _malformed(path, error) from None


def _malformed(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} holds no choices of `cuda-l2 bench --choices`: {error!r}")
