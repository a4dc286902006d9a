"""One file a check of modules in KernelBench's style; see `_base.ModuleCheck`."""
