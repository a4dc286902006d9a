"""Which parts of a module a kernel could replace: subgraphs of its torch.fx graph, each a task of its own.

A part has one result. It is an anchor (a contraction, attention, a normalisation, a reduction or pooling) with the
element-wise operations around it, or element-wise operations alone; views in between come along. A contraction takes
what follows it, not what comes before: its operands are read more than once. What is random, mutates, or returns
several tensors that are all used stays PyTorch.
"""

import enum
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cuda_l2.records import DTYPE_BYTES, Operation, Tensor
from cuda_l2.system.text import line_of

MAX_NODES = 64


class Kind(enum.StrEnum):
    """Kind of a part's anchor, in the order in which anchors choose their neighbours."""

    CONTRACTION = "contraction"
    ATTENTION = "attention"
    NORMALISATION = "normalisation"
    REDUCTION = "reduction"
    POOLING = "pooling"
    ELEMENTWISE = "elementwise"
    MOVEMENT = "movement"  # views and copies, never a part of their own


_NAMES = {
    Kind.CONTRACTION: (
        *("linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "addbmm", "mv", "dot", "einsum", "convolution"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "bilinear"),
    ),
    Kind.ATTENTION: ("scaled_dot_product_attention",),
    Kind.NORMALISATION: (
        *("softmax", "log_softmax", "layer_norm", "group_norm", "instance_norm", "rms_norm", "native_layer_norm"),
        *("native_group_norm", "_softmax", "_log_softmax"),
    ),
    Kind.REDUCTION: (
        *("logsumexp", "var", "std", "norm", "linalg_vector_norm", "cumsum", "cumprod", "mse_loss", "huber_loss"),
        *("smooth_l1_loss", "kl_div", "cosine_similarity"),
    ),
    Kind.POOLING: (
        *(f"{way}_pool{rank}d" for way in ("max", "avg", "adaptive_avg", "adaptive_max") for rank in (1, 2, 3)),
        "max_pool2d_with_indices",
    ),
    Kind.ELEMENTWISE: (
        *("hardswish", "prelu", "log_sigmoid", "glu", "_to_copy", "tril", "triu"),
        "_native_batch_norm_legit_no_training",  # its first result: a factor and a summand a channel
    ),
    Kind.MOVEMENT: (
        *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "flatten"),
        *("slice", "select", "contiguous", "clone", "alias", "unflatten", "movedim"),
    ),
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}


class NotTraceable(Exception):
    """The module's graph cannot be had, and why in one line."""


@dataclass(frozen=True)
class Part:
    """One subgraph: the task it is, and a module of its own that computes it from tensors by position.

    The arguments are the task's inputs, then its weights, in order.
    """

    name: str
    kind: Kind
    operators: tuple[str, ...]
    task: Operation
    module: fx.GraphModule


@dataclass(frozen=True)
class Plan:
    """A module with its parts cut out; each is called as a submodule of the part's name."""

    module: fx.GraphModule
    parts: tuple[Part, ...]
    operators: int  # of the whole, views not counted

    def replace(self, name: str, function: Callable[..., torch.Tensor]) -> None:
        """From now on compute a part by this function of the same arguments."""
        if name not in {part.name for part in self.parts}:
            raise KeyError(name)
        setattr(self.module, name, function if isinstance(function, nn.Module) else _Function(function))


class _Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*tensors)


def plan(
    module: nn.Module, inputs: Sequence[object], *, name: str = "module", revision: str = "", least: int = 2
) -> Plan:
    """Cut a module into parts of at least `least` operators; NotTraceable where its graph cannot be had.

    name, revision: what the parts' tasks are named after.
    """
    graph_module = _trace(module, inputs)
    operators = [node for node in graph_module.graph.nodes if _kind(node) not in (None, Kind.MOVEMENT)]
    order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    ordered = (sorted(group, key=order.__getitem__) for group in _groups(graph_module.graph))
    groups = [group for group in ordered if sum(_kind(node) is not Kind.MOVEMENT for node in group) >= least]
    groups.sort(key=lambda group: order[group[-1]])
    parts = tuple(_cut(graph_module, f"part_{index}", group, name, revision) for index, group in enumerate(groups))
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return Plan(graph_module, parts, len(operators))


def _trace(module: nn.Module, inputs: Sequence[object]) -> fx.GraphModule:
    """The module as a graph of functional ATen operators over its own parameters."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, tuple(inputs), strict=False).run_decompositions({})
            traced = exported.module(check_guards=False)
    except Exception as error:  # noqa: BLE001 - export raises what the module raises, and much of its own
        raise NotTraceable(line_of(error)) from None
    assert isinstance(traced, fx.GraphModule)
    return traced


def _kind(node: fx.Node) -> Kind | None:
    """Kind of an operator; None where it stays PyTorch's."""
    if node.op != "call_function" or _elements(node) == 0:
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        alone = isinstance(source, fx.Node) and len(source.users) == 1 and node.args[1] == 0
        return Kind.MOVEMENT if alone else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    tags = node.target.tags
    if torch.Tag.nondeterministic_seeded in tags or node.target._schema.is_mutable:
        return None
    named = _KINDS.get(node.target._schema.name.split("::")[1])
    if named:
        return named
    if torch.Tag.pointwise in tags:
        return Kind.ELEMENTWISE
    return Kind.REDUCTION if torch.Tag.reduction in tags else None


