        p += u * P + v;
        q += u * P + v;
        FOR(h, KS) {
            int x[MT][4], y[NT][2];
            FOR(i, MT) FOR(e, 4)
                x[i][e] = *(int *)(p + (i * 16 + e % 2 * 8) * P + h * 16 + e / 2 * 8);
            FOR(j, NT) FOR(e, 2)
                y[j][e] = *(int *)(q + j * 8 * P + h * 16 + e * 8);
