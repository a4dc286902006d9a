static __device__ void tile(float (*d)[NT][4], const half *a, const half *b, int k, int row, int col, int quad) {
    a += row * k + quad, b += col * k + quad;
    for (int p = 0; p < k; p += 16 * KS)
        EACH(s, KS) multiply(d, a + p + 16 * s, b + p + 16 * s, k);
}
