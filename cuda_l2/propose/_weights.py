"""A trained schedule policy as a file: the network's weights, and the spaces and tasks that they are for."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from cuda_l2.families._base import Family, all_families
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.propose._base import FamilySpace, UnionSpace, space_for
from cuda_l2.records import Gemm, Task
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_bytes
from cuda_l2.worlds.world import space_of, space_version

FORMAT = "cuda-l2 schedule policy 3"
FILE = "policy.safetensors"
SHIPPED = Path(__file__).with_name("hopper.safetensors")
"""Weights of the package, trained on results/h100/world and results/h200/world (docs/policy-card.md)."""
LARGEST = 1 << 32
"""M N K of the largest products that they serve: beyond, the families' own models sort better (docs/learning.md)."""


@dataclass(frozen=True)
class Weights:
    """A network's weights for the schedules of these families."""

    families: tuple[Family, ...]
    state: dict[str, torch.Tensor]
    tasks: tuple[str, ...]  # that it learnt from
    machines: tuple[str, ...]
    exemplars: int  # in a question
    scores: bool  # whether exemplars come with their scores
    settings: dict[str, Any] = field(default_factory=dict)  # of the training

    @cached_property
    def fingerprint(self) -> str:
        """A short name of the weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state.items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:8]

    def space(self, task: Task, target: Target) -> FamilySpace | UnionSpace:
        """The space in which the network writes; UserError where none of its families serves the task."""
        if not any(family.products is task.product and family.serves(task, target) for family in self.families):
            names = ", ".join(family.name for family in self.families)
            raise UserError(f"the weights are of {names}, and none of them serves {task} here; leave --weights out")
        return space_for(self.families, task, target)

    def suit(self, task: Task, families: Sequence[Family], target: Target) -> bool:
        """Whether they know these families' schedules and products as large as the task, and learnt from a GPU of the
        target's architecture.
        """
        learnt = {machine.split(":")[2] for machine in self.machines if machine.startswith("cuda:")}
        known = isinstance(task, Gemm) and task.m * task.n * task.k <= LARGEST and set(families) <= set(self.families)
        return known and isinstance(target, CudaTarget) and target.arch in learnt

    def save(self, path: Path) -> None:
        """Write the file whole; UserError where it cannot be."""
        head = {
            "format": FORMAT,
            "families": {family.name: space_version(space_of(family)) for family in self.families},
            "tasks": self.tasks,
            "machines": self.machines,
            "exemplars": self.exemplars,
            "scores": self.scores,
            "settings": self.settings,
        }
        data = safetensors.torch.save(self.state, metadata={"cuda-l2": json.dumps(head)})
        write_bytes(path, data)


@functools.cache
def shipped() -> Weights | None:
    """The weights of the package; None where a family's choices have changed since."""
    with contextlib.suppress(UserError):
        return load(SHIPPED)
    return None


def load(path: Path) -> Weights:
    """Read weights: a file, or a folder that holds one. UserError where it is none, or of another schedule space."""
    path = path / FILE if path.is_dir() else path
    try:
        with safetensors.safe_open(str(path), "pt") as file:
            head = json.loads(file.metadata()["cuda-l2"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        families = tuple(family for family in all_families() if family.name in head["families"])
        before, form = head["families"], head["format"]
        details = tuple(head["tasks"]), tuple(head["machines"]), head["exemplars"], head["scores"], head["settings"]
    except FileNotFoundError:
        raise UserError(f"there are no weights at {path}; `cuda-l2 train --stage schedule` makes them") from None
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no weights of a schedule policy, or is damaged: {error}") from None
    now = {family.name: space_version(space_of(family)) for family in families}
    if form != FORMAT or now != before:
        changed = sorted(name for name in before if now.get(name) != before[name])
        raise UserError(
            f"{path} is of another version of {', '.join(changed) or 'the policy'}: train it again from a world of this"
            " version"
        )
    return Weights(families, state, *details)
