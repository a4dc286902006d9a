"""A second look at kernels whose reward jumps: measured on other inputs, elsewhere, and shown to a checker model."""
