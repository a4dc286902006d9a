"""Tasks of our own: one table a group. Sizes: on the CPU a reference takes milliseconds, on a GPU it fills the chip."""
