"""Errors that a user can act on."""


class UserError(Exception):
    """Bad input or a missing part of the machine: one line that says what to do. Commands exit with 2."""


class MachineError(RuntimeError):
    """The machine failed at something no input explains: a driver call, a library. Commands exit with 2."""
