"""The schedule space of gpu_images.cu: vectors, tiles, outputs a thread, caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cuda_l2.families import _gpu_task as gpu
from cuda_l2.families._base import Choice, Schedule
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

WIDE = Choice("WIDE", (8, 16, 32, 64, 128), "outputs of a block along a row, and threads")
TALL = Choice("TALL", (1, 2, 4, 8, 16, 32), "threads down a block's tile")
DOWN = Choice("DOWN", (1, 2, 4, 8, 16), "outputs below one another that a thread computes")
MAX_STATIC_BYTES = (48 << 10) - gpu.SPARE_SHARED_BYTES
PLANES = "batch channels height width"


@dataclass(frozen=True, slots=True)
class Windowed(gpu.Computed):
    """planes to channels: expressions of what the kernel is told. weights: whether the task has some."""

    window: int = 1  # rows and columns
    stride: int = 1
    planes: str = "batch * channels"
    size: tuple[str, str] = ("height", "width")
    out: tuple[str, str] = ("height", "width")
    channels: str = "channels"


class GpuImages(gpu.GpuTaskFamily):
    """Pooling and depthwise convolutions."""

    name = "gpu_images"
    choices = (gpu.VEC, WIDE, TALL, DOWN, gpu.LOAD, gpu.STORE, gpu.QUICK)
    table: ClassVar[Mapping[str, Windowed]] = {
        "max_pool2d": Windowed(
            0,
            (PLANES, "batch channels (height-1)/2+1 (width-1)/2+1"),
            window=3,
            stride=2,
            out=("(height - 1) / 2 + 1", "(width - 1) / 2 + 1"),
        ),
        "average_pool2d": Windowed(
            1, (PLANES, "batch channels height/2 width/2"), window=2, stride=2, out=("height / 2", "width / 2")
        ),
        "conv2d_depthwise": Windowed(2, (PLANES, "channels 1 5 5", PLANES), window=5),
        "causal_depthwise_conv1d": Windowed(
            3,
            ("batch channels length", "channels 1 4", "batch channels length"),
            quick=True,
            window=4,
            planes="batch",
            size=("channels", "length"),
            out=("channels", "length"),
        ),
    }

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        out_height, out_width = task.outputs[0].shape[-2:]
        match name:
            case "VEC":
                return value <= gpu.widest(task) and task.inputs[0].shape[-1] % value == 0
            case "WIDE":
                return value == WIDE.values[0] or value < 2 * out_width
            case "TALL":
                least = max(1, 32 // choice["WIDE"])
                useful = value == least or value < 2 * out_height
                return value >= least and value * choice["WIDE"] <= 1024 and useful and self._fits(choice, task)
            case "DOWN":
                return value == 1 or (value * choice["TALL"] < 2 * out_height and self._fits(choice, task))
        return True

    def _fits(self, choice: dict[str, int], task: Operation) -> bool:
        """Whether the tile fits static shared memory."""
        windowed = self.table[task.name]
        rows = choice["TALL"] * choice.get("DOWN", 1) * windowed.stride + windowed.window
        columns = choice["WIDE"] * windowed.stride + 2 * max(windowed.window, choice["VEC"])
        return 4 * rows * columns <= MAX_STATIC_BYTES

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        width = task.outputs[0].shape[-1]
        wide = 8
        while wide < min(width, 64):
            wide *= 2
        return {"VEC": gpu.widest(task), "WIDE": wide, "TALL": 256 // wide, "DOWN": 4}

    def contract(self, schedule: Schedule) -> str:
        task, choice = schedule.task, schedule.named
        windowed = self.table[task.name]
        (height, width), (out_height, out_width) = windowed.size, windowed.out
        given = [tensor.name for tensor in (*task.inputs, *task.weights)]
        lines = [*gpu.head({"whole_vectors": f"0 - {width} % {choice['VEC']}"}), *self.buffers(task)]
        sizes = [f'int32 = "{size}"' for size in (height, width, out_height, out_width, windowed.channels)]
        args = [given[0], given[-1], task.outputs[0].name, *sizes]
        down, along = choice["TALL"] * choice["DOWN"], choice["WIDE"]
        grid = [windowed.planes, f"cdiv({out_height}, {down})", f"cdiv({out_width}, {along})"]
        return "\n".join([*lines, *gpu.launch("windows", grid, choice["WIDE"] * choice["TALL"], args)])


FAMILY = GpuImages()
