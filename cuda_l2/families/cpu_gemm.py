"""The schedule space of cpu_gemm.c: register tile, cache blocks, widening, unrolling, prefetch, threads."""

from cuda_l2.families._base import Choice, Family, Schedule, element
from cuda_l2.families._cpu_task import THREADS, VECTOR_BITS
from cuda_l2.machine._base import Target
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.records import Gemm, Layout

CHOICES = (
    VECTOR_BITS,
    THREADS,
    Choice("SWAP", (0, 1), "1 computes C^T = B^T A^T, so that B feeds the broadcasts"),
    Choice("SPLIT_COLUMNS", (0, 1), "threads share rows (0) or columns (1)"),
    Choice("NV", (1, 2, 3, 4), "vectors in a row of the register tile"),
    Choice("MR", (1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14), "rows of the register tile"),
    Choice("KC", (128, 192, 256, 384, 512, 768, 1024, 2048), "K steps a cache block"),
    Choice("NC", (32, 64, 96, 128, 192, 256, 384, 512, 1024), "columns a cache block"),
    Choice(
        "WIDEN",
        (0, 1, 2, 3),
        "elements widened in registers from the source, when packed, or from packed elements; 3: pairs of bf16",
    ),
    Choice("UNROLL", (1, 2, 4, 8), "K steps in one trip of the inner loop"),
    Choice("PREFETCH", (0, 4, 8, 16, 32), "K steps ahead that panel loads are prefetched"),
    Choice("PREFETCH_X", (0, 1), "1 fetches the next X tile's source while this one is multiplied"),
)
REGISTERS = {512: 32, 256: 16, 128: 16}
X_PADDING = 16  # XPAD of the source
WIDE_BLOCK_CACHE = 1 << 20  # a block of 512 x 256 floats is to take half of the second level
PAIRS = 3
MAX_TILE_BYTES = 1 << 17  # of X; beyond this the first two cache levels hold nothing else


class CpuGemm(Family):
    """Goto-style blocked matmul in C with vector extensions."""

    name = "cpu_gemm"
    suffix = ".c"
    choices = CHOICES

    def serves(self, gemm: Gemm, target: Target) -> bool:
        return isinstance(target, CpuTarget)

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CpuTarget) -> bool:
        """Whether a value is worth compiling after the ones chosen; each choice always has one that is."""
        match name:
            case "VECTOR_BITS":
                return (
                    target.vector_bits // 2 <= value <= target.vector_bits if value > 128 else target.vector_bits == 128
                )
            case "THREADS":
                return value <= target.cores
            case "SPLIT_COLUMNS":
                return not value or chosen["THREADS"] > 1
            case "NV":
                columns = gemm.m if chosen["SWAP"] else gemm.n
                vector = chosen["VECTOR_BITS"] // 32
                return value == 1 or (value - 1) * vector < columns
            case "MR":
                rows = gemm.n if chosen["SWAP"] else gemm.m
                # accumulators, one row of Y and one broadcast must stay in registers
                registers = 32 if target.vector_bits == 512 else REGISTERS[chosen["VECTOR_BITS"]]
                fits = value * chosen["NV"] + chosen["NV"] + 1 <= registers
                return value == 1 or (fits and value < 2 * rows)
            case "KC":
                return value == 128 or (value < 2 * gemm.k and 4 * value * chosen["MR"] <= MAX_TILE_BYTES)
            case "NC":
                columns = gemm.m if chosen["SWAP"] else gemm.n
                return value == 32 or (
                    value < 2 * columns and 4 * value * chosen["KC"] <= 4 * max(target.cache_bytes[1], 1 << 18)
                )
            case "WIDEN":
                if value == PAIRS:
                    return chosen["VECTOR_BITS"] == 512 and target.multiplies_pairs(gemm.dtype)
                # in place only where the columns of Y lie next to each other
                return value != 0 or (not chosen["SWAP"] and gemm.layout is Layout.NN)
            case "PREFETCH":
                return value < 32 or chosen["KC"] >= 256
        return True

    def default(self, gemm: Gemm, target: CpuTarget) -> tuple[int, ...]:
        return self.nearest(self._wanted(gemm, target), gemm, target)

    def defaults(self, gemm: Gemm, target: CpuTarget) -> list[tuple[int, ...]]:
        """The default, then threads that share columns, where each gets a panel, with a wide and low register tile.

        Each thread then packs a part of Y alone, and X, which all widen, is read in long runs.
        """
        wanted = self._wanted(gemm, target)
        vectors = 4 if target.vector_bits == 512 else 2
        columns = gemm.m if wanted["SWAP"] else gemm.n
        panels = columns // (vectors * target.vector_bits // 32)
        wanted |= {"SPLIT_COLUMNS": int(panels >= target.cores), "NV": vectors, "MR": 6, "PREFETCH": 4}
        return list(dict.fromkeys([self.default(gemm, target), self.nearest(wanted, gemm, target)]))

    def _wanted(self, gemm: Gemm, target: CpuTarget) -> dict[str, int]:
        wide = target.vector_bits == 512
        return {
            "VECTOR_BITS": target.vector_bits,
            "THREADS": target.cores,
            "SWAP": int(gemm.layout is Layout.TN and gemm.n > gemm.m),
            "SPLIT_COLUMNS": 0,
            "NV": 2,
            "MR": 12 if wide else 6,
            "KC": 512,
            "NC": 256 if (target.cache_bytes[1] or WIDE_BLOCK_CACHE) >= WIDE_BLOCK_CACHE else 128,
            "WIDEN": PAIRS if target.multiplies_pairs(gemm.dtype) else 1,
            "UNROLL": 1,
            "PREFETCH": 0,
            "PREFETCH_X": int(gemm.k * max(gemm.m, gemm.n) > 1 << 22),
        }

    def macros(self, schedule: Schedule) -> dict[str, int]:
        return {
            "BF16": int(schedule.task.dtype == "bfloat16"),
            "LAYOUT_TN": int(schedule.task.layout is Layout.TN),
            "XPAD": X_PADDING,
        }

    def contract(self, schedule: Schedule) -> str:
        choice = schedule.named
        swap, kc, mr, threads = choice["SWAP"], choice["KC"], choice["MR"], choice["THREADS"]
        vector = choice["VECTOR_BITS"] // 32
        columns = choice["NV"] * vector
        columns *= -(-choice["NC"] // columns)  # NC rounded up to whole panels
        rows = "n" if swap else "m"
        tiles = f"cdiv({rows}, {mr})" if choice["SPLIT_COLUMNS"] else f"cdiv(cdiv({rows}, {mr}), {threads})"
        panel_bytes = kc * columns * (4 if choice["WIDEN"] == 1 else 2)
        stored_k_major = swap and schedule.task.layout is Layout.NN
        steps = kc // 2 if choice["WIDEN"] == PAIRS else kc
        tile_bytes = 4 * (steps * (-(-mr // vector) * vector) if stored_k_major else mr * (steps + X_PADDING))
        partial = f"min(1, cdiv(max(k, {kc}) - {kc}, {kc})) * {tiles} * {mr * columns * 4}"
        task = f"cdiv({panel_bytes + tile_bytes} + {partial}, 4096) * 4096"
        lines = ['target = "cpu"', *element(schedule.task), 'entry = "gemm"', f"threads = {threads}"]
        return "\n".join([*lines, f'workspace = "{threads} * ({task})"'])


FAMILY = CpuGemm()
