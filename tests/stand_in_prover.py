"""Stands in for a verifying process where there is no GPU: what it does with an item is its M.

16: answers that it is correct. 32: dies, unless the file named in STAND_IN_MET is there, which it leaves. 48: always dies.
64: says what is wrong.
"""

import json
import os
import sys
from pathlib import Path

from cuda_l2.records import Gemm, Verdict, VerdictStatus, to_json

for line in sys.stdin:
    rows = Gemm.parse(json.loads(line)["gemm"]).m
    met = Path(os.environ["STAND_IN_MET"])
    if rows == 48 or (rows == 32 and not met.exists()):
        met.touch()
        os._exit(9)
    if rows == 64:
        verdict = Verdict(VerdictStatus.INCORRECT, "exact match", "C[0, 0] is 1, expected 2", passed=("instructions",))
    else:
        verdict = Verdict(VerdictStatus.CORRECT, passed=("instructions", "races"))
    print(json.dumps({"verdict": to_json(verdict), "jobs": []}), flush=True)
