"""The schedule space of gpu_rows.cu: threads, blocks and clusters a row, where a row stays, vectors in flight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cuda_l2.families import _gpu_task as gpu
from cuda_l2.families._base import Choice, Schedule, cdiv
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

LANES = Choice("LANES", (8, 16, 32, 64, 128, 256, 512, 1024), "threads a row in a block")
CLUSTER = Choice("CLUSTER", (1, 2, 4, 8), "blocks a row, from Hopper on")
KEEP = Choice("KEEP", (0, 1, 2), "where a row stays until it is mapped: 0 is read again, 1 registers, 2 shared memory")
ITEMS = Choice("ITEMS", (1, 2, 3, 4, 6, 8, 12, 16), "vectors that a thread loads at once; all of its row with KEEP 1")
ROWS = Choice("ROWS", (1, 2, 4, 8, 16, 32), "rows a block")
AGAIN, REGISTERS, SHARED = 0, 1, 2
LEAST_CLUSTER_BYTES = 1 << 14
"""Least bytes of a row that several blocks share."""
MANY_BLOCKS = 8
"""A multiprocessor, beyond which a fence in each costs more than a second gpu.launch."""
MATRIX, COLUMN = "rows columns", "columns"
IMAGES, GROUPS = "batch channels height width", "batch groups*channels height width"


@dataclass(frozen=True, slots=True)
class Rowwise(gpu.Computed):
    """roles: what each of the task's tensors is to the source, in its order: x y z g h n out more row index total."""

    roles: str = "x out"
    rows: str = "rows"
    columns: str = "columns"
    period: str = "1"
    plane: str = "1"
    own_sizes: tuple[str, ...] = ()  # of the task's, that expressions use

    @property
    def matrices(self) -> int:
        return len({"x", "y", "z"} & set(self.roles.split()))

    @property
    def mapped(self) -> bool:
        """Whether rows are read a second time."""
        return "out" in self.roles.split()

    @property
    def total(self) -> bool:
        """Whether the rows' numbers are added up."""
        return "total" in self.roles.split()


def _of(number: int, roles: str, shapes: str, *, quick: bool = False, columns: str = "columns") -> Rowwise:
    """shapes: M a matrix, C a number a column, R a number a row, K one in a matrix of one column, 1 a single one."""
    known = {"M": f"rows {columns}", "C": columns, "R": "rows", "K": "rows 1", "1": ""}
    return Rowwise(number, tuple(known[letter] for letter in shapes), quick, roles, columns=columns)


