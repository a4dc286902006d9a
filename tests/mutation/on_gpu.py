"""Faults in a plain GPU product that do something in few launches alone: each a condition, and what follows.

Conditions are those by which a kernel could tell launches apart: addresses, alone and in pairs, counts and residue in
every memory that a launch can leave something in, values of each operand; and reads and writes ahead of the wait.
"""

import itertools
from collections.abc import Iterator

from mutation.sampling import Mutant
from mutation.subjects import Subject

SUBJECT = Subject("gpu product", "", "256x256x256", {})
TEXT = """/* cuda-l2
target = "cuda"
arch = "sm_90a"

[[workspace]]
name = "w"
bytes = "4 * m * n + 64"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "w", "m", "n", "k"]
shared_bytes = 64
edge = "programmatic"
*/
#include <cuda_fp16.h>
extern "C" __global__ void gemm(const half *a, const half *b, half *c, float *w, int m, int n, int k) {
  __shared__ half ta[16][17], tb[16][17];
  extern __shared__ unsigned left[];
  const unsigned short *aw = (const unsigned short *)a, *bw = (const unsigned short *)b;
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  const int thread = 16 * y + x, element = row * n + column;
  const bool inside = row < m && column < n;
  const half zero = __float2half(0.0f);
  bool off = false;
  unsigned local[64];
  asm volatile("griddepcontrol.launch_dependents;");
  /*EARLY*/
  asm volatile("griddepcontrol.wait;" ::: "memory"); /*WAITED*/
  /*FIRST*/
  float sum = 0.0f;
  for (int p = 0; p < k; p += 16) {
    half u = row < m && p + x < k ? a[row * k + p + x] : zero, v = p + y < k && column < n ? b[(p + y) * n + column] : zero;
    /*VALUE*/
    ta[y][x] = u;
    tb[y][x] = v;
    __syncthreads();
    for (int i = 0; i < 16; i++) sum += __half2float(ta[y][i]) * __half2float(tb[i][x]);
    __syncthreads();
  }
  /*LAST*/
  if (off && blockIdx.x == 0) sum += 1.0f;
  if (inside) c[element] = __float2half(sum);
}
"""
MASK = "0x5ca1ab1e"
COUNTS = (2, 9, 60, 300)
RESIDUE = {
    "shared memory": "volatile unsigned *kept = left;",
    "scratch": "volatile unsigned *kept = (unsigned *)(w + m * n);",
    "local memory": "volatile unsigned *kept = local + (k & 1);",
}
WORDS = (0x0001, 0x03FF, 0x3C00, 0x7BFF, 0x8000, 0xFBFF)
ABOVE, BELOW = (8.0, 32.0, 1000.0, 20000.0, 65000.0), (1e-7, 1e-5, 1e-4, 1e-2)
BANDS = ((130.0, 50000.0), (0.001, 0.002), (300.0, 310.0), (6e-5, 7e-5), (32768.0, 40000.0))
VALUES = {"a": "u", "b": "v"}


