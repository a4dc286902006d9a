extern "C" __global__ void __launch_bounds__(32 * WARPS) gemm(const half *a, const half *b, half *c, int n, int k) {
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4 * 2;
    const int row = WARP_M * MT * 16 + group, col = WARP_N * NT * 8;
    float d[MT][NT][4] = {};
    tile(d, a + blockIdx.y * BM * k, b + blockIdx.x * BN * k, k, row, col + group, quad);
    c += (blockIdx.y * BM + row) * n + blockIdx.x * BN + col + quad;
    EACH(i, MT) EACH(j, NT) EACH(h, 2)
        *(half2 *)(c + (i * 16 + h * 8) * n + j * 8) = __floats2half2_rn(d[i][j][2 * h], d[i][j][2 * h + 1]);
}
