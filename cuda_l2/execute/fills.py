"""What memory holds before a candidate runs, so that what it read, wrote or left alone shows."""

POISON = 0x7DAD
"""An fp16 NaN no kernel has reason to write: what an output holds before a launch."""
SCRATCH_BYTE = 0xFB
"""Of scratch workspaces: as floats and as counters, nothing useful."""
GUARD_BYTE = 0xA5
"""Around operands, outputs and workspaces."""
