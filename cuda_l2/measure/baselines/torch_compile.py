"""torch.compile on a task of our own: called from Python, in a CUDA graph of ours, and with graphs of its own."""

from typing import Any

from cuda_l2.measure.baselines._base import Function, TorchTask
from cuda_l2.measure.baselines.torch_eager import EAGER
from cuda_l2.records import Operation


class Compiled(TorchTask):
    def bind(self, task: Operation) -> Function:
        import torch  # noqa: PLC0415 - in the process that launches it

        return torch.compile(EAGER.bind(task), dynamic=False)


class ReducedOverhead(TorchTask):
    def bind(self, task: Operation) -> Function:
        import torch  # noqa: PLC0415

        compiled = torch.compile(EAGER.bind(task), dynamic=False, mode="reduce-overhead")

        def function(**tensors: Any) -> Any:
            # each call may overwrite the results of the one before, which is what a step is to torch's CUDA graphs
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return compiled(**tensors)

        return function


COMPILED = Compiled("torch.compile", 140, compiled=True)
COMPILED_GRAPH = TorchTask("torch.compile in a CUDA graph", 110, targets=("cuda",), compiled=True, graph_of=COMPILED)
REDUCED = ReducedOverhead("torch.compile reduce-overhead", 130, targets=("cuda",), compiled=True)
BASELINES = (COMPILED, COMPILED_GRAPH, REDUCED)
