"""Tasks other than matrix products: our own, and KernelBench's from a checkout. docs/tasks.md says how to add one."""

from cuda_l2.errors import UserError
from cuda_l2.records import Gemm, Operation, Task


def parse(text: str, target: str = "cpu") -> Task:
    """`512x512x512:tn` as a matrix product, `softmax:rows=64:float16` as one of our own tasks at these sizes.

    target: cpu or cuda, for the sizes that are left out.
    """
    if text.strip()[:1].isdigit():
        return Gemm.parse(text)
    from cuda_l2.tasks._base import definition  # noqa: PLC0415 - torch loads only where it is needed

    name, revision, sizes, dtype = Operation.read_identity(text.strip())
    if revision:
        raise UserError(f"{text!r}: tasks of our own have no revision")
    try:
        known = definition(name)
    except UserError as error:
        raise UserError(f"{text!r} is no shape, as 512x512x512:tn is, and {error}") from None
    return known.task(sizes, dtype, target)
