"""What memory holds before a candidate runs, so that what it read, wrote or left alone shows."""

SCRATCH_BYTE = 0xFB
"""Byte that scratch workspaces are filled with: as floats and as counters, nothing useful."""
GUARD_BYTE = 0xA5
"""Around operands, outputs and workspaces."""
POISONS = {
    **{"float16": bytes.fromhex("ad7d"), "bfloat16": bytes.fromhex("ad7f"), "float32": bytes.fromhex("ad7dad7f")},
    **{"float64": bytes.fromhex("ad7dfd7fad7dfd7f"), "int64": bytes.fromhex("ad7dad7dad7dad7d")},
    **{"int32": bytes.fromhex("ad7dad7d"), "int16": bytes.fromhex("ad7d")},
    **dict.fromkeys(("int8", "uint8", "bool"), bytes.fromhex("ad")),
}
"""What an output holds before a launch, by its type: a NaN that no kernel has reason to write, where there is one. One
byte may also be a right answer."""
POISON_WORDS = {dtype: int.from_bytes((poison * 4)[:4], "little") for dtype, poison in POISONS.items()}
"""The same as 32-bit words that repeat."""
