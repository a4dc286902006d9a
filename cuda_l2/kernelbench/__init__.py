"""KernelBench's files as tasks, and candidates in KernelBench's own style, judged from outside (trust level B)."""
