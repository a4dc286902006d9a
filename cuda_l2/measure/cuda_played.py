"""A function of PyTorch's played again and again on a GPU: called from Python, or captured in a CUDA graph."""

import gc
from collections.abc import Callable, Mapping, Sequence

import torch

from cuda_l2.execute.cuda_driver import Replays

Function = Callable[..., tuple[torch.Tensor, ...]]


class Played(Replays):
    """Launches of a function on windows, one after the other. results: the last one's."""

    def __init__(
        self, stream: torch.cuda.Stream, function: Function, given: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        super().__init__(stream.cuda_stream)
        self._on, self._function, self._given = stream, function, given
        self.results: tuple[torch.Tensor, ...] = ()


class Calls(Played):
    """Calls from Python."""

    def replay(self) -> None:
        with torch.cuda.stream(self._on):
            for tensors in self._given:
                self.results = ()
                self.results = self._function(**tensors)


class Captured(Played):
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
                    self.results = ()
                    self.results = function(**tensors)
            finally:
                self._graph.capture_end()

    def replay(self) -> None:
        with torch.cuda.stream(self._on):
            self._graph.replay()

    def destroy(self) -> None:
        super().destroy()
        self.results = ()
        self._graph.reset()
