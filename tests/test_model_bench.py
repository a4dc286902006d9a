"""A model's layers without and with tuned kernels: what is timed, ratios, tables; on a GPU the graphs themselves."""

import csv
import io
import json
import math

import pytest
import torch
from test_decoder import DECODING, LLAMA, decoder_of

from cuda_l2.runs.decoder import HEAD, PREFILL, Case, Decoder, config_of
from cuda_l2.runs.model_bench import COLUMNS, ROUNDS, WARM_UP, compare, rows_csv, run, table
from cuda_l2.runs.settings import COMPILE, COMPILE_AHEAD, EAGER, FORCED, FORCED_AHEAD, MAX_AUTOTUNE, MODEL_ARMS

US = {
    **{EAGER: (400.0, 300.0), COMPILE: (250.0, 200.0), COMPILE_AHEAD: (250.0, 190.0)},
    **{MAX_AUTOTUNE: (240.0, 240.0), FORCED: (240.0, 220.0), FORCED_AHEAD: (240.0, 210.0)},
}
"""Scripted times without and with tuned kernels."""


class ScriptedTimer:
    """In place of a GPU: calls run once, times are US."""

    def __init__(self, restore) -> None:
        self.restore, self.modules, self.declared, self.order, self.open = restore, {}, set(), [], True

    def prepare(self, side, call):
        self.restore()
        self.modules[side] = call.args[0]
        self.declared |= {side for module in call.args[0].modules() if getattr(module, "weights_ahead", False)}
        return call()

    def sample(self, side) -> float:
        self.order.append(side)
        arm, ours = side
        return US[arm][ours]

    def close(self) -> None:
        self.open = False


@pytest.fixture
def compiled(monkeypatch) -> list[dict[str, object]]:
    """Options of what would be compiled: the module itself stands for it."""
    asked: list[dict[str, object]] = []

    def compile_(module, **options):
        asked.append(options)
        return module

    monkeypatch.setattr(torch, "compile", compile_)
    return asked


def test_every_arm_is_timed_without_and_with_tuned_kernels_in_each_round(tmp_path, compiled) -> None:
    decoder, timers = decoder_of(LLAMA, tmp_path), []
    found = compare(decoder, DECODING, MODEL_ARMS, lambda restore: timers.append(ScriptedTimer(restore)) or timers[-1])
    (timer,) = timers
    own = (EAGER, COMPILE, MAX_AUTOTUNE)  # the others have a plain side of these
    sides = {(arm, True) for arm in MODEL_ARMS} | {(arm, False) for arm in own}
    rounds = [set(timer.order[at : at + len(sides)]) for at in range(0, len(timer.order), len(sides))]
    assert rounds == [sides] * (WARM_UP + ROUNDS) and not timer.open
    plain, ours = decoder.plain.base_model, decoder.ours.base_model
    accelerated = {side for side, module in timer.modules.items() if module is ours}
    assert accelerated == {(EAGER, True), (COMPILE, True), (COMPILE_AHEAD, True), (FORCED, True), (FORCED_AHEAD, True)}
    assert timer.declared == {(COMPILE_AHEAD, True), (FORCED_AHEAD, True)}
    assert not decoder.ours.base_model.layers[0].mlp.up_proj.weights_ahead
    assert all(timer.modules[side] is plain for side in sides - accelerated)
    modes = [(options["options"] or {}).get("max_autotune", False) for options in compiled]
    assert modes == [False] * 3 + [True] * 4 and all(options["dynamic"] is False for options in compiled)
    assert [each.arm for each in found] == [*MODEL_ARMS]
    for each in found:
        us, ours_us = US[each.arm]
        assert (each.us, each.ours_us) == (us / 2, ours_us / 2)  # two layers
        assert each.ratio.low == each.ratio.estimate == pytest.approx(us / ours_us)
        assert each.bar == MAX_AUTOTUNE and each.over_bar.estimate == pytest.approx(240 / ours_us)
        assert each.difference == 0


def test_a_result_that_is_wrong_shows_as_a_difference(tmp_path) -> None:
    class Wrong(ScriptedTimer):
        def prepare(self, side, call):
            return super().prepare(side, call) * (1.5 if side[1] else 1.0)

    (found,) = compare(decoder_of(LLAMA, tmp_path), DECODING, [EAGER], Wrong)
    assert found.difference == pytest.approx(0.5, rel=0.02)


def test_a_step_for_which_memory_does_not_suffice_is_left_out(tmp_path) -> None:
    class Small(ScriptedTimer):
        def prepare(self, side, call):
            result = super().prepare(side, call)
            if result.shape[1] > 1:
                raise torch.OutOfMemoryError
            return result

    told, cases = [], [Case(PREFILL, 1, 8), DECODING]
    found = list(run(decoder_of(LLAMA, tmp_path), cases, [EAGER], told.append, Small))
    assert [each.case for rows in found for each in rows] == [DECODING]
    assert len(told) == 2 and "left out" in told[0] and "decode, batch 2" in told[1]


def test_tables_say_the_same_for_people_and_programs(tmp_path) -> None:
    decoder = decoder_of(LLAMA, tmp_path)
    found = [each for case in (DECODING, Case(HEAD, 2)) for each in compare(decoder, case, [EAGER], ScriptedTimer)]
    assert "| tiny | decode | 2 | eager | 200.0 | 150.0 | 1.333 [1.333, 1.333] |  | - | 0.0e+00 |" in table(
        "tiny", found
    )
    rows = [*csv.DictReader(io.StringIO(rows_csv("tiny", 2, found)))]
    assert tuple(rows[0]) == COLUMNS
    assert [(row["phase"], row["us"], row["cached"], row["over_bar"]) for row in rows] == [
        *[("decode", "200.000", "7", ""), ("head", "400.000", "0", "")],
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DECODING, Case(PREFILL, 1, 64), Case(HEAD, 2)], ids=str)
def test_graphs_of_a_models_steps_replay_what_eager_calls_compute(case, gpu, tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "hidden_size": 512, "intermediate_size": 1024}))
    found = compare(Decoder(config_of(str(file), 2), "cuda"), case, [EAGER, COMPILE])
    for each in found:
        assert 0 < each.us < math.inf and 0 < each.ours_us < math.inf
        assert each.difference < 0.05 and each.bar == COMPILE
