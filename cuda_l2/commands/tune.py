"""cuda-l2 tune: which kernel serves which shape on this GPU, by timing the pack's kernels beside torch's own."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text

if TYPE_CHECKING:
    from cuda_l2.library.deploy.choices import Choice


def command(
    *shapes: str,
    model_config: Path | None = None,
    rows: str = "1-256",
    warm: Annotated[bool, Parameter(negative=())] = False,
    one_stream: Annotated[bool, Parameter(negative=())] = False,
    weights_ahead: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Time every kernel of the pack that serves a shape beside torch's own, and keep the fastest for calls to come.

    The choices belong to this GPU, driver, toolkit and pack; a kernel serves where it wins clearly, torch elsewhere.

    Args:
        shapes: As in 16x4096x4096:tn:bf16; 1-512x4096x4096:tn:bf16 takes 1, 2, 4 ... 64, then 128, 192, 256, 320 ...
            512 rows.
        model_config: config.json of a Hugging Face decoder; the shapes of its linear layers are tuned too.
        rows: Tokens at once for which the layers of --model-config are tuned.
        warm: Find B in the L2 cache. If not given it comes from memory, as a model's weights do.
        one_stream: Also take kernels whose blocks wait for one another. Two of them at once on the GPU would wait for
            ever: use it only where all matrix products on the GPU follow one another.
        weights_ahead: Choose for layers that are accelerated with weights_ahead=True (docs/deploy.md), also among
            kernels that read B before the launch ahead has ended.
    """
    texts = [*shapes, *(f"{rows}x{layer}" for layer in layers(model_config))] if model_config else shapes
    wanted = [Gemm.parse(shape) for text in texts for shape in expanded(text)]
    if not wanted:
        raise UserError("name the shapes to tune, as in 1-64x4096x4096:tn:bf16")
    from cuda_l2.library.deploy import vendor
    from cuda_l2.library.deploy.tuning import tune
    from cuda_l2.system.text import counted

    def told(choice: "Choice") -> None:
        gain = choice.vendor_us / choice.us - 1 if choice.us else 0.0
        server = f"{choice.family} {choice.kernel}" if choice.served else "torch"
        print(f"{choice.shape}: {server}; kernel {choice.us:.2f} us, torch {choice.vendor_us:.2f} us ({gain:+.1%})")

    found = tune(wanted, cold=not warm, one_stream=one_stream, weights_ahead=weights_ahead, progress=told)
    served = sum(choice.served for choice in found)
    algorithms = sum(choice.served and choice.family == vendor.FAMILY for choice in found)
    print(
        f"{counted(len(found), 'shape')} tuned; our kernels serve {served - algorithms}, algorithms of cuBLASLt"
        f" {algorithms}, torch's own {len(found) - served}"
    )


def layers(path: Path) -> list[str]:
    """The linear layers of a decoder by its config.json, each once, as NxK:tn:bf16; UserError where it is none."""
    try:
        config = json.loads(read_text(path))
        hidden, heads, inner = (
            int(config[name]) for name in ("hidden_size", "num_attention_heads", "intermediate_size")
        )
        size = int(config.get("head_dim") or hidden // heads)
        keys = int(config.get("num_key_value_heads") or heads) * size
        sizes = [(heads * size, hidden), (keys, hidden), (hidden, heads * size), (inner, hidden), (hidden, inner)]
        sizes.append((int(config["vocab_size"]), hidden))
        dtype = {"float16": "", "bfloat16": ":bf16"}[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no config.json of a decoder in fp16 or bf16: {error!r}") from None
    return [f"{n}x{k}:tn{dtype}" for n, k in dict.fromkeys(sizes)]


def expanded(text: str) -> Iterator[str]:
    """A shape, or those of a range of rows: its ends, powers of two up to 64, then multiples of 64, four an octave.

    From one to the next rows at most double, so that all rows between them can be served (choices.REACH). Beyond 64
    they are where tiles of 64 or 128 rows end: one more row takes another row of tiles.
    """
    match = re.fullmatch(r"(\d+)-(\d+)(x.+)", text.strip())
    if not match:
        yield text
        return
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last:
        raise UserError(f"{text!r}: a range of rows goes from a least to a greatest number, as in 1-64x4096x4096")
    sizes = {first, last}
    for octave in (1 << power for power in range(last.bit_length())):
        sizes.update(range(octave, 2 * octave, octave if octave < 64 else max(64, octave // 4)))
    yield from (f"{size}{match[3]}" for size in sorted(sizes) if first <= size <= last)
