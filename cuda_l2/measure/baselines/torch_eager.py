"""PyTorch's eager mode on a task of our own: called from Python, and in a CUDA graph of ours."""

from cuda_l2.measure.baselines._base import Function, TorchTask
from cuda_l2.records import Operation


class Eager(TorchTask):
    def bind(self, task: Operation) -> Function:
        from cuda_l2.tasks._base import definition  # noqa: PLC0415 - loads torch

        return definition(task.name).bind(dict(task.sizes))


EAGER = Eager("torch eager", 150)
EAGER_GRAPH = TorchTask("torch eager in a CUDA graph", 120, targets=("cuda",), graph_of=EAGER)
BASELINES = (EAGER, EAGER_GRAPH)
