"""One training run's folder: its settings, its log, its checkpoints, the model at its end.

run.jsonl           the settings, then a line a logged step; run-rank-1.jsonl of the second process of several
checkpoints/        as transformers' Trainer writes them
model/              written when the stage is done
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cuda_l2.learn import ranks
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.lines import LinesFile, parsed
from cuda_l2.system.values import now

FORMAT = "cuda-l2 train 1"
LOG = "run.jsonl"
MODEL = "model"
FINGERPRINTS = {"data": "--data", "prompts": "--prompts", "hold_out": "--hold-out", "world": "--world"}
"""Settings that the file holds as a hash, with their options: an error names the option, not the hash."""

CREATED = "created"
"""The day on which a run began; it decides nothing."""
SINCE = {"sampling.exemplar_lines": 0}
"""Settings that runs of earlier versions did not write down, as they had them."""


class Run(Closing):
    """A folder that one process trains in. A context manager."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """settings: all that decide the outcome, as JSON. UserError where the folder holds another run or files."""
        self.folder = folder
        header = {"format": FORMAT, CREATED: now()[:10], **json.loads(json.dumps(settings))}
        others = [path for path in folder.iterdir() if not path.match("run*.jsonl")] if folder.is_dir() else []
        if others and not (folder / LOG).exists():
            raise UserError(f"{folder} holds other things; choose an empty folder with --out")
        log = f"run-rank-{ranks.rank()}.jsonl" if ranks.rank() else LOG
        self._file = LinesFile(folder / log, lambda first: _accept(first, header, folder))
        if not self._file.lines:
            self._file.append(json.dumps(header))

    @property
    def model(self) -> Path:
        """Where the trained model is, once the stage is done."""
        return self.folder / MODEL

    @property
    def logged(self) -> int:
        """Number of lines of earlier processes."""
        return len(self._file.lines)

    @property
    def done(self) -> bool:
        return self.model.is_dir()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def last_checkpoint(self) -> Path | None:
        """The latest whole checkpoint; later ones, which a kill left half written, are removed."""
        found = sorted(self.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        for path in reversed(found):
            if _whole(path):
                return path
            if not ranks.rank():
                shutil.rmtree(path)
        return None

    def log(self, fields: Mapping[str, Any]) -> None:
        """Append the figures of a step."""
        self._file.append(json.dumps(fields))

    def finish(self, save: Callable[[Path], object]) -> None:
        """Let `save` write the model into a folder, which appears whole or not at all, and remove the checkpoints.

        Of several processes the first does this.
        """
        if ranks.rank():
            return
        temporary = self.folder / f"{MODEL}.new"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            save(temporary)
            temporary.replace(self.model)
        except OSError as error:
            raise UserError(f"cannot write {self.model}: {error.strerror or error}; started again it goes on") from None
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def close(self) -> None:
        self._file.close()


def _whole(checkpoint: Path) -> bool:
    """Whether all of a checkpoint was written: its state is written last."""
    try:
        return "global_step" in json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False


def _accept(first: bytes, header: Mapping[str, Any], folder: Path) -> None:
    before = parsed(first)
    if before is None or before.get("format") != FORMAT:
        raise UserError(f"{folder} holds no training run of this version; choose another folder with --out")
    for name, value, other in _differences(before, header):
        if name == CREATED or (name in SINCE and (value, other) == (None, SINCE[name])):
            continue
        option = FINGERPRINTS.get(name)
        began = f"with other contents of {option}" if option else f"with {name} = {value}, not {other}"
        raise UserError(
            f"{folder} holds a run that began {began}; choose another folder with --out, or go on as that run began"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for name in sorted(before.keys() | now.keys()):
        one, other = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found += _differences(one, other, f"{prefix}{name}.")
        elif one != other:
            found.append((prefix + name, one, other))
    return found
