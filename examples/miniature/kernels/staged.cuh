#define DEPTH (16 * KS)
#define PITCH (DEPTH + 8)
static __device__ void fetch(half *to, const half *from, int rows, int k) {
    for (int i = threadIdx.x * 8; i < rows * DEPTH; i += 256 * WARPS) {
        const unsigned place = __cvta_generic_to_shared(to + i / DEPTH * PITCH + i % DEPTH);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from + i / DEPTH * k + i % DEPTH));
    }
}
static __device__ void tile(float (*d)[NT][4], const half *a, const half *b, int k, int row, int col, int quad) {
    __shared__ __align__(16) half x[STAGES][BM * PITCH], y[STAGES][BN * PITCH];
    for (int p = 0, ahead = 0; p < k; p += DEPTH) {
        for (; ahead < p + STAGES * DEPTH; ahead += DEPTH) {
            if (ahead < k) fetch(x[ahead / DEPTH % STAGES], a + ahead, BM, k);
            if (ahead < k) fetch(y[ahead / DEPTH % STAGES], b + ahead, BN, k);
            asm volatile("cp.async.commit_group;");
        }
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1));
        __syncthreads();
        const half *u = x[p / DEPTH % STAGES] + row * PITCH + quad, *v = y[p / DEPTH % STAGES] + col * PITCH + quad;
        EACH(s, KS) multiply(d, u + 16 * s, v + 16 * s, PITCH);
        __syncthreads();
    }
}
