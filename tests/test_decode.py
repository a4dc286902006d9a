"""Answers from a static cache are those of transformers."""

import pytest
import torch
import transformers

from cuda_l2.learn import decode

END, PAD = 0, 1


@pytest.fixture(scope="module")
def llama():
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return transformers.LlamaForCausalLM(config).eval()


def test_the_likeliest_tokens_are_those_of_transformers(llama, monkeypatch) -> None:
    monkeypatch.setattr(decode, "COLUMNS", 16)  # so that answers go through several widths
    monkeypatch.setattr(decode, "PROMPTS", 2)
    prompts = [[5, 6, 7, 8, 9], [10, 11], [5, 6, 7, 8, 9], [20] * 30]
    assert decode.serves(llama)
    written = decode.write(llama, prompts, 50, 1e-6, PAD, END)
    for prompt, answer in zip(prompts, written, strict=True):
        whole = llama.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False)[0, len(prompt) :].tolist()
        assert answer == whole + [END] * (50 - len(whole))
    assert written[0] != written[1]


def test_a_temperature_draws_by_the_models_shares(llama) -> None:
    prompt = [5, 6, 7]
    with torch.no_grad():
        shares = torch.softmax(llama(torch.tensor([prompt])).logits[0, -1] / 2.0, -1)
    torch.manual_seed(0)
    drawn = torch.tensor(decode.write(llama, [prompt] * 4000, 1, 2.0, PAD, END))[:, 0]
    found = torch.bincount(drawn, minlength=60) / 4000
    assert float((found - shares).abs().max()) < 5 * 0.5 / 4000**0.5


def test_other_kinds_of_models_are_left_to_transformers(llama) -> None:
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{**llama.config.to_dict(), "attention_bias": True},
        )
    )
    assert not decode.serves(other)
