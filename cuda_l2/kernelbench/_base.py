"""Session of a module in KernelBench's style: launches on cases whose exact results are computed elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cuda_l2.kernelbench.cases import ForeignCases
from cuda_l2.kernelbench.opened import ForeignCase
from cuda_l2.kernelbench.process import Module
from cuda_l2.tasks._base import Tensors
from cuda_l2.verify._base import CheckOf, Judged, checks_in


@dataclass
class ModuleSession(Judged):
    """One candidate in its process.

    allowed: PyTorch's operators that it may call, without `aten::`, `torch.compile`, or `all`. own_weights: its weights
    are never set. timed: its present instance was timed.
    """

    module: Module
    cases: ForeignCases
    allowed: frozenset[str] = frozenset()
    one_shape: bool = False
    own_weights: bool = False
    timed: bool = False
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say this with the verdict, once."""
        if text not in self.notes:
            self.notes.append(text)

    def make(self, case: ForeignCase) -> None:
        """A new instance for a case's arguments, under the seed of its weights."""
        self.module.make(case.weights_seed, case.initial)

    def launch(self, *cases: ForeignCase, load: bool = True) -> list[Tensors]:
        """Results of launches on these cases in one run; CheckFailed where an input was changed.

        load: set the weights whose names agree before.
        """
        weights = self.weights_of(cases[0]) if load else {}
        self.module.prepare([case.call() for case in cases], weights)
        self.module.run()
        found = [self.module.output(index) for index in range(len(cases))]
        self.module.require_untouched()
        return found

    def weights_of(self, case: ForeignCase) -> Tensors:
        """Values that its weights are set to, by their keys."""
        return {} if self.own_weights else case.weights

    def unnamed(self, case: ForeignCase) -> list[str]:
        """Weights of the module that the candidate has under no such name."""
        return sorted(set(case.keys.values()) - self.module.state)


class ModuleCheck(CheckOf[ModuleSession]):
    """A check of modules. late: it runs after the timing, on a CPU before it too."""

    late = False


def module_checks() -> Sequence[ModuleCheck]:
    """Every check in `checks/`, in order."""
    checks: list[ModuleCheck] = checks_in("cuda_l2.kernelbench.checks")
    return checks
