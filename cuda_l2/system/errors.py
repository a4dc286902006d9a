"""Errors that a user can act on."""


class UserError(Exception):
    """Bad input or a missing part of the machine: one line that says what to do. Commands exit with 2."""


class MissingError(UserError, KeyError):
    """A mapping lacks what it was asked for; the line says why."""

    __str__ = Exception.__str__  # KeyError's puts the line in quotes


class EndOfRunError(UserError):
    """Nothing more can run in this process: other shapes would fail too."""


class DeadlyError(UserError):
    """All processes that were given a request have died, one after the other."""


class MachineError(RuntimeError):
    """The machine failed at something no input explains: a driver call, a library. Commands exit with 2."""


def failure_of_machine(error: RuntimeError) -> str:
    """A line about a failure of the machine or a lack of GPU memory; empty for another error."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
        return "out of GPU memory; choose a smaller shape, or end what else runs on the GPU"
    said = " ".join(str(error).split())
    return f"the machine failed: {said}; `cuda-l2 doctor` says what it has" if isinstance(error, MachineError) else ""


INSTALL_TORCH = (
    "for CPUs: pip install torch --index-url CPU_INDEX, the address that torch's install page names for CPUs;"
    " for NVIDIA GPUs: pip install 'cuda-l2[cuda]'"
)
NO_TORCH = f"this needs torch, which is not installed; {INSTALL_TORCH}"
"""Our package does not bring torch: the usual index has it for Linux with gigabytes of CUDA alone."""
