"""Adam (Kingma and Ba, 2015). torch's own loads torch's compiler first, which takes seconds of a short search."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

DECAYS, EPSILON = (0.9, 0.999), 1e-8


class Adam:
    """Steps along the gradients of a network, without weight decay."""

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        self._parameters, self._rate, self._steps = list(network.parameters()), learning_rate, 0
        self._moments = [[torch.zeros_like(each) for each in self._parameters] for _ in DECAYS]

    @torch.no_grad()
    def step(self) -> None:
        self._steps += 1
        first_share, second_share = (1 - decay**self._steps for decay in DECAYS)
        for parameter, first, second in zip(self._parameters, *self._moments, strict=True):
            if parameter.grad is not None:
                first.lerp_(parameter.grad, 1 - DECAYS[0])
                second.lerp_(parameter.grad.square(), 1 - DECAYS[1])
                parameter -= self._rate / first_share * first / ((second / second_share).sqrt() + EPSILON)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """KeyError, ValueError or RuntimeError where it is of another network. Takes torch's Adam's and AdamW's too."""
        if "param_groups" in state:
            each = [state["state"][number] for number in range(len(self._parameters))]
            moments = [[one[name] for one in each] for name in ("exp_avg", "exp_avg_sq")]
            state = {"steps": int(each[0]["step"]), "moments": moments}
        for kept, own in zip(state["moments"], self._moments, strict=True):
            for before, moment in zip(kept, own, strict=True):
                moment.copy_(before)
        self._steps = state["steps"]
