"""Reviews of kernels whose reward jumps: measured on other inputs and a second device, and read by a checker model."""
