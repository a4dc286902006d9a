"""Files that the program inside the sandbox leaves in its folder. Standard library only."""

TASK, RESULT, TENSORS, ERROR = "task.py", "result.json", "tensors", "error"
LINE = 64
"""Tensors lie at multiples of 64 bytes of their file, so that they can be used where they are read."""
