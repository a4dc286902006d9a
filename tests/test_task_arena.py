"""machine/cpu/task_arena.py and measure/task_outputs.py: what shared memory shows of a candidate, and what it leaves to it."""

import numpy as np
import pytest
import torch

from cuda_l2 import contract, tasks
from cuda_l2.machine.cpu.task_arena import TaskArena, TaskMemory, raw
from cuda_l2.machine.fills import POISONS
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.task_outputs import TaskOperands
from cuda_l2.records import DTYPE_BYTES, Operation, Tensor
from cuda_l2.tasks.cases import OwnCases

TASK = tasks.parse("softmax:rows=5,columns=6")
MIXED = Operation(
    "mixed",
    (("groups", 3),),
    inputs=(Tensor("x", "bfloat16", (2, 7)), Tensor("n", "int64", ())),
    weights=(Tensor("w", "float32", (0, 3)),),
    outputs=(Tensor("flags", "bool", (3,)), Tensor("out", "float64", (2,))),
)


@pytest.fixture
def arena():
    with TaskArena([TASK, MIXED], slots=4, workspace_bytes=1 << 16) as made:
        yield made


def test_every_type_has_a_poison_of_its_size() -> None:
    assert {name: len(poison) for name, poison in POISONS.items()} == DTYPE_BYTES
    for name in ("float64", "float32", "float16", "bfloat16"):
        assert torch.frombuffer(bytearray(POISONS[name]), dtype=getattr(torch, name)).isnan().all()


def test_tensors_of_every_type_are_kept_apart(arena) -> None:
    arena.select(MIXED)
    given = {"x": torch.ones(2, 7, dtype=torch.bfloat16), "n": torch.tensor(5), "w": torch.empty(0, 3)}
    arena.write(0, given)
    arena.poison_outputs([0])
    assert arena.slots == 1 and arena.untouched(0, given) and arena.gaps_intact() and arena.guards_intact()
    flags, out = MIXED.outputs
    assert arena.output(0, out).isnan().all()
    assert arena.output(0, flags).dtype == torch.uint8  # poison is no boolean
    arena.poison_outputs([0], {"flags": torch.tensor([True, False, True]), "out": torch.zeros(2, dtype=torch.float64)})
    assert arena.output(0, flags).tolist() == [True, False, True] and not arena.output(0, out).any()
    arena.write(0, given | {"n": torch.tensor(6)})
    assert not arena.untouched(0, given)


def test_a_launch_is_told_in_the_order_of_its_contract(arena) -> None:
    source = """/* cuda-l2
target = "cpu"
sizes = ["groups"]

[[buffer]]
name = "out"
dtype = "float64"
shape = ["pairs"]
kind = "output"

[[buffer]]
name = "flags"
dtype = "bool"
shape = ["groups"]
kind = "output"

[[buffer]]
name = "x"
dtype = "bfloat16"
shape = ["pairs", "wide"]
*/"""
    arena.select(MIXED)
    memory = TaskMemory(arena, contract.parse_cpu(source))
    table = memory.write_calls([0])
    words = arena._bytes[table : table + 8 * 7].view(np.int64).tolist()
    offsets = [arena.offset(name, 0) for name in ("out", "flags", "x")]
    assert words == [3, 2, 7, *offsets, arena.workspace_offset] and memory.arguments[:2] == (3, 3)
    arena.select(TASK)
    with pytest.raises(contract.ContractError, match="no size groups"):
        memory.write_calls([0])


@pytest.mark.parametrize("used", [0, 100, 4096, 1 << 16])
def test_writes_outside_show_near_and_far(arena, used) -> None:
    places = [arena.workspace_offset - 1, arena.workspace_offset + used, arena.size - 1]
    places += [arena.workspace_offset + used + 40_000] if used < 20_000 else []
    for place in places:
        arena.poison_workspace(used)
        assert arena.guards_intact()
        arena._bytes[place] ^= 0xFF
        assert not arena.guards_intact(), place
    arena.poison_workspace(used)
    assert arena.guards_intact()
    arena._bytes[arena.offset("out", 3) + 4 * 30] ^= 0xFF
    assert not arena.gaps_intact()


def test_a_new_process_finds_nothing_of_an_earlier_one(arena) -> None:
    cases = OwnCases(TASK, 1)
    operands = TaskOperands(arena, cases, np.random.default_rng(1))
    operands.workspace_bytes = 64
    operands.refresh(4)
    arena.write_table([[1] * 5] * 4)
    arena._bytes[arena.workspace_offset : arena.workspace_offset + 64] = 7
    for slot in range(4):
        arena.output(slot, TASK.outputs[0])[:] = 1
    operands.forget()
    operands.begin_warm_up()
    (only,) = operands._current
    x = raw(only.tensors["x"])
    assert np.array_equal(arena._rows(TASK.inputs[0])[0, : x.size], x)
    assert not arena._rows(TASK.inputs[0])[1:, : x.size].any()
    assert all(arena.output(slot, TASK.outputs[0]).isnan().all() for slot in range(4))
    assert (arena._bytes[arena.workspace_offset : arena.workspace_offset + 64] == 0xFB).all()
    assert arena.gaps_intact() and arena.guards_intact()


def test_no_launch_that_counts_meets_what_the_warm_up_met(arena) -> None:
    operands = TaskOperands(arena, OwnCases(TASK, 2), np.random.default_rng(2))
    for _ in range(20):
        operands.begin_warm_up()
        (met,) = operands._current
        operands.refresh(4)
        assert len({id(case) for case in operands._current}) == 4
        assert all(case is not met for case in operands._current)


def test_every_timed_launch_is_looked_at(arena) -> None:
    operands = TaskOperands(arena, OwnCases(TASK, 3), np.random.default_rng(3))
    operands.refresh(4)
    for slot, case in enumerate(operands._current):
        arena.output(slot, TASK.outputs[0])[:] = torch.softmax(case.tensors["x"], -1)
    assert operands.check(range(4), element_wise=True) < 1e-6
    assert np.isnan(operands.check(range(4), element_wise=False))
    operands.require_untouched(4)
    arena.output(2, TASK.outputs[0])[4, 5] += 1e-4
    with pytest.raises(WrongOutput, match=r"out is off .* \[4, 5\]"):
        operands.check(range(4), element_wise=False)
    arena.write(1, {"x": torch.zeros(5, 6)})
    with pytest.raises(WrongOutput, match="changed its inputs"):
        operands.require_untouched(4)
