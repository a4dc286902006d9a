"""Baselines: implementations that kernels are compared with, one file each; `_base` finds them."""