def _elements(node: fx.Node) -> int:
    """Elements of the first tensor that a node gives; 0 where that is nothing a task can name."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor) or str(value.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        return 0
    return value.numel()


def _groups(graph: fx.Graph) -> Iterator[set[fx.Node]]:
    taken: set[fx.Node] = set()
    for kind in Kind:
        if kind is Kind.MOVEMENT:
            continue
        for node in graph.nodes:
            if node in taken or _kind(node) is not kind:
                continue
            if kind is Kind.ELEMENTWISE and _elements(node) == 1:
                continue  # a counter
            group = _grown(node, taken)
            if group:
                taken |= group
                yield group


def _grown(anchor: fx.Node, taken: set[fx.Node]) -> set[fx.Node]:
    """The largest group around an anchor that has one exit; empty where there is none."""

    def joins(node: fx.Node) -> bool:
        return node not in taken and _kind(node) in (Kind.ELEMENTWISE, Kind.MOVEMENT)

    group, best = {anchor}, set[fx.Node]()
    while len(group) <= MAX_NODES:
        exits = _exits(group)
        if len(exits) == 1 and _ends_well(exits[0]):
            best = set(group)
        users = {user for node in group for user in node.users if user not in group}
        # the first in the graph's order: what closes a fork comes after both of its ways
        following = next((node for node in anchor.graph.nodes if node in users and joins(node)), None)
        if following is None:
            break
        group.add(following)
    group = best
    closed = {anchor} if _kind(anchor) in (Kind.CONTRACTION, Kind.ATTENTION, Kind.POOLING) else set()
    while len(group) <= MAX_NODES:
        sources = {source for node in group - closed for source in node.all_input_nodes} - group
        joining = {source for source in sources if joins(source) and set(source.users) <= group}
        if not joining:
            break
        group |= joining
    return _trimmed(group)


def _exits(group: set[fx.Node]) -> list[fx.Node]:
    """Nodes whose result is wanted outside."""
    return [node for node in group if any(user not in group for user in node.users)]


def _ends_well(node: fx.Node) -> bool:
    """A result that is one tensor and not another way to look at one, but for the first of an operator's several."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return _kind(node) is not Kind.MOVEMENT or node.target is operator.getitem


def _trimmed(group: set[fx.Node]) -> set[fx.Node]:
    """Without the views at its beginning: they cost nothing outside."""
    views = {node for node in group if _kind(node) is Kind.MOVEMENT}
    while leading := {node for node in views & group if group.isdisjoint(node.all_input_nodes)}:
        group = group - leading
    return group


def _cut(parent: fx.GraphModule, name: str, nodes: list[fx.Node], task: str, revision: str) -> Part:
    """Move these nodes, in the graph's order, to a module of their own and call it in their place."""
    members = set(nodes)
    sources = list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in members))
    inputs = [source for source in sources if source.op != "get_attr"]
    weights = [source for source in sources if source.op == "get_attr"]
    (exit_node,) = _exits(members)
    graph, copies, tensors = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, Tensor]()
    for source in (*inputs, *weights):
        given = str(source.target).replace(".", "_") if source.op == "get_attr" else source.name
        tensors[source] = _tensor(source, f"{given}_in" if given == "out" else given)
        copies[source] = graph.placeholder(tensors[source].name)
        copies[source].meta = dict(source.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[exit_node])
    module = fx.GraphModule(nn.Module(), graph)
    kinds = [kind for node in nodes if (kind := _kind(node))]
    operators = tuple(_operator_name(n) for n, k in zip(nodes, kinds, strict=True) if k is not Kind.MOVEMENT)
    record = Operation(
        f"{task}/{name}-{'-'.join(operators[:6])}",
        revision=revision,
        inputs=tuple(tensors[source] for source in inputs),
        weights=tuple(tensors[source] for source in weights),
        outputs=(_tensor(exit_node, "out"),),
        flops=_flops(module, [source.meta.get("val") for source in (*inputs, *weights)]),
    )
    parent.add_submodule(name, module)
    with parent.graph.inserting_before(exit_node):
        call = parent.graph.call_module(name, (*inputs, *weights))
    call.meta = dict(exit_node.meta)
    exit_node.replace_all_uses_with(call)
    for node in reversed(nodes):
        parent.graph.erase_node(node)
    return Part(name, min(kinds, key=list(Kind).index), operators, record, module)


def _tensor(node: fx.Node, name: str) -> Tensor:
    value = node.meta["val"]
    return Tensor(name, str(value.dtype).removeprefix("torch."), tuple(int(size) for size in value.shape))


def _operator_name(node: fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.name.split("::")[1].strip("_")


def _flops(module: nn.Module, arguments: Sequence[object]) -> int:
    """FLOP of the contractions, as PyTorch counts them."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, torch.no_grad():
        fakes = [torch.empty(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments]
        module(*fakes)
    return int(counter.get_total_flops())