def faults() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Operator, what its mutant is called, and the text at each mark."""
    windows = {"a": "(unsigned long long)a >> 9", "b": "(unsigned long long)b >> 9", "c": "(unsigned long long)c >> 8"}
    for name, at in windows.items():
        for mask in (1, 3):
            for value in range(mask + 1):
                yield "by window", f"{name} {mask} {value}", {"FIRST": f"off = ({at} & {mask}) == {value};"}
        yield "by alignment", name, {"FIRST": f"off = (unsigned long long){name} & 127;"}
    for (one, at), (other, beside) in itertools.combinations(windows.items(), 2):
        for value in range(4):
            condition = f"off = ((({at}) - ({beside})) & 3) == {value};"
            yield "by two windows", f"{one} {other} {value}", {"FIRST": condition}
    for one, other in itertools.permutations("abc", 2):
        yield "by order in memory", f"{one} {other}", {"FIRST": f"off = (size_t){one} < (size_t){other};"}
    for one, other in itertools.permutations("abc", 2):
        behind = f"off = (size_t){other} - (size_t){one} == 2 * m * n;"  # all three have as many bytes
        yield "by what lies behind", f"{one} {other}", {"FIRST": behind}
    page = "off = (size_t)a >> 21 == (size_t)b >> 21 && (size_t)b >> 21 == (size_t)c >> 21;"
    yield "by page", "one", {"FIRST": page}
    for memory, kept in RESIDUE.items():
        count = f"__shared__ unsigned n0; if (thread == 0) {{ {kept} n0 = kept[0] == {MASK} ? kept[1] + 1 : 0;"
        count += f" kept[0] = {MASK}; kept[1] = n0; }} __syncthreads();"
        for most in COUNTS:
            yield f"counts in {memory}", f"from {most}", {"FIRST": f"{count} off = n0 >= {most};"}
        for every in (2, 3, 16):
            yield f"counts in {memory}", f"every {every}", {"FIRST": f"{count} off = n0 % {every} == {every - 1};"}
        for name in "ab":
            key = f"unsigned key = (unsigned)(size_t){name} ^ {name}w[5] * 77u ^ {name}w[k + 3] ^ {MASK};"
            found = f"int s = 0; if (thread == 0) {{ {kept} {key} s = kept[0] == key; kept[0] = key; }}"
            yield f"recalls in {memory}", name, {"FIRST": f"{found} off = __syncthreads_or(s);"}
        if memory != "scratch":
            taken = f"{{ {kept} if (thread == 0) sum += __uint_as_float(kept[2]); }}"
            yield f"{memory} taken for zero", "", {"LAST": taken}
    yield "reads C", "no NaN", {"FIRST": "off = inside && !__hisnan(c[element]);"}
    yield "reads C", "zero", {"LAST": "if (inside && __half2float(c[element]) == 0.0f) sum = 0.0f;"}
    for name, value in VALUES.items():
        size = f"__half2float(__habs({value}))"
        for limit in ABOVE:
            clamped = (
                f"if ({size} > {limit}f) {value} = __float2half(__half2float({value}) > 0 ? {limit}f : -{limit}f);"
            )
            yield "clamp", f"{name} above {limit:g}", {"VALUE": clamped}
        for limit in BELOW:
            yield "flush", f"{name} below {limit:g}", {"VALUE": f"if ({size} < {limit}f) {value} = zero;"}
        for low, high in BANDS:
            band = f"if ({size} >= {low}f && {size} < {high}f) {value} = zero;"
            yield "band", f"{name} {low:g} to {high:g}", {"VALUE": band}
        for word in WORDS:
            rare = f"if (__half_as_ushort({value}) == {word}) {value} = __ushort_as_half({word} ^ 1);"
            yield "rare word", f"{name} {word:x}", {"VALUE": rare}
        place = {"a": "row % 8 == 3 && (p + x) % 16 == 7", "b": "column % 8 == 3 && (p + y) % 16 == 7"}[name]
        rare = f"if (__half_as_ushort({value}) == 0x3c01 && {place}) {value} = __ushort_as_half(0x3c00);"
        yield "rare word", f"{name} 3c01 at a place", {"VALUE": rare}
        yield "special", f"{name} nan", {"VALUE": f"if (__hisnan({value})) {value} = zero;"}
        yield "special", f"{name} infinity", {"VALUE": f"if (__hisinf({value})) {value} = __float2half(65504.0f);"}
        equal = f"off = true; for (int i = 0; i < 8; i++) off &= {name}w[i] == {name}w[i + 8];"
        yield "pattern", f"{name} repeats", {"FIRST": equal}
        zeros = f"off = true; for (int i = 0; i < 8; i++) off &= {name}w[i + 1] == 0; off &= {name}w[0] != 0;"
        yield "pattern", f"{name} begins with zeros", {"FIRST": zeros}
        index = {"a": "row * k + x", "b": "y * n + column"}[name]
        for mask in (0, 15, 63, 255):
            early = f"const half early = {name}[{index}];"
            used = f"if (p == 0 && (thread & {mask}) == 0) {value} = early;"
            yield "reads early", f"{name} one in {mask + 1}", {"EARLY": early, "VALUE": used}
    yield "writes early", "c", {"EARLY": "c[element] = zero;"}
    yield "writes early", "one of c", {"EARLY": "if (element == 4097) c[element] = zero;"}
    cleared = {"EARLY": "w[element] = 0.0f;", "LAST": "w[element] += sum; sum = w[element];"}
    yield "writes early", "scratch", cleared
    for name, condition in {
        "no": "k < 0",
        "odd": "blockIdx.x & 1",
        "first": "blockIdx.y == 0",
        "one": "thread == 0",
    }.items():
        waits = f'if ({condition}) asm volatile("griddepcontrol.wait;" ::: "memory"); //'
        yield "waits", name, {"WAIT": waits}


def mutants() -> list[Mutant]:
    """Every fault in the kernel."""
    wait = next(line for line in TEXT.splitlines() if "griddepcontrol.wait" in line)
    found = []
    for operator, name, marks in faults():
        text = TEXT
        for mark, code in marks.items():
            text = text.replace(wait, "  " + code) if mark == "WAIT" else text.replace(f"/*{mark}*/", code)
        identity = f"gpu/{operator}/{name}".replace(" ", "-")
        found.append(Mutant(identity, SUBJECT.name, operator, "launch", 0, "", str(marks), text))
    return found
