"""cuda-l2 library: the pack of compiled kernels, and which of them serve which shapes on this GPU."""

from pathlib import Path

from cyclopts import App

command = App(name="library", help="The kernels that serve torch's matrix products: build, list, check, export.")


@command.command
def build(*, out: Path | None = None) -> None:
    """Compile every kernel of the package for Hopper GPUs into a pack. Needs NVRTC (the extra cuda) and no GPU.

    Takes about ten minutes on one core. An interrupted build goes on where it was.

    Parameters
    ----------
    out
        Folder for the pack; the cache if not given, where calls find it.
    """
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

        made = pack.build(wanted, out or pack.built_folder(), progress)
    size = sum(path.stat().st_size for path in (made.folder / pack.INDEX, made.folder / pack.DATA))
    print(f"{len(made.kernels)} kernels, {size / 2**20:.1f} MiB, pack {made.identity}, {made.compiler}: {made.folder}")
