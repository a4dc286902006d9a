extern "C" __global__ void __launch_bounds__(T) gemm(half *a, half *b, half *c, int n, int k) {
    extern __shared__ __align__(16) half s[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 / WK, part = threadIdx.x / 32 % WK;
    int row = warp / WN * MT * 16, col = warp % WN * NT * 8;
    int u = lane / 4, v = lane % 4 * 2;
    float d[MT][NT][4] = {};
    a += blockIdx.y * X * k;
    b += blockIdx.x * Y * k;
    c += blockIdx.y * X * n + blockIdx.x * Y;
    auto begin = [&](int i) {
        half *to = s + i % ST * (X + Y) * P;
        if (i * Z < k) {
            fetch(to, a + i * Z, X, k);
            fetch(to + X * P, b + i * Z, Y, k);
        }
        asm volatile("cp.async.commit_group;");
    };
    for (int i = 0; i < ST - 1; i++)
        begin(i);
    for (int i = 0; i * Z < k; i++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(ST - 2));
        __syncthreads();
        begin(i + ST - 1);
        half *p = s + i % ST * (X + Y) * P + part * KS * 16, *q = p + (X + col) * P;
        p += row * P;
