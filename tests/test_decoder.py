"""A decoder for timing: its config, both of its models, its steps and the shapes that come up."""

import copy
import json

import pytest
import torch
import transformers

from cuda_l2.library.deploy.accelerate import AcceleratedLinear
from cuda_l2.runs.decoder import DECODE, HEAD, PREFILL, Case, Decoder, Step, cases_of, config_of, shapes
from cuda_l2.runs.settings import DecoderSettings
from cuda_l2.system.errors import UserError

LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 100},
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "torch_dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
    },
}
QWEN = {**LLAMA, "model_type": "qwen2", "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}
DECODING = Case(DECODE, 2, cached=7)


def decoder_of(fields: dict[str, object], folder, **options: bool) -> Decoder:
    """With two of its three layers."""
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    return Decoder(config_of(str(file), 2), "cpu", **options)


@pytest.mark.parametrize("fields", [LLAMA, QWEN], ids=["llama", "qwen2"])
def test_the_accelerated_model_shares_its_parameters_and_gives_the_same_logits(fields, tmp_path) -> None:
    decoder, ids = decoder_of(fields, tmp_path), torch.arange(12).reshape(2, 6)
    assert decoder.layers == len(decoder.plain.base_model.layers) == 2
    assert type(decoder.ours.base_model.layers[0].mlp.up_proj) is AcceleratedLinear
    assert type(decoder.plain.base_model.layers[0].mlp.up_proj) is torch.nn.Linear
    pairs = zip(decoder.plain.parameters(), decoder.ours.parameters(), strict=True)
    assert all(plain is ours and plain.dtype == torch.bfloat16 for plain, ours in pairs)
    assert torch.equal(decoder.plain(input_ids=ids).logits, decoder.ours(input_ids=ids).logits)


def test_a_step_without_a_mask_gives_what_transformers_own_attention_gives(tmp_path) -> None:
    decoder = decoder_of({**LLAMA, "torch_dtype": "float16"}, tmp_path)
    config = copy.deepcopy(decoder.config)
    usual = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    usual.load_state_dict(decoder.plain.state_dict())
    plain = decoder.plain.float()
    step = Step(decoder, Case(PREFILL, 2, 8))
    ids = step.inputs["input_ids"]
    expected = usual.eval().base_model(input_ids=ids).last_hidden_state
    assert torch.allclose(step.run(plain.base_model), expected, atol=1e-5)
    last = {
        "input_ids": ids[:, 7:],
        "position_ids": torch.tensor([[7]]),
        "past_key_values": step.inputs["past_key_values"],
    }
    for layer in last["past_key_values"].layers:
        layer.cumulative_length.fill_(7)
    assert torch.allclose(plain.base_model(**last).last_hidden_state, expected[:, 7:], atol=1e-5)


@pytest.mark.parametrize("case", [DECODING, Case(PREFILL, 1, 8), Case(HEAD, 2)], ids=str)
def test_a_step_repeats_on_what_its_cache_held(case, tmp_path) -> None:
    decoder = decoder_of(LLAMA, tmp_path)
    step, results = Step(decoder, case), []
    with torch.no_grad():
        for _ in range(3):
            step.restore()
            results.append(step.run(step.part(decoder.plain)))
    assert results[0].shape == (case.batch, case.tokens, 100 if case.phase == HEAD else 64)
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_products_of_all_steps_are_found_with_those_that_have_a_bias(tmp_path) -> None:
    layers = ("64x64", "32x64", "128x64", "64x128")
    cases = [DECODING, Case(PREFILL, 1, 8), Case(HEAD, 2)]
    expected = [f"{rows}x{layer}:tn:bf16" for rows in (2, 8) for layer in layers] + ["2x100x64:tn:bf16"]
    for fields in (LLAMA, QWEN):
        assert [str(gemm) for gemm in shapes(decoder_of(fields, tmp_path), cases)] == expected


@pytest.mark.parametrize("fields", [LLAMA, QWEN], ids=["llama", "qwen2"])
def test_merged_projections_give_the_same_with_fewer_products(fields, tmp_path) -> None:
    decoder, merged = (decoder_of(fields, tmp_path, merged=each) for each in (False, True))
    ids = torch.arange(12).reshape(2, 6)
    expected = decoder.plain(input_ids=ids).logits
    for model in (merged.plain, merged.ours):
        assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-2)
    assert type(merged.ours.base_model.layers[0].mlp.projections.linear) is AcceleratedLinear
    found = {str(gemm) for gemm in shapes(merged, [DECODING])}
    assert found == {f"2x{layer}:tn:bf16" for layer in ("64x64", "256x64", "64x128", "128x64")}
    step = Step(merged, Case(PREFILL, 1, 8))
    assert step.run(merged.ours.base_model).shape == (1, 8, 64)


def test_a_model_of_another_kind_is_not_merged(tmp_path) -> None:
    with pytest.raises(UserError, match="llama and qwen2, not mistral"):
        decoder_of({**LLAMA, "model_type": "mistral"}, tmp_path, merged=True)


def test_the_models_known_by_name_have_their_sizes() -> None:
    for name, hidden, parameters in (("llama-8b", 4096, 8.0e9), ("qwen-1.5b", 1536, 1.5e9)):
        config = config_of(name, 99)
        assert config.hidden_size == hidden and config.dtype == torch.bfloat16
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert sum(each.numel() for each in model.parameters()) == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "num_hidden_layers"),
        ([], "no config.json of a decoder"),
        ({**LLAMA, "torch_dtype": "float32"}, "float16 and bfloat16"),
        ({**LLAMA, "model_type": "nothing"}, "nothing"),
        ({**LLAMA, "hidden_size": "wide"}, "no config.json of a decoder"),
        ({"model_type": "vit", "num_hidden_layers": 2}, "no causal language model"),
    ],
)
def test_what_is_no_decoder_is_refused_in_one_line(fields, says, tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=says):
        config_of(str(file), 2)


def test_a_model_with_sliding_windows_is_refused(tmp_path) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3}
    with pytest.raises(UserError, match="sliding windows"):
        Step(decoder_of({**QWEN, **sliding}, tmp_path), DECODING)


def test_the_cases_are_each_batch_of_each_phase() -> None:
    found = cases_of(DecoderSettings(batch="1, 16", context=512, prefill=2048))
    assert found == [
        *(Case(DECODE, batch, cached=511) for batch in (1, 16)),
        Case(PREFILL, 1, 2048),
        *(Case(HEAD, batch) for batch in (1, 16)),
    ]
    assert PREFILL not in {case.phase for case in cases_of(DecoderSettings(prefill=0))}
    for batch in ("", "0", "1,x"):
        with pytest.raises(UserError, match="--batch"):
            cases_of(DecoderSettings(batch=batch))
