"""Figures that the CUDA-L2 paper and its repository publish, as they give them: speedup - 1 in percent, means."""

PAPER = "CUDA-L2 paper, A100, fp16 sums"
PROTOCOL = (
    "The paper timed its kernels on an A100 with CUDA events around each call, after 10 s of warm-up for at least 30 s,"
    " and gives the mean over all calls (section 2.4). Offline: calls without pauses. Server: calls at intervals."
    " Ours are medians of device times on the device named, so the columns stand side by side but do not compare."
    " Only figures that the paper's text gives are shown; its tables are pictures."
)

SPEEDUPS: dict[tuple[str, str, str], float] = {
    ("torch.matmul", "", "offline"): 22.0,
    ("cuBLAS", "nn", "offline"): 20.0,
    ("cuBLAS", "tn", "offline"): 21.4,
    ("cuBLAS", "max", "offline"): 19.2,
    ("cuBLASLt-heuristic", "nn", "offline"): 17.3,
    ("cuBLASLt-heuristic", "tn", "offline"): 19.1,
    ("cuBLASLt-heuristic", "max", "offline"): 16.8,
    ("cuBLASLt-AutoTuning", "nn", "offline"): 12.1,
    ("cuBLASLt-AutoTuning", "tn", "offline"): 13.3,
    ("cuBLASLt-AutoTuning", "max", "offline"): 11.4,
    ("torch.matmul", "", "server"): 28.7,
    ("cuBLAS", "max", "server"): 26.0,
    ("cuBLASLt-heuristic", "max", "server"): 22.4,
    ("cuBLASLt-AutoTuning", "max", "server"): 15.9,
}
"""Table 1, by baseline, layout and mode (section 4.1)."""

CHOICE: dict[tuple[str, str, str], float] = {
    ("torch.matmul", "", "offline"): 23.1,
    ("cuBLAS", "max", "offline"): 20.2,
    ("cuBLASLt-heuristic", "max", "offline"): 17.0,
    ("cuBLASLt-AutoTuning", "max", "offline"): 13.2,
    ("torch.matmul", "", "server"): 29.8,
    ("cuBLAS", "max", "server"): 27.2,
    ("cuBLASLt-heuristic", "max", "server"): 22.7,
    ("cuBLASLt-AutoTuning", "max", "server"): 18.1,
}
"""Table 2: the faster of ours and the baseline (section 4.2)."""

BY_SIZE = {18: "about 1.4x", 39: "about 1.0x"}
"""Table 3: what the text says of buckets of log2(MNK), by their first (section 4.3)."""

WIN_RATES = "The paper's win rates over all baselines and both modes span 79.3 % to 95.7 %."

ELSEWHERE = (
    ("A100, fp16 sums", 11.4, 15.9),
    ("A100, fp32 sums", 12.2, 12.7),
    ("RTX 3090", 12.7, 19.8),
    ("H100, fp32 sums", 7.0, 22.1),
)
"""What CUDA-L2's repository claims over cuBLASLt-AutoTuning: GPU, offline, server."""

COLUMNS = (
    ("torch.matmul", ""),
    *((kind, way) for kind in ("cuBLAS", "cuBLASLt-heuristic", "cuBLASLt-AutoTuning") for way in ("nn", "tn", "max")),
)
"""The paper's ten baselines: kind, and the layout of B, or max for the faster of both."""
