"""Errors that a user can act on."""


class UserError(Exception):
    """Bad input or a missing part of the machine: one line that says what to do. Commands exit with 2."""
