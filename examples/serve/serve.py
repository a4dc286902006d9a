"""`transformers serve` with accelerated models: transformers' own server, hooked where it loads a model.

    pip install 'PATH_OF_THE_WHEEL[cuda]' 'transformers[serving]>=5'
    python examples/serve/serve.py MODEL --port 8000              # options: those of `transformers serve`
    python examples/serve/serve.py --rows 1-64 MODEL --continuous-batching

MODEL's layers are tuned before the server listens, where they have no choice on this GPU yet. A model that a request
loads is served by the choices that there are: tuning would disturb other requests, and they the tuning.
"""

import argparse
import sys
import threading
from importlib import metadata
from typing import Any

import torch
from transformers import PreTrainedModel

import cuda_l2
from cuda_l2.commands.tune import expanded
from cuda_l2.library.deploy import dispatch
from cuda_l2.library.deploy.accelerate import AcceleratedLinear
from cuda_l2.library.deploy.tracing import gemm_of


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.usage = "%(prog)s [-h] [--rows ROWS] [--plain] [MODEL] [options of transformers serve]"
    options.allow_abbrev = False  # what it does not know is the server's
    options.add_argument("--rows", default="1-256", help="tokens at once that are tuned; default %(default)s")
    options.add_argument("--plain", action="store_true", help="hook nothing, to compare with")
    given, others = options.parse_known_args()
    try:
        command = next(iter(metadata.entry_points(group="console_scripts", name="transformers")), None)
        if command is None:
            raise cuda_l2.UserError("this transformers has no server: pip install 'transformers[serving]>=5'")
        if not given.plain:
            hook(given.rows)
        sys.argv = ["transformers", "serve", *others]
        command.load()()
    except (cuda_l2.UserError, ImportError) as error:  # transformers names what its server lacks
        sys.exit(f"serve.py: {error}")


def hook(rows: str) -> None:
    """Have every `from_pretrained` in this process return an accelerated model. rows: as in 1-64, for `prepare`."""
    load = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: type, *args: Any, **named: Any) -> Any:
        loaded = load(cls, *args, **named)
        prepare(loaded[0] if isinstance(loaded, tuple) else loaded, rows)  # a tuple where loading is reported on
        return loaded

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def prepare(model: torch.nn.Module, rows: str) -> None:
    """Accelerate a model, tune its layers for numbers of rows, and compute each product once, so that none is new then.

    UserError where no layer can be accelerated.
    """
    layers = [layer for layer in cuda_l2.accelerate(model).modules() if type(layer) is AcceleratedLinear]
    products = {}
    for shape in expanded(f"{rows}x1x1"):
        for layer in layers:
            x = layer.weight.new_zeros(int(shape.split("x")[0]), layer.in_features)
            products[gemm_of(x, layer.weight, transposed=True)] = layer, x
    products.pop(None, None)  # of a type that kernels do not take
    if not products:
        raise cuda_l2.UserError("no torch.nn.Linear in fp16 or bf16 has torch's own forward: --plain serves the model")
    tuned = tune([*products]) if x.is_cuda else "on the CPU torch's kernels and those of cuda-l2 optimize serve"
    with torch.no_grad():
        for layer, x in products.values():
            layer(x)
    print(f"cuda-l2: {len(layers)} layers accelerated, {len(products)} products; {tuned}", file=sys.stderr, flush=True)


def tune(gemms: list[cuda_l2.Gemm]) -> str:
    """Tune on the current GPU what has no choice yet; a sentence on what serves."""
    try:
        if threading.current_thread() is threading.main_thread():
            known = dispatch.known(torch.cuda.current_device())
            cuda_l2.tune([gemm for gemm in gemms if gemm not in known])
    except cuda_l2.UserError as error:  # another GPU, no pack
        return f"torch's kernels serve: {error}"
    known = dispatch.known(torch.cuda.current_device())
    return f"tuned kernels serve {sum(gemm in known and known[gemm].served for gemm in gemms)}"


if __name__ == "__main__":
    main()
