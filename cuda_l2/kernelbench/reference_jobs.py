"""Jobs of the program inside the sandbox: examine the file, leave a case, inputs or exact results."""

import json
from pathlib import Path
from typing import Any

import torch

from cuda_l2.kernelbench.answer_files import LINE, RESULT, TASK, TENSORS
from cuda_l2.kernelbench.arguments import encode
from cuda_l2.kernelbench.examined import Examined, Readiness, Refused
from cuda_l2.kernelbench.file import Loaded
from cuda_l2.kernelbench.reference import Limits, Reference, changed, examine, parameter_names, reference
from cuda_l2.records import to_json
from cuda_l2.tasks.tolerance import widened
from cuda_l2.tasks.values import Distribution


def do(job: dict[str, Any]) -> None:
    """Leave a job's answer in the folder."""
    try:
        {"examine": _examine, "case": _case, "inputs": _inputs, "results": _results}[job["action"]](job)
    except MemoryError:
        refused = Examined(job["name"], Readiness.TOO_LARGE, "does not fit in memory")
        Path(RESULT).write_text(to_json(refused))
    except Refused as error:
        Path(RESULT).write_text(to_json(Examined(job["name"], error.status, error.reason or "refused")))


def _examine(job: dict[str, Any]) -> None:
    examined = examine(
        *(Path(TASK).resolve(), job["name"], job["revision"]),
        sizes=job["sizes"],
        seed=job["seed"],
        limits=Limits(job["memory_bytes"], job["budget_bytes"], job["budget_flops"]),
        parts=job["parts"],
        device=job["device"],
    )
    Path(RESULT).write_text(to_json(examined))


def _reference(job: dict[str, Any], loaded: Loaded, seed: int, weights_seed: int) -> Reference:
    given = (loaded, job["name"], job["revision"], job["sizes"], seed, _distribution(job))
    return reference(*given, device=job["device"], weights_seed=weights_seed)


def _loaded(job: dict[str, Any]) -> Loaded:
    return Loaded(Path(TASK).resolve(), job["sizes"])


def _distribution(job: dict[str, Any]) -> Distribution | None:
    return Distribution(job["distribution"]) if job["distribution"] else None


def _case(job: dict[str, Any]) -> None:
    """Inputs, weights and the bounds of each output: a header, and the tensors' bytes one after the other."""
    loaded = _loaded(job)
    found = _reference(job, loaded, job["seed"], job["weights_seed"])
    if name := job["changed"]:
        how = {"wholly": job["wholly"], "weight": name in found.keys}
        found.tensors[name] = changed(found.tensors[name], job["seed"], **how)
    for name, at, value in job["special"]:
        found.tensors[name] = found.tensors[name].clone(memory_format=torch.contiguous_format)
        found.tensors[name].view(-1)[at] = value
    limits = dict(zip([tensor.name for tensor in found.task.outputs], found.bounds(), strict=True))
    values = found.values()
    tensors = {name: torch.as_tensor(value) for name, value in values.items()} | found.tensors  # changed ones
    listed = [("given", name, tensor) for name, tensor in tensors.items()]
    for name, limit in limits.items():
        listed += [("exact", name, limit.exact), ("free", name, limit.free)]
    header = {
        "task": json.loads(to_json(found.task)),
        "bounds": {n: [b.rms_allowed, b.max_allowed, b.eager_rms, b.eager_max] for n, b in limits.items()},
        "numbers": {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)},
        "keys": found.keys,
        "initial": _plain(loaded.arguments()),
        "result": found.result,
    }
    _leave(header, listed)


def _results(job: dict[str, Any]) -> None:
    """Inputs and weights for several seeds, and the exact results, without bounds."""
    loaded = _loaded(job)
    listed: list[tuple[Any, str, Any]] = []
    for index, seed in enumerate(job["seeds"]):
        found = _reference(job, loaded, seed, seed)
        given = {name: torch.as_tensor(value) for name, value in found.values().items()} | found.tensors
        with torch.no_grad():
            exact = found.function(**widened(found.tensors))
        results = {tensor.name: value for tensor, value in zip(found.task.outputs, exact, strict=True)}
        listed += [(index, name, tensor) for name, tensor in (*given.items(), *results.items())]
    _leave({}, listed)


def _inputs(job: dict[str, Any]) -> None:
    """The file's own inputs for several seeds, without running its module."""
    loaded, distribution = _loaded(job), _distribution(job)
    names = parameter_names(loaded.model(0), len(loaded.inputs(0)))
    listed = [
        (index, name, value)
        for index, seed in enumerate(job["seeds"])
        for name, value in zip(names, loaded.inputs(seed + 1, distribution), strict=True)
        if isinstance(value, torch.Tensor)
    ]
    _leave({}, listed)


def _leave(header: dict[str, Any], listed: list[tuple[Any, str, Any]]) -> None:
    """A header that names the tensors, and their bytes. listed: two words each tensor is known by, and the tensor."""

    with Path(TENSORS).open("wb") as file:
        for _, _, tensor in listed:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            file.write(data)  # as it lies there: tensors may be gigabytes
            file.write(bytes(-data.size % LINE))
    tensors = [(role, name, str(t.dtype).removeprefix("torch."), list(t.shape)) for role, name, t in listed]
    Path(RESULT).write_text(json.dumps(header | {"tensors": tensors}))


def _plain(value: Any) -> Any:
    """A constructor's arguments as data; None where they are none."""

    try:
        return encode(value)
    except (ValueError, RecursionError):
        return None
