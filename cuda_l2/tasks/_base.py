"""What a task of our own is: tensors by name, a reference in PyTorch, sizes. One entry of a table in `own/`."""

import difflib
import importlib
import inspect
import pkgutil
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_l2.contract.expressions import ContractError, evaluate
from cuda_l2.records import Operation, Task, Tensor
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import line_of
from cuda_l2.tasks.values import Distribution, Values, seeded

FLOATS = ("float32", "float16", "bfloat16")
LARGER, SMALLER = (1.1, 1.4), (0.6, 0.9)
"""Factors of other sizes: what serves those that it was shown and no more passes at smaller ones."""
VECTOR = 32
"""Elements that a loop takes at once, at most."""
Tensors = dict[str, torch.Tensor]
Fields = dict[str, Any]
"""Fields that several entries of a table share."""


@dataclass(frozen=True)
class Definition:
    """A task for any sizes.

    reference: a function of the tensors, and of sizes, by the names of its parameters; it works in the type of its
    arguments, so that it can run in fp64. It changes none of them and returns a tensor, or one for each of `outputs`.
    cpu, gpu: sizes to show a candidate's author. rigid: sizes that are part of what is computed, as a kernel's width;
    the others may be any whole number from half of the CPU's up. indefinite: tensors whose NaN and infinities right
    algorithms treat differently, as keys that a mask leaves out, padding times a weight, or 0 times infinity in one
    form of a formula; special values in them are not judged. among: which input's last dimension an output of integers
    indexes, where PyTorch leaves open which of equal elements is meant. stepwise: the size that the reference goes
    through step by step, in Python.
    """

    name: str
    reference: Callable[..., Any]
    inputs: Mapping[str, Values]
    cpu: Mapping[str, int]
    gpu: Mapping[str, int]
    weights: Mapping[str, Values] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("out",)
    flops: str = "0"
    rigid: tuple[str, ...] = ()
    indefinite: tuple[str, ...] = ()
    among: Mapping[str, str] = field(default_factory=dict)
    stepwise: str = ""
    dtypes: tuple[str, ...] = FLOATS
    group: str = ""  # set from the table it stands in

    def __post_init__(self) -> None:
        """UserError for what no size can mend."""
        if mistake := _mistake(self):
            raise UserError(f"task {self.name!r}: {mistake}")

    def task(self, sizes: Mapping[str, int] | None = None, dtype: str = "float32", target: str = "cpu") -> Operation:
        """The record at these sizes, those left out as on the target, cpu or cuda; UserError where it cannot be."""
        unknown = set(sizes or {}) - set(self.cpu)
        if unknown:
            raise UserError(f"{self.name} has no size {', '.join(sorted(unknown))}; its sizes: {', '.join(self.cpu)}")
        if dtype not in self.dtypes:
            raise UserError(f"{self.name} is defined for {', '.join(self.dtypes)}, not {dtype}")
        chosen = {**(self.gpu if target == "cuda" else self.cpu), **(sizes or {})}
        if min(chosen.values(), default=1) < 1:
            raise UserError(f"{self.name}: sizes must be at least 1")

        def declared(values: Mapping[str, Values]) -> tuple[Tensor, ...]:
            return tuple(Tensor(name, v.dtype_in(dtype), v.dims(chosen)) for name, v in values.items())

        try:
            inputs, weights = declared(self.inputs), declared(self.weights)
            with FakeTensorMode():  # shapes without memory
                fake = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in (*inputs, *weights)}
                results = self.bind(chosen)(**fake)
            flops = evaluate(self.flops, chosen)
        except Exception as error:  # noqa: BLE001 - a reference is anybody's code
            raise UserError(f"{self.name} cannot be computed at sizes {chosen}: {line_of(error)}") from None
        if len(results) != len(self.outputs) or not all(isinstance(result, torch.Tensor) for result in results):
            kinds = ("Tensor" if isinstance(result, torch.Tensor) else type(result).__name__ for result in results)
            found = ", ".join(kinds) or "nothing"
            raise UserError(
                f"task {self.name!r}: its reference returns {found}; return a tensor for each of its outputs, "
                f"{', '.join(self.outputs)}"
            )
        outputs = tuple(
            Tensor(name, str(result.dtype).removeprefix("torch."), tuple(result.shape))
            for name, result in zip(self.outputs, results, strict=True)
        )
        return Operation(self.name, tuple(chosen.items()), dtype, "", inputs, weights, outputs, flops)

    def bind(self, sizes: Mapping[str, int]) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The reference as a function of the tensors alone, by name; always a tuple."""
        wanted = inspect.signature(self.reference).parameters
        fixed = {name: value for name, value in sizes.items() if name in wanted}

        def function(**tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = self.reference(**tensors, **fixed)
            return tuple(result) if isinstance(result, (tuple, list)) else (result,)

        return function

    def draw(
        self,
        task: Task,
        seed: int,
        distribution: Distribution = Distribution.NORMAL,
        device: torch.device | str = "cpu",
    ) -> Tensors:
        """Inputs and weights; the same for the same seed on the same kind of device."""
        sizes = dict(task.sizes)
        return {
            name: values.draw(sizes, task.dtype, seeded(seed, name, device), distribution)
            for name, values in {**self.inputs, **self.weights}.items()
        }

    def other_sizes(
        self,
        rng: np.random.Generator,
        factors: tuple[float, float],
        *,
        sizes: Mapping[str, int] | None = None,
        multiple: int = 1,
    ) -> dict[str, int]:
        """Sizes nobody was shown: each that may change is odd, and a factor between these times what it is.

        sizes: what they are, those left out as on the CPU. multiple: those that are not smaller than this become
        multiples of it instead, odd ones where it is below `VECTOR`, so that vectors are an odd number. Factors above 1
        make every size larger, those of `VECTOR` and more one more than a multiple of it, so that a loop over vectors
        leaves a single element; smaller ones make none larger.
        """

        def other(value: int) -> int:
            near = value * rng.uniform(*factors)
            if 1 < multiple <= value:
                count, odd = max(1, round(near / multiple)), int(multiple < VECTOR)
                if factors[0] > 1:
                    return (max(count, value // multiple + 1) | odd) * multiple
                return max(1, count - (count + 1) % 2 * odd) * multiple
            step = VECTOR if factors[0] > 1 and value >= VECTOR else 2
            found = max(1, round(near) // step * step + 1)
            return max(found, (value - 1) // step * step + step + 1) if factors[0] > 1 else min(found, value)

        shown = {**self.cpu, **(sizes or {})}
        return {name: value if name in self.rigid else other(value) for name, value in shown.items()}


@cache
def definitions() -> dict[str, Definition]:
    """Every task of our own by name, in the order of the tables."""
    package = importlib.import_module("cuda_l2.tasks.own")
    found: dict[str, Definition] = {}
    for info in pkgutil.iter_modules(package.__path__):
        path = Path(package.__path__[0]) / f"{info.name}.py"
        try:
            module = importlib.import_module(f"{package.__name__}.{info.name}")
        except SyntaxError as error:
            raise UserError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
        except Exception as error:  # noqa: BLE001 - whatever a table's author wrote
            line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            what = str(error) if isinstance(error, UserError) else line_of(error)
            raise UserError(f"{path}{f', line {line[-1]}' if line else ''}: {what}") from None
        table = getattr(module, "TASKS", None)
        if not isinstance(table, tuple) or not all(isinstance(entry, Definition) for entry in table):
            raise UserError(f"{path}: TASKS must be a tuple of Definitions; with one alone, a comma follows it")
        for definition in table:
            if definition.name in found:
                raise UserError(
                    f"two tasks are named {definition.name}, one of them in {module.__file__}: rename that one"
                )
            found[definition.name] = replace(definition, group=info.name.replace("_", " "))
    return found


def definition(name: str) -> Definition:
    """A task of our own; UserError where there is none of this name."""
    known = definitions()
    if name not in known:
        near = [other for other in known if name.split("_", 1)[0] in other]
        near = near or difflib.get_close_matches(name, known, 12) or list(known)
        others = ", ...: `cuda-l2 tasks` lists them all" if len(near) > 12 else ""
        raise UserError(f"there is no task {name!r}; choose from {', '.join(near[:12])}{others}")
    return known[name]


def _mistake(known: Definition) -> str:
    """What is wrong with it at any size; empty where nothing is."""
    tensors, sizes = [*known.inputs, *known.weights], set(known.cpu)
    wanted = inspect.signature(known.reference).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values())
    named = [name for name, parameter in wanted.items() if parameter.kind is not parameter.VAR_KEYWORD]
    if not re.fullmatch(r"[a-z][a-z0-9_]*", known.name):
        return "a name has small letters, digits and underscores, and begins with a letter"
    if not tensors or not known.outputs:
        return "it needs an input and an output"
    if twice := sorted({name for name in tensors if tensors.count(name) > 1 or name in sizes}):
        return f"{', '.join(twice)} names two things"
    if set(known.gpu) != sizes:
        return f"cpu and gpu must give the same sizes; {', '.join(sorted(sizes ^ set(known.gpu)))} stands in one alone"
    if strange := sorted(set(known.rigid) - sizes):
        return f"rigid names {', '.join(strange)}, which is no size; sizes: {', '.join(known.cpu)}"
    if known.stepwise and known.stepwise not in sizes:
        return f"stepwise names {known.stepwise}, which is no size; sizes: {', '.join(known.cpu)}"
    if strange := sorted(set(known.indefinite) - set(tensors)):
        return f"indefinite names {', '.join(strange)}, which is no input or weight"
    if strange := sorted((set(known.among) - set(known.outputs)) | (set(known.among.values()) - set(known.inputs))):
        return f"among names {', '.join(strange)}, which is no output, or no input"
    if strange := [name for name in named if name not in tensors and name not in sizes]:
        return f"its reference takes {', '.join(strange)}, which is no input, weight or size"
    if left := [name for name in tensors if not anything and name not in wanted]:
        return f"its reference does not take {', '.join(left)}"
    if not known.dtypes or set(known.dtypes) - set(FLOATS):
        return f"dtypes must be some of {', '.join(FLOATS)}"
    try:
        for chosen in (known.cpu, known.gpu):
            evaluate(known.flops, chosen)
            for values in (*known.inputs.values(), *known.weights.values()):
                values.dims(chosen)
                evaluate(values.fan_in, chosen)
                evaluate(values.below, chosen)
    except ContractError as error:
        return str(error)
    return ""
