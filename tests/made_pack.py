"""A pack made up for tests: kernels of the shipped table, listed but not compiled, and a device that runs them."""

from pathlib import Path

import pytest

from cuda_l2.contract.cuda import Plan
from cuda_l2.library.deploy import choices, dispatch
from cuda_l2.library.deploy.choices import Place
from cuda_l2.library.deploy.pack import Packed
from cuda_l2.library.deploy.recipes import KERNELS, Recipe, recipes
from cuda_l2.library.table import schedule_text
from cuda_l2.machine.cuda.target import compile_only

PLACE = Place("H100 9.0 132", "580.1", "CUDA 13.0, torch 2.11", "0123456789abcdef")
TARGET = compile_only("sm_90a")


class ListedPack:
    """What dispatch asks of a pack, with code that the recording driver loads."""

    identity = PLACE.pack

    def __init__(self, wanted: list[Recipe]) -> None:
        self.kernels = {recipe.id: listed(recipe) for recipe in wanted}
        self.loaded: list[str] = []

    def cubin(self, name: str) -> bytes:
        self.loaded.append(name)
        return b"cubin" + name.encode()


def listed(recipe: Recipe) -> Packed:
    text, gemm = schedule_text(recipe.schedule), recipe.gemm
    return Packed(recipe.id, gemm.dtype, gemm.layout, recipe.family, text, str(gemm), 0, "", "", 0, 0, 0)


def recipes_of(folder: Path, *rows: str) -> list[Recipe]:
    """The recipes of the table's rows that begin so."""
    first, *lines = KERNELS.read_text().splitlines()
    (folder / "kernels.csv").write_text("\n".join([first, *(line for line in lines if line.startswith(rows))]) + "\n")
    return recipes(folder / "kernels.csv")


def install(found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve device 0, a Hopper GPU, by a pack."""
    monkeypatch.setattr(dispatch, "target_of", lambda device: TARGET)
    monkeypatch.setattr(choices, "place_of", lambda device, identity: PLACE)
    monkeypatch.setattr(dispatch, "installed", lambda: found)
    forget()


def forget() -> None:
    for cached in (dispatch.known, dispatch.warn, dispatch.pack):
        cached.cache_clear()


def parameter_sizes(plan: Plan) -> list[int]:
    """Bytes of each parameter of a plan's one kernel."""
    sizes = {"pointer": 8, "tensor_map": 128}
    return [sizes.get(argument.kind) or len(argument.data) // 2 for argument in plan.launches[0].arguments]
