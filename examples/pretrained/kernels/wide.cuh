    half *t = s + (row + u) * (Y + 8) + col + v;
    __syncthreads();
    if (part == 0)
        FOR(i, MT) FOR(j, NT) FOR(h, 2)
            *(half2 *)(t + (i * 16 + h * 8) * (Y + 8) + j * 8) = __floats2half2_rn(d[i][j][2 * h], d[i][j][2 * h + 1]);
    __syncthreads();
    for (int i = threadIdx.x * 8; i < X * Y; i += T * 8)
        *(uint4 *)(c + i / Y * n + i % Y) = *(uint4 *)(s + i / Y * (Y + 8) + i % Y);
}
