"""cuda-l2 choices: shape by shape into a file that an interrupted run goes on from."""

import contextlib
import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cuda_l2.commands.choices import ChoicesSettings, command
from cuda_l2.measure.sampler import Samples
from cuda_l2.records import Gemm, Layout
from cuda_l2.runs import choice_audit
from cuda_l2.system.errors import UserError

SHAPES = [Gemm(64, 64, 64), Gemm(128, 128, 128), Gemm(256, 256, 256)]


class Machine:
    """A rig whose audits are over at once; Ctrl-C comes in place of one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.audited: list[Gemm] = []
        self.driver, self.interrupted_at = "580.1", 0
        rig = SimpleNamespace(
            target=SimpleNamespace(machine="gpu:a"),
            gpu="0000:00:00.0",
            libraries=None,
            environment=lambda: {"driver": self.driver, "peak_tflops": 790.0 + len(self.audited)},
            require_feasible=lambda gemm: None,
        )
        monkeypatch.setattr("cuda_l2.rigs.open_rig", lambda name, request: contextlib.nullcontext(rig))
        monkeypatch.setattr(choice_audit, "audit", self.audit)

    def audit(self, libraries: None, gemm: Gemm) -> choice_audit.Audit:
        self.audited.append(gemm)
        if len(self.audited) == self.interrupted_at:
            raise KeyboardInterrupt
        times: Samples[int] = Samples()
        for number in range(3):
            times.add(0, number, 9.0)
            times.add(1, number, 10.0)
        audited = (choice_audit.compared(replace(gemm, layout=layout), layout, 0, 2, times) for layout in Layout)
        return choice_audit.Audit(gemm, tuple(audited))

    def run(self, out: Path, *, fresh: bool = False) -> None:
        command(settings=ChoicesSettings(grid=",".join(map(str, SHAPES)), out=out, fresh=fresh))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def rows(path: Path) -> list[tuple[int, str]]:
    return sorted((int(row["m"]), row["layout"]) for row in csv.DictReader(path.read_text().splitlines()))


def test_an_interrupted_run_goes_on_from_what_it_stored(machine, tmp_path, capsys) -> None:
    out, machine.interrupted_at = tmp_path / "choices.csv", 2
    with pytest.raises(SystemExit) as ended:
        machine.run(out)
    said = capsys.readouterr()
    assert ended.value.code == 130 and "goes on from here" in said.err and "| all | 2 | 2 |" in said.out
    stored = (tmp_path / "choices.jsonl").read_bytes()
    first = machine.audited[0]
    assert rows(out) == [(first.m, "nn"), (first.m, "tn")]

    machine.run(out)
    assert first not in machine.audited[2:] and set(machine.audited[2:]) == set(SHAPES) - {first}
    assert (tmp_path / "choices.jsonl").read_bytes().startswith(stored)
    assert rows(out) == [(gemm.m, layout) for gemm in SHAPES for layout in ("nn", "tn")]
    assert "| all | 6 | 6 |" in capsys.readouterr().out

    before = out.read_bytes()
    machine.run(out)  # nothing is left to do
    assert len(machine.audited) == 4 and out.read_bytes() == before


def test_what_another_driver_chose_is_refused_and_fresh_moves_it_aside(machine, tmp_path) -> None:
    out = tmp_path / "choices.csv"
    machine.run(out)
    table, stored = out.read_bytes(), (tmp_path / "choices.jsonl").read_bytes()
    machine.driver = "590.2"
    with pytest.raises(UserError, match=r"driver 580.1, not 590.2: .*--fresh"):
        machine.run(out)
    assert out.read_bytes() == table and (tmp_path / "choices.jsonl").read_bytes() == stored
    machine.run(out, fresh=True)
    assert (tmp_path / "choices-1.csv").read_bytes() == table
    assert (tmp_path / "choices-1.jsonl").read_bytes() == stored
    assert json.loads((tmp_path / "choices.jsonl").read_text().splitlines()[0])["environment"]["driver"] == "590.2"


def test_the_table_does_not_take_the_place_of_what_a_run_goes_on_from(machine, tmp_path) -> None:
    with pytest.raises(UserError, match="another ending"):
        machine.run(tmp_path / "choices.jsonl")
    assert not list(tmp_path.glob("*.jsonl"))
