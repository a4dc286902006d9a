"""Machine instructions as text, by nvdisasm.

nvdisasm takes 0.2 to 0.4 s to start, longer than a small kernel takes to compile, and 10 microseconds a word after
that. So it gets the distinct words of many kernels at once, as a raw binary; what a rule asks of a word (opcode,
modifiers, registers, constants) does not depend on where the word stands.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from cuda_l2.system import sandbox, scratch

WORD_BYTES = 16
TIMEOUT_S = 600.0
LIMITS = sandbox.Limits(memory_bytes=4 << 30, cpu_seconds=60, file_bytes=1 << 30)
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;", re.MULTILINE)


class SassError(Exception):
    """nvdisasm could not read the words."""


def disassemble(words: Iterable[bytes], arch: str, nvdisasm: Path) -> dict[bytes, str]:
    """The text of each machine instruction of `arch`, as in sm_90a; SassError where one cannot be read."""
    distinct = list(dict.fromkeys(words))
    if any(len(word) != WORD_BYTES for word in distinct):
        raise SassError("the machine code ends inside an instruction")
    # raw words are no program: no flow of control to follow
    command = [str(nvdisasm), "--no-dataflow", "--binary", arch.replace("sm_", "SM"), "words"]
    shell = ["/bin/sh", "-c", 'exec "$@" > text', "sh", *command]
    reads = [] if str(nvdisasm).startswith("/usr/") else [nvdisasm.parent]
    with scratch.writing(), scratch.folder() as work:
        (work / "words").write_bytes(b"".join(distinct))
        done = sandbox.run(sandbox.wrap(shell, work, LIMITS, reads=reads), TIMEOUT_S, cwd=work)
        if done.status != 0:
            raise SassError(f"nvdisasm: {(done.output.strip().splitlines() or ['no answer'])[0][:200]}")
        lines = _LINE.findall((work / "text").read_text())
    if [int(offset, 16) for offset, _ in lines] != list(range(0, WORD_BYTES * len(distinct), WORD_BYTES)):
        raise SassError(f"nvdisasm read {len(lines)} of {len(distinct)} instructions")
    return dict(zip(distinct, (text for _, text in lines), strict=True))
