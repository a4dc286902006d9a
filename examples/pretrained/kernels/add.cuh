            FOR(i, MT) FOR(j, NT)
                mma(d[i][j], x[i], y[j]);
        }
    }
    if (WK > 1) {
        float *r = (float *)s + warp * (WK - 1) * Q * 32 + lane, *sum = d[0][0];
        __syncthreads();
        if (part)
            FOR(i, Q) r[((part - 1) * Q + i) * 32] = sum[i];
        __syncthreads();
        if (part == 0)
            FOR(i, (WK - 1) * Q) sum[i % Q] += r[i * 32];
    }
