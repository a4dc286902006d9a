    c += (row + u) * n + col + v;
    if (part == 0)
        FOR(i, MT) FOR(j, NT) FOR(h, 2)
            *(half2 *)(c + (i * 16 + h * 8) * n + j * 8) = __floats2half2_rn(d[i][j][2 * h], d[i][j][2 * h + 1]);
}
