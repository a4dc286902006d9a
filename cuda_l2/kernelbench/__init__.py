"""Candidates in KernelBench's own style, so that published results can be audited: judged in the sandbox."""

from cuda_l2.kernelbench.auditor import Auditor

__all__ = ["Auditor"]