class GpuRows(gpu.GpuTaskFamily):
    """Softmaxes, norms, reductions, losses and choices by rows."""

    name = "gpu_rows"
    choices = (gpu.VEC, LANES, CLUSTER, KEEP, ITEMS, ROWS, gpu.TAIL, gpu.LOAD, gpu.STORE, gpu.QUICK)
    table: ClassVar[Mapping[str, Rowwise]] = {
        "softmax": _of(0, "x out", "MM", quick=True),
        "log_softmax": _of(1, "x out", "MM", quick=True),
        "logsumexp": _of(2, "x row", "MR", quick=True),
        "layer_norm": _of(3, "x g h out", "MCCM"),
        "rms_norm": _of(4, "x g out", "MCM"),
        "residual_rms_norm": _of(5, "x y g out more", "MMCMM"),
        "normalise_rows": _of(6, "x out", "MM"),
        "sum_rows": _of(7, "x row", "MR"),
        "variance_rows": _of(8, "x row", "MR"),
        "l2_norm_rows": _of(9, "x row", "MR"),
        "max_rows": _of(10, "x row index", "MRR"),
        "count_positive": _of(11, "x row", "MR"),
        "temperature_softmax": _of(12, "x n out", "MRM", quick=True, columns="vocabulary"),
        "greedy_token": _of(13, "x index", "MR", columns="vocabulary"),
        "gumbel_sampling": _of(14, "x y index", "MMR", columns="vocabulary"),
        "min_p_filter": _of(15, "x out", "MM", columns="vocabulary"),
        "cross_entropy": _of(16, "x n total", "MR1", quick=True, columns="classes"),
        "cross_entropy_smoothed": _of(17, "x n row", "MRR", quick=True, columns="classes"),
        "cross_entropy_gradient": _of(18, "x n out", "MRM", quick=True, columns="classes"),
        "kl_divergence": _of(19, "x y total", "MM1", quick=True),
        "cosine_distance": _of(20, "x y row", "MMR"),
        "gaussian_likelihood": _of(21, "x y z row", "MMMR"),
        "triplet_margin": _of(22, "x y z total", "MMM1"),
        "dice": _of(23, "x y row", "MMR", quick=True),
        "clip_gradient_adaptive": _of(24, "x y out", "MMM"),
        "quantise_int8": _of(25, "x out row", "MMK"),
        "instance_norm": Rowwise(26, (IMAGES, IMAGES), rows="batch * channels", columns="height * width"),
        "global_average_pool": Rowwise(
            27, (IMAGES, "batch channels"), roles="x row", rows="batch * channels", columns="height * width"
        ),
        "matvec": Rowwise(28, (MATRIX, COLUMN, "rows"), roles="x g row"),
        "embedding_position_norm": Rowwise(
            29,
            ("batch length", "vocabulary columns", "length columns", COLUMN, COLUMN, "batch length columns"),
            roles="n x y g h out",
            rows="batch * length",
            period="length",
        ),
        "embedding_similarity": Rowwise(
            30,
            ("batch length", "batch columns", "vocabulary columns", "batch length"),
            roles="n y x row",
            rows="batch * length",
            period="length",
        ),
        "embedding": Rowwise(
            31, ("batch length", "vocabulary columns", "batch length columns"), roles="n x out", rows="batch * length"
        ),
        "group_norm": Rowwise(
            32,
            (GROUPS, "groups*channels", "groups*channels", GROUPS),
            roles="x g h out",
            rows="batch * groups",
            columns="channels * height * width",
            period="groups",
            plane="height * width",
            own_sizes=("groups", "channels"),
        ),
    }

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        row, (rows, columns) = self.table[task.name], self.extent(task)
        vectors = columns // choice["VEC"]
        bytes_a_vector = choice["VEC"] * gpu.element_bytes(task)
        match name:
            case "VEC":
                whole = columns if task.name != "group_norm" else math.prod(task.inputs[0].shape[2:])
                return value <= gpu.widest(task) and whole % value == 0
            case "LANES":
                return value == LANES.values[0] or value < 2 * vectors
            case "CLUSTER":
                enough = vectors >= value * choice["LANES"] and columns * gpu.element_bytes(task) >= LEAST_CLUSTER_BYTES
                return value == 1 or (target.capability >= (9, 0) and choice["LANES"] >= 128 and enough)
            case "KEEP":
                if value == REGISTERS:
                    return row.mapped and self._held(choice, task) > 0
                least = {**choice, "ROWS": max(1, 32 // choice["LANES"])}
                fits = bytes_a_vector >= 4 and self._shared_bytes(least, task) <= _shared_limit(target)
                return value == AGAIN or (row.mapped and fits)
            case "ITEMS":
                if choice["KEEP"] == REGISTERS:
                    return value == self._held(choice, task)
                registers = value * bytes_a_vector * row.matrices // 4
                room = min(32, 16384 // choice["LANES"])
                useful = value * choice["LANES"] * choice["CLUSTER"] < 2 * vectors
                return value == 1 or (value in (2, 4, 8) and registers <= room and useful)
            case "ROWS":
                return self._fits_rows(value, choice, task, target, rows)
            case "TAIL":
                return not value or row.total
        return True

    def extent(self, task: Operation) -> tuple[int, int]:
        """Rows and columns that the source sees."""
        row = self.table[task.name]
        role = row.roles.split().index("x")
        x = (*task.inputs, *task.weights)[role]
        match task.name:
            case "embedding" | "embedding_position_norm" | "embedding_similarity":
                return task.inputs[0].elements, x.shape[-1]
            case "group_norm":
                rows = x.shape[0] * dict(task.sizes)["groups"]
                return rows, x.elements // rows
            case "instance_norm" | "global_average_pool":
                return x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]
        return x.shape[0], x.shape[1]

    def _held(self, choice: dict[str, int], task: Operation) -> int:
        """The value of ITEMS with which a row stays in registers; 0 where it does not fit."""
        vectors = self.extent(task)[1] // choice["VEC"]
        registers = choice["VEC"] * gpu.element_bytes(task) * self.table[task.name].matrices / 4
        room = min(96, 65536 // choice["LANES"] - 48)
        for items in ITEMS.values:
            if items * choice["LANES"] * choice["CLUSTER"] >= vectors:
                return items if items * registers <= room else 0
        return 0

    def _fits_rows(self, value: int, choice: dict[str, int], task: Operation, target: CudaTarget, rows: int) -> bool:
        lanes, least = choice["LANES"], max(1, 32 // choice["LANES"])
        if value <= least:
            return value == least
        threads = lanes * value
        if choice["CLUSTER"] > 1 or threads > 1024 or value >= 2 * rows:
            return False
        held = choice["ITEMS"] * choice["VEC"] * gpu.element_bytes(task) * self.table[task.name].matrices // 4
        if choice["KEEP"] == SHARED:
            return self._shared_bytes(choice, task) <= _shared_limit(target)
        return held + 48 <= 65536 // threads

    def _shared_bytes(self, choice: dict[str, int], task: Operation) -> int:
        """Dynamic shared memory with KEEP 2."""
        vectors = self.extent(task)[1] // choice["VEC"]
        a_thread = cdiv(vectors, choice["LANES"] * choice["CLUSTER"]) * self.table[task.name].matrices
        return a_thread * choice["LANES"] * choice["ROWS"] * choice["VEC"] * gpu.element_bytes(task)

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        row, (rows, columns) = self.table[task.name], self.extent(task)
        vec = gpu.widest(task)
        while not self.fits_work("VEC", vec, {"VEC": vec}, task, target):
            vec //= 2
        vectors = columns // vec
        lanes = 8
        while lanes < min(512, vectors / (8 // row.matrices if row.mapped else 16)) or (lanes < 32 and lanes < vectors):
            lanes *= 2
        choice = {"VEC": vec, "LANES": lanes, "CLUSTER": 1}
        if row.mapped and not 0 < self._held(choice, task) <= 8:  # with more, no second block loads meanwhile
            if target.capability >= (9, 0):
                clusters = [{**choice, "CLUSTER": blocks} for blocks in CLUSTER.values]
                choice = next((other for other in clusters if 0 < self._held(other, task) <= 8), choice)
            else:
                choice["LANES"] = LANES.values[-1]
        many = cdiv(rows, max(1, 128 // lanes)) > MANY_BLOCKS * target.sms
        return {**choice, "KEEP": REGISTERS, "ITEMS": 4, "ROWS": max(1, 128 // lanes), "TAIL": int(not many)}

    def contract(self, schedule: Schedule) -> str:
        task, choice, target = schedule.task, schedule.named, schedule.target
        row, cluster = self.table[task.name], choice["CLUSTER"]
        assert isinstance(target, CudaTarget)
        tensors = (*task.inputs, *task.weights, *task.outputs)
        role = {role: tensor.name for role, tensor in zip(row.roles.split(), tensors, strict=True)}
        stride = choice["LANES"] * cluster
        whole = row.columns if row.plane == "1" else row.plane
        rules = {"whole_vectors": f"0 - ({whole}) % {choice['VEC']}"}
        shared = "0"
        if choice["KEEP"] == REGISTERS:
            rules["row_fits"] = f"{choice['ITEMS'] * stride * choice['VEC']} - {row.columns}"
        if choice["KEEP"] == SHARED:
            a_round = stride // cluster * choice["ROWS"] * choice["VEC"] * gpu.element_bytes(task) * row.matrices
            shared = f"cdiv({row.columns}, {stride * choice['VEC']}) * {a_round}"
            rules["row_fits"] = f"{_shared_limit(target)} - {shared}"
        lines = [*gpu.head(rules, target.arch if cluster > 1 else "sm_80", row.own_sizes), *self.buffers(task)]
        if row.total:
            lines += gpu.workspace("of_rows", f"4 * {row.rows}")
        if choice["TAIL"]:
            lines += gpu.workspace("ended", "4", persistent=True)
        sizes = [f'int32 = "{size}"' for size in (row.rows, row.columns, row.period, row.plane)]
        of_rows = "of_rows" if row.total else role.get("row", role["x"])
        names = [role.get(name, role["x"]) for name in ("x", "y", "z", "g", "h", "n", "out", "more")]
        ended = "ended" if choice["TAIL"] else role["x"]
        args = [*names, of_rows, role.get("index", role["x"]), ended, role.get("total", role["x"]), *sizes]
        blocks = f"cdiv({row.rows}, {choice['ROWS']}) * {cluster}"
        lines += gpu.launch("by_rows", [blocks], choice["LANES"] * choice["ROWS"], args, shared, cluster)
        if row.total and not choice["TAIL"]:
            lines += gpu.launch("add_up", [1], 1024, ["of_rows", role["total"], sizes[0]])
        return "\n".join(lines)


def _shared_limit(target: CudaTarget) -> int:
    return target.shared_bytes - gpu.SPARE_SHARED_BYTES


FAMILY = GpuRows()
