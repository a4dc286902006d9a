"""PyTorch's launches played again and again on a GPU: a function called from Python, or captured in a CUDA graph."""

import gc
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from cuda_l2.machine.cuda.driver import Replays

Function = Callable[..., tuple[torch.Tensor, ...]]


class Played(Replays):
    """Launches on windows, one after the other."""

    @property
    @abstractmethod
    def results(self) -> tuple[torch.Tensor, ...]:
        """The last launch's, in the order of the task's outputs."""


class Calls(Played):
    """Calls of a function from Python."""

    def __init__(
        self, stream: torch.cuda.Stream, function: Function, given: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        super().__init__(stream.cuda_stream)
        self._on, self._function, self._given = stream, function, given
        self._results: tuple[torch.Tensor, ...] = ()

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        return self._results

    def replay(self) -> None:
        with torch.cuda.stream(self._on):
            for tensors in self._given:
                self._results = ()
                self._results = self._function(**tensors)


class Captured(Calls):
    """A CUDA graph of the calls; what they allocate lies in a pool of its own."""

    def __init__(
        self, stream: torch.cuda.Stream, function: Function, given: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        super().__init__(stream, function, given)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            function(**given[0])  # what a library sets up on first use is not captured
            stream.synchronize()
            gc.collect()  # as torch does: what is freed while a stream is captured may end the capture
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for tensors in given:
                    self._results = ()
                    self._results = function(**tensors)
            finally:
                self._graph.capture_end()

    def replay(self) -> None:
        with torch.cuda.stream(self._on):
            self._graph.replay()

    def destroy(self) -> None:
        super().destroy()
        self._results = ()
        self._graph.reset()
