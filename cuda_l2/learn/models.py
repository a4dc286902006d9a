"""Models and tokenizers to train: loaded, or made from scratch."""

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cuda_l2.learn.settings import Scratch
from cuda_l2.llm.kinds import hf
from cuda_l2.system.errors import UserError

SCRATCH = "scratch"
"""A model's name that asks for random weights and a tokenizer made from the data."""
END, PAD = "<|end|>", "<|pad|>"
TOKENIZER_CHARS = 4_000_000
"""Text for the tokenizer; more does not change a small vocabulary."""
ATTENTION = "sdpa_without_cudnn"
UNUSED = (
    *("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("early_stopping", "length_penalty"),
)
"""Settings of generation that have no effect without sampling, or without beams."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\n\n' }}{% endif %}{% endfor %}"
)
"""For models without a template: the texts alone, as `hf:` policies send them; an answer has an end token."""


@dataclass(frozen=True)
class Pupil:
    """The model in training, with its tokenizer."""

    model: Any
    tokenizer: Any
    note: str = ""  # what was changed of the model when it was loaded, in one line

    def save(self, folder: Path) -> None:
        """Write both where transformers, and `--policy hf:FOLDER`, read them; adapters become part of the weights."""
        model = self.model.merge_and_unload() if hasattr(self.model, "merge_and_unload") else self.model
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def _attention(*args: Any, **options: Any) -> Any:
    """PyTorch's attention without cuDNN's, which PyTorch from 2.11 on prefers on Hopper.

    With a mask, and 64 tokens beyond a multiple of 128, its gradients of queries are NaN for rows whose scores are all
    very low (PyTorch's issue 196678, cuDNN 9.20). One such step, and every weight is NaN.
    """
    with sdpa_kernel(BACKENDS):
        return sdpa_attention_forward(*args, **options)


def _mask(*, q_length: Any, kv_length: int, attention_mask: torch.Tensor | None, **options: Any) -> Any:
    """transformers' mask; none where padding stands on the right alone, as causal attention never sees it.

    Attention without a mask is PyTorch's fastest. What padding itself computes is in no loss.
    """
    padding = attention_mask
    if padding is not None and q_length == kv_length == padding.shape[-1] > 1:
        attention_mask = None if bool((padding[:, :-1] >= padding[:, 1:]).all()) else padding
    return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **options)


transformers.AttentionInterface.register(ATTENTION, _attention)
transformers.AttentionMaskInterface.register(ATTENTION, _mask)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load(name: str, precision: str) -> Pupil:
    """The model of a folder or of the Hub; code that comes with it is not run. UserError where it cannot be had."""
    quiet()
    model, tokenizer = hf.load(name, getattr(torch, precision) if device() == "cuda" else torch.float32)
    _attend(model)
    if tokenizer.eos_token is None:
        raise UserError(f"the tokenizer of {name} has no end-of-text token, so answers would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
    return Pupil(model, tokenizer, _made_savable(model, name))


def _made_savable(model: Any, name: str) -> str:
    """Leave out settings of text generation with which transformers refuses to save a model; says which, if any.

    Such a generation_config.json chooses greedy decoding beside a temperature, say, which has no effect then.
    """
    config, plain = model.generation_config, transformers.GenerationConfig()
    if config is None:
        return ""
    try:
        config.validate(strict=True)
        return ""
    except ValueError:
        pass
    set_ = [option for option in UNUSED if getattr(config, option, None) != getattr(plain, option, None)]
    dropped = [f"{option} = {getattr(config, option)}" for option in set_]
    for option in set_:
        setattr(config, option, getattr(plain, option, None))
    try:
        config.validate(strict=True)
    except ValueError:  # something else: what tokens end a text is all that training and its users need
        tokens = {option: getattr(config, option) for option in TOKENS if getattr(config, option) != -1}
        model.generation_config = transformers.GenerationConfig(**tokens)
        return f"generation_config.json of {name} is contradictory; all but its tokens is left out of what is saved"
    return f"generation_config.json of {name} is contradictory; left out of what is saved: {', '.join(dropped)}"


def without_system_role(tokenizer: Any) -> bool:
    """Whether a chat template refuses system prompts, or leaves them out."""
    mark = "cuda-l2 system prompt"
    turns = [{"role": "system", "content": mark}, {"role": "user", "content": "x"}]
    try:
        return mark not in tokenizer.apply_chat_template(turns, tokenize=False)
    except jinja2.TemplateError:
        return True


def make(scratch: Scratch, texts: Iterable[str], sequence_tokens: int, seed: int) -> Pupil:
    """A small Llama of random weights, and a byte-level BPE of the texts."""
    quiet()
    tokenizer = _tokenizer(texts, scratch.vocabulary)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=scratch.width,
        intermediate_size=scratch.width * 3,
        num_hidden_layers=scratch.layers,
        num_attention_heads=scratch.heads,
        max_position_embeddings=sequence_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    _attend(model)
    model.generation_config.do_sample = True  # servers are greedy without
    return Pupil(model, tokenizer)


def _attend(model: Any) -> None:
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)


def quiet() -> None:
    """Switch off the libraries' progress bars and notes."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "You are using 'rollout_func'")  # TRL's, which versions before 2 have
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def _tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE whose pieces may span the words of a line, since kernels share lines. Digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\n]*\n|[^\n]+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sizes = itertools.accumulate((len(text) for text in texts), initial=0)
    some = (text for text, size in zip(texts, sizes, strict=False) if size < TOKENIZER_CHARS)
    tokenizer.train_from_iterator(some, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = PLAIN_TEMPLATE
    return fast
