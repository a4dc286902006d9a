"""machine/cpu/arena.py and measure/operands.py: what shared memory shows of a candidate, and what it leaves to it."""

import errno
import itertools
import os
from collections import Counter

import numpy as np
import pytest
import torch

from cuda_l2 import contract, tasks
from cuda_l2.machine.cpu.arena import ALIGN, FAR, Arena, CandidateMemory
from cuda_l2.machine.fills import POISONS
from cuda_l2.machine.tensors import rounded_up, stored
from cuda_l2.measure.operands import CaseOperands
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.records import DTYPE_BYTES, Gemm, Operation, Tensor
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
    with Arena([TASK, MIXED], slots=4, workspace_bytes=1 << 16) as made:
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
    assert arena.slots == 1 and arena.untouched(0, given) and arena.gaps_intact()
    flags, out = MIXED.outputs
    assert arena.tensor(0, out).isnan().all()
    assert arena.tensor(0, flags).dtype == torch.uint8  # poison is no boolean
    arena.poison_outputs([0], {"flags": torch.tensor([True, False, True]), "out": torch.zeros(2, dtype=torch.float64)})
    assert arena.tensor(0, flags).tolist() == [True, False, True] and not arena.tensor(0, out).any()
    arena.write(0, given | {"n": torch.tensor(6)})
    assert not arena.untouched(0, given)


def test_a_launch_is_told_in_the_order_of_its_contract(arena) -> None:
    source = """/* cuda-l2
target = "cpu"
sizes = ["groups"]
buffer = [
  {name = "out", dtype = "float64", shape = ["pairs"], kind = "output"},
  {name = "flags", dtype = "bool", shape = ["groups"], kind = "output"},
  {name = "x", dtype = "bfloat16", shape = ["pairs", "wide"]},
]
*/"""
    arena.select(MIXED)
    memory = CandidateMemory(arena, contract.parse_cpu(source))
    table = memory.write_calls([0])
    words = arena._bytes[table : table + 8 * 7].view(np.int64).tolist()
    offsets = [arena.offset(name, 0) for name in ("out", "flags", "x")]
    assert words == [3, 2, 7, *offsets, arena.workspace_offset] and memory.arguments[:2] == (3, 3)
    arena.select(TASK)
    with pytest.raises(contract.ContractError, match="no size groups"):
        memory.write_calls([0])


