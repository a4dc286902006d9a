"""cuda-l2 library: the pack of compiled kernels, and which of them serve which shapes on this GPU."""

import json as json_text
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from cuda_l2.commands._options import read_source, require_cuda_packages
from cuda_l2.records import Gemm, VerdictStatus
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text

if TYPE_CHECKING:
    from cuda_l2.library.deploy.choices import Place
    from cuda_l2.library.deploy.pack import Pack

command = App(name="library", help="Kernels that serve torch's matrix products: build, list, verify, export, import.")


@command.command
def build(*, out: Path | None = None, carried: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Compile every kernel of the package for Hopper GPUs into a pack. Needs NVRTC (the extra cuda) and no GPU.

    Takes about three minutes on two cores. An interrupted build goes on where it was.

    Args:
        out: Folder for the pack; the cache if not given, where calls find it.
        carried: Put the pack, the compiled operator and the call for this Python into this package's own folder, from
            which `make wheel` takes them.
    """
    require_cuda_packages("the kernels of the pack need an NVIDIA GPU")
    from cuda_l2.library.deploy import pack
    from cuda_l2.library.deploy.recipes import recipes
    from cuda_l2.report.live import GridProgress

    wanted, done = recipes(), 0
    with GridProgress(len(wanted), 0, "kernel") as line:

        def progress(count: int) -> None:
            nonlocal done
            for recipe in wanted[done:count]:
                line.done(f"{recipe.family} {recipe.gemm}")
            done = count

        made = pack.build(wanted, pack.CARRIED if carried else out or pack.built_folder(), progress)
    if carried:
        from cuda_l2.library import product
        from cuda_l2.library.deploy import native

        shutil.copyfile(native.build(), native.carried())
        shutil.copyfile(product.built_call(), product.carried_call())
    print(_summary(made))


@command.command(name="list")
def list_kernels(*, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """List the pack's kernels, and on a GPU the shapes that they serve there.

    Args:
        json: Everything as JSON.
    """
    found, chosen = _pack(), []
    for place in _places(found):
        from cuda_l2.library.deploy import choices

        chosen += [choice for _, choice in sorted(choices.read(place).items())]
    if json:
        kernels = [asdict(kernel) for kernel in found.kernels.values()]
        print(
            json_text.dumps(
                {"pack": found.identity, "kernels": kernels, "choices": [asdict(choice) for choice in chosen]}
            )
        )
        return
    print(_summary(found))
    for kernel in found.kernels.values():
        proof = kernel.proof or "not proved as a whole"
        print(f"{kernel.id} {kernel.family} {kernel.shape}: won {kernel.shapes} shapes; {proof}; {kernel.schedule}")
    for choice in chosen:
        server = "demoted" if choice.demoted else choice.kernel or "torch"
        print(f"{choice.shape}: {server}; kernel {choice.us} us, torch {choice.vendor_us} us")


@command.command
def verify() -> None:
    """Check every kernel's hash; on a GPU time every tuned shape again, and demote the kernels that lose.

    Exits with 1 where a kernel was changed.
    """
    found = _pack()
    wrong = found.verify()
    for line in wrong:
        print(line)
    print(f"{len(found.kernels) - len(wrong)} of {len(found.kernels)} kernels are as they were built")
    if wrong:
        sys.exit(1)
    if not _places(found):
        print("no Hopper GPU: nothing was timed")
        return
    from cuda_l2.library.deploy.tuning import check

    for choice in check():
        print(f"{choice.shape}: torch serves from now on; kernel {choice.us} us, torch {choice.vendor_us} us")


@command.command
def export(folder: Path, /) -> None:
    """Write every kernel's source with its contract to a folder, and the table that `cuda-l2 prove` takes."""
    from cuda_l2.library.deploy.recipes import recipes
    from cuda_l2.library.table import Row, write_table

    wanted = recipes()
    for recipe in wanted:
        write_text(folder / f"{recipe.id}.cu", recipe.candidate.source, "choose another folder")
    rows = {}
    for recipe in wanted:
        edge = "programmatic" if dict(recipe.candidate.schedule).get("EDGE") else "plain"
        gemm = recipe.gemm
        rows[gemm, edge] = Row(gemm, edge, recipe.family, recipe.candidate.schedule, 1.0)
    write_table(folder / "kernels.csv", rows.values())
    print(f"{len(wanted)} sources in {folder}; cuda-l2 prove {folder / 'kernels.csv'} proves them on a GPU")


@command.command(name="import")
def import_source(file: Path, /, *shapes: str) -> None:
    """Take a kernel's source for shapes: compiled here under the rules, verified, timed and kept where it wins.

    Compiled code is never taken: hashes that a file brings with it prove nothing.

    Args:
        file: A .cu file with its launch contract.
        shapes: Shapes that it shall serve, as in 16x4096x4096:tn:bf16.
    """
    from cuda_l2.library.deploy import imported

    if not shapes:
        raise UserError("name the shapes that the kernel shall serve, as in 16x4096x4096:tn:bf16")
    source, gemms = read_source(file), [Gemm.parse(shape) for shape in shapes]
    name = imported.keep(source, gemms)
    if not _places(_pack()):
        raise UserError(f"kernel {name} is compiled; it serves nothing before it is imported on a Hopper GPU")
    from cuda_l2.evaluator import evaluate
    from cuda_l2.library.deploy.tuning import adopt

    for gemm in gemms:
        trial = evaluate(source, gemm, full=True)
        if trial.verdict is None or trial.verdict.status is not VerdictStatus.CORRECT:
            raise UserError(f"kernel {name} is not imported: {gemm}: {trial.status}: {trial.reason}")
    for choice in adopt(name, gemms):
        server = "it serves" if choice.served else "torch serves"
        print(f"{choice.shape}: kernel {choice.us:.2f} us, torch {choice.vendor_us:.2f} us; {server}")


@command.command
def demote(*shapes: str) -> None:
    """Have torch's own kernel serve shapes from now on, on this GPU, also after tuning.

    Args:
        shapes: As in 16x4096x4096:tn:bf16.
    """
    from cuda_l2.library.deploy import choices

    places, gemms = _places(_pack()), [Gemm.parse(shape) for shape in shapes]
    if not places:
        raise UserError("choices belong to a Hopper GPU, and there is none here; `cuda-l2 doctor` says what is missing")
    for place in places:
        known = choices.read(place)
        choices.add(place, [replace(known.get(gemm, choices.Choice(str(gemm))), demoted=True) for gemm in gemms])
    print(f"torch serves {', '.join(map(str, gemms))}")


@command.command
def bench(
    *shapes: str,
    grid: str = "",
    sample: int | None = None,
    random: int = 0,
    seed: int = 1,
    warm: Annotated[bool, Parameter(negative=())] = False,
    tuned: Annotated[bool, Parameter(negative=())] = False,
    out: Path | None = None,
) -> None:
    """Time cuda_l2.matmul beside torch.matmul and autotuned cuBLASLt, shape by shape. Needs a Hopper GPU.

    Shapes below 1 are measured again. Exits with 1 where a shape is below 0.99 of torch.matmul both times.

    Args:
        shapes: As in 16x4096x4096:tn:bf16.
        grid: Further shapes: `paper` for the paper's 1,000, or a file as `cuda-l2 bench --grid` takes it.
        sample: Number of sizes of the grid to take, stratified by size; all if not given.
        random: So many more, drawn at random: M, N and K log-uniform from 1 to 16384, M N K up to 2^36.
        seed: Of the sample and of the random shapes.
        warm: Find B in the L2 cache. If not given it comes from memory, as a model's weights do.
        tuned: Serve by the choices as they are. If not given every shape is tuned first.
        out: CSV file for the times.
    """
    gemms = [Gemm.parse(shape) for shape in shapes]

    from cuda_l2.library.deploy.compared import Compared, algorithms, compare, graphs, summary, table
    from cuda_l2.library.deploy.tuning import device_for_timing, tune
    from cuda_l2.runs.grid import drawn_shapes, read_grid
    from cuda_l2.runs.grid import sample as sampled

    listed = read_grid(grid) if grid else []
    gemms += [*(sampled(listed, sample, seed) if sample else listed), *drawn_shapes(random, seed)]
    if not gemms:
        raise UserError("name shapes, as in 16x4096x4096:tn:bf16, or give --grid or --random")
    device = device_for_timing()
    if not tuned:
        tune(gemms, cold=not warm)
    found: dict[str, Compared] = {}
    for each in compare(gemms, device, graphs(device, cold=not warm), algorithms(device)):
        found[each.shape], last = each, each.again or each.first
        times = f"{last.us:9.2f} us, torch {last.torch_us:9.2f} us, cuBLASLt {last.cublaslt_us:9.2f} us"
        over = f", {last.over_cublaslt.estimate:.3f}x" if last.over_cublaslt else ""
        print(f"{each.shape:<28} {each.kernel or 'torch':<16} {times}: {last.ratio.estimate:.3f}x{over}")
    if out:
        write_text(out, table(found.values()), "choose another --out")
    for line in summary(found.values()):
        print(line)
    if any(each.slower for each in found.values()):
        sys.exit(1)


@command.command
def calls(shape: str = "16x4096x4096:tn:bf16", /, *, count: int = 2000) -> None:
    """Print the host's time of one call: torch.mm, the operator, cuda_l2.matmul, and the launch alone. Needs a GPU.

    Args:
        shape: One that was tuned and that a kernel serves.
        count: Calls a sample; the median of nine samples is printed.
    """
    from cuda_l2.library.deploy.costs import host_us

    for name, us in host_us(Gemm.parse(shape), count).items():
        print(f"{name:<40} {us:8.2f} us")


@command.command
def invariant(*shapes: str) -> None:
    """Check that batch_invariant=True gives a row the same bits in every batch, and print what it costs. Needs a GPU.

    Microseconds on the GPU of torch.mm, of cuda_l2.matmul as it was tuned, and with batch_invariant=True. Exits with 1
    where bits differ.

    Args:
        shapes: As in 16x4096x4096:tn:bf16, or a range of rows as in 1-2048x4096x4096:tn:bf16, which is the default.
    """
    from cuda_l2.commands.tune import expanded
    from cuda_l2.library.deploy import batches

    texts = shapes or ("1-2048x4096x4096:tn:bf16",)
    gemms = [Gemm.parse(shape) for text in texts for shape in expanded(text)]
    layers = dict.fromkeys(replace(gemm, m=1) for gemm in gemms)
    wrong = [f"{layer}: {line}" for layer in layers for line in batches.check(layer)]
    for line in wrong:
        print(f"other bits: {line}")
    print("rows have the same bits in every batch" if not wrong else f"rows differ in {len(wrong)} batches")
    print(f"{'shape':<28}" + "".join(f"{name:>22}" for name in batches.COLUMNS))
    for gemm, times in batches.times_us(gemms):
        print(f"{gemm!s:<28}" + "".join(f"{times[name]:>19.2f} us" for name in batches.COLUMNS))
    if wrong:
        sys.exit(1)


def _pack() -> "Pack":
    from cuda_l2.library.deploy.pack import installed

    found = installed()
    if found is None:
        raise UserError("there is no pack of kernels: run `cuda-l2 library build`")
    return found


def _places(found: "Pack") -> "list[Place]":
    """Where choices for this GPU are kept, those for weights ahead last; none where it runs no kernel of the pack."""
    import torch

    from cuda_l2.library.deploy import dispatch
    from cuda_l2.library.deploy.entries import AHEAD, TUNED

    if not torch.cuda.is_available() or not dispatch.serves(torch.cuda.current_device()):
        return []
    return [dispatch.place_of(torch.cuda.current_device(), found, rule) for rule in (TUNED, AHEAD)]


def _summary(found: "Pack") -> str:
    from cuda_l2.library.deploy.pack import DATA, INDEX

    size = sum((found.folder / name).stat().st_size for name in (INDEX, DATA))
    return (
        f"{len(found.kernels)} kernels, {size / 2**20:.1f} MiB, pack {found.identity}, {found.compiler}: {found.folder}"
    )
