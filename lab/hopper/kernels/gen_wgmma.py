"""Write wgmma.cuh: one wrapper a tile width, m64nNk16, fp16 operands, fp32 accumulators."""
HEAD = "// Written by gen_wgmma.py.\n#pragma once\n#include <stdint.h>\ntemplate <int N, int TRANS_B> struct Wgmma;\n"
def wrapper(n, trans_b):
    regs = n // 2
    accs = ", ".join(f"%{i}" for i in range(regs))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(regs))
    return (f"template <> struct Wgmma<{n}, {trans_b}> {{ static __device__ __forceinline__ void mma(float (&d)[{regs}], "
            f"uint64_t a, uint64_t b, int accumulate) {{ asm volatile(\"{{ .reg .pred p; setp.ne.b32 p, %{regs+2}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{accs}}}, %{regs}, %{regs+1}, p, 1, 1, 0, {trans_b}; }}\" "
            f": {outs} : \"l\"(a), \"l\"(b), \"r\"(accumulate)); }} }};\n")
WIDTHS = range(8, 257, 8)
open("wgmma.cuh", "w").write(HEAD + "".join(wrapper(n, t) for n in WIDTHS for t in (0, 1)))