@pytest.mark.parametrize("task", [TASK, MIXED])
def test_all_that_is_mapped_is_a_tensor_or_guarded_and_a_page_is_free_around_it(arena, task) -> None:
    arena.select(task)
    arena.poison_workspace(100)
    table, count = arena.write_segments(100)
    found = arena._bytes[table : table + 24 * count].view(np.int64).reshape(-1, 3).tolist()
    assert found[0][0] == table and all(start % ALIGN == stop % ALIGN == 0 for start, stop, _ in found)
    together = {arena.offset(t.name, slot) // ALIGN * ALIGN for slot in arena._orders for t in task.tensors}
    apart = sorted(segment for segment in found if segment[0] not in together)
    assert len(apart) > 1 and all(later[0] - earlier[1] >= ALIGN for earlier, later in itertools.pairwise(apart))
    written = {start for start, _, writes in found if writes}
    slots = [
        (tensor, slot) for tensor in task.tensors if tensor.bytes for slot in {*range(arena.slots)} - {*arena._orders}
    ]
    spans = {(t, s): (arena.offset(t.name, s), arena.offset(t.name, s) + t.bytes) for t, s in slots}
    for (tensor, slot), (start, stop) in spans.items():
        first, last = start // ALIGN * ALIGN, -(-stop // ALIGN) * ALIGN
        assert [first, last, int(tensor in task.outputs)] in found and start % 64 == 0
        assert slot or last - stop < 64  # a read beyond the first slot's tensors faults
        for place in {first, start - 1, stop, last - 1} & {*range(first, start), *range(stop, last)}:
            assert arena.gaps_intact() and arena.gaps_intact(slot)
            arena._bytes[place] ^= 0xFF
            assert not arena.gaps_intact() and not arena.gaps_intact(slot)
            arena._bytes[place] ^= 0xFF
    assert arena.workspace_offset in written
    arena._bytes[arena.workspace_offset + 100] ^= 0xFF
    assert not arena.gaps_intact()


def test_what_lies_beside_tensors_is_nan_before_some_launches_and_numbers_before_others(arena) -> None:
    arena._rng = np.random.default_rng(0)
    arena.select(TASK)
    (out,) = TASK.outputs
    found = set()
    for _ in range(16):
        arena.guard(1)
        beside = arena._bytes[arena.offset("out", 1) + out.bytes :][:4].view(np.float32)[0]
        found.add(bool(np.isnan(beside)))
        assert arena.gaps_intact()
    assert found == {False, True}


@pytest.mark.parametrize("task", [TASK, MIXED])
def test_tensors_are_read_to_be_in_caches_and_empty_ones_need_not(arena, task) -> None:
    arena.select(task)
    arena.read(arena.slots)


def test_tensors_begin_at_every_place_of_a_page() -> None:
    gemm = Gemm(64, 96, 31)
    with Arena([gemm], slots=64, workspace_bytes=64) as arena:
        for tensor in gemm.tensors:
            assert len({arena.offset(tensor.name, slot) % ALIGN for slot in range(64)}) == min(64, ALIGN // 64)


def test_where_addresses_are_limited_tensors_lie_together(monkeypatch) -> None:
    truncate = os.ftruncate

    def limited(fd: int, size: int) -> None:
        if size > 1 << 30:
            raise OSError(errno.EFBIG, "File too large")
        truncate(fd, size)

    monkeypatch.setattr(os, "ftruncate", limited)
    with Arena([Gemm(64, 64, 64)], slots=2, workspace_bytes=4096) as made:
        assert made.size < FAR


def test_tensors_of_slots_lie_in_every_order() -> None:
    gemm = Gemm(64, 96, 31)
    with Arena([gemm], slots=128, workspace_bytes=64) as arena:
        orders = Counter(tuple(np.argsort(arena.offsets(slot))) for slot in range(128))
        distances = Counter(arena.offset("a", slot) - arena.offset("c", slot) for slot in range(64))
    assert len(orders) == 6 and min(orders.values()) >= 1 and max(distances.values()) < 16


def test_a_new_process_finds_nothing_of_an_earlier_one(arena) -> None:
    cases = OwnCases(TASK, 1)
    operands = CaseOperands(arena, cases, np.random.default_rng(1))
    operands.workspace_bytes = 64
    operands.refresh(4)
    arena.write_table([[1] * 5] * 4)
    arena._bytes[arena.workspace_offset : arena.workspace_offset + 64] = 7
    for slot in range(4):
        arena.tensor(slot, TASK.outputs[0])[:] = 1
    operands.forget()
    operands.begin_warm_up()
    (only,) = operands._current
    x = stored(only.tensors["x"], TASK.inputs[0]).numpy()
    assert np.array_equal(arena.row(0, TASK.inputs[0]), x)
    assert not any(arena.row(slot, TASK.inputs[0]).any() for slot in range(1, arena.slots))
    assert all(arena.tensor(slot, TASK.outputs[0]).isnan().all() for slot in range(4))
    held = set(arena._bytes[arena.workspace_offset : arena.workspace_offset + 64].tolist())
    assert held in ({0}, {0xFB})
    assert arena.gaps_intact()


def test_no_launch_that_counts_meets_what_the_warm_up_met(arena) -> None:
    operands = CaseOperands(arena, OwnCases(TASK, 2), np.random.default_rng(2))
    for _ in range(20):
        operands.begin_warm_up()
        (met,) = operands._current
        operands.refresh(4)
        assert len({id(case) for case in operands._current}) == 4
        assert all(case is not met for case in operands._current)


def test_every_timed_launch_is_looked_at(arena) -> None:
    operands = CaseOperands(arena, OwnCases(TASK, 3), np.random.default_rng(3))
    operands.refresh(4)
    for slot, case in enumerate(operands._current):
        arena.tensor(slot, TASK.outputs[0])[:] = torch.softmax(case.tensors["x"], -1)
    assert operands.check(range(4), element_wise=True) < 1e-6
    assert np.isnan(operands.check(range(4), element_wise=False))
    operands.require_untouched(4)
    arena.tensor(2, TASK.outputs[0])[4, 5] += 1e-4
    with pytest.raises(WrongOutput, match=r"out is off .* \[4, 5\]"):
        operands.check(range(4), element_wise=False)
    arena.write(1, {"x": torch.zeros(5, 6)})
    with pytest.raises(WrongOutput, match="changed its inputs"):
        operands.require_untouched(4)


@pytest.mark.parametrize("shape", ["3x5x7", "3x5x7:tn"])
def test_a_matrix_product_is_a_task_like_any_other(shape) -> None:
    gemm = Gemm.parse(shape)
    a, b = gemm.inputs
    values = {"a": torch.rand(3, 7).half(), "b": torch.rand(7, 5).half()}
    with Arena([gemm], slots=2, workspace_bytes=64) as arena:
        arena.write(1, values)
        assert torch.equal(arena.tensor(1, b), values["b"]) and arena.untouched(1, values)
        in_memory = values["b"].t() if b.column_major else values["b"]
        assert arena.row(1, b).tobytes() == in_memory.contiguous().numpy().tobytes()
        memory = CandidateMemory(arena, contract.parse_cpu('/* cuda-l2\ntarget = "cpu"\n*/'))
        table = memory.write_calls([1])
        words = arena._bytes[table : table + 8 * 7].view(np.int64).tolist()
        assert words == [3, 5, 7, *arena.offsets(1), arena.workspace_offset] and memory.arguments == ()
        assert abs(arena.offset("a", 1) - arena.offset("a", 0)) >= a.bytes + 64


@pytest.mark.parametrize("slots", [8, 128])
def test_tensors_of_some_slots_lie_right_behind_one_another_and_one_slot_is_the_usual_allocators(slots) -> None:
    gemm = Gemm(24, 40, 31)
    with Arena([gemm], slots=slots, workspace_bytes=64) as arena:

        def ordered(slot: int) -> list[tuple[int, int]]:
            return sorted((arena.offset(t.name, slot), arena.offset(t.name, slot) + t.bytes) for t in gemm.tensors)

        behind = [
            slot
            for slot in range(slots)
            if all(rounded_up(before, 64) == start for (_, before), (start, _) in itertools.pairwise(ordered(slot)))
        ]
        assert behind == [*range({8: 6, 128: 64}[slots], slots)]
        assert slots == 8 or len({tuple(np.argsort(arena.offsets(slot))) for slot in behind}) == 6
        assert all(arena.offset(tensor.name, 1) % ALIGN == 64 for tensor in gemm.tensors)
        slot = behind[0]
        for place in (stop for _, stop in ordered(slot) if stop % 64):
            arena._bytes[place] ^= 0xFF
            assert not arena.gaps_intact(slot)
            arena._bytes[place] ^= 0xFF
        values = {"a": torch.ones(24, 31).half(), "b": torch.ones(31, 40).half()}
        arena.write(slot, values)
        assert arena.untouched(slot, values) and arena.gaps_intact(slot)
        arena.at = {"b": "a"}
        memory = CandidateMemory(arena, contract.parse_cpu('/* cuda-l2\ntarget = "cpu"\n*/'))
        table = memory.write_calls([slot])
        found_a, found_b, _ = arena._bytes[table + 24 : table + 48].view(np.int64).tolist()
        assert found_a == found_b == arena.offset("a", slot)
