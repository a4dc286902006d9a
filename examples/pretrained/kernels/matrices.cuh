        p += lane % 16 * P + lane / 16 * 8;
        q += (lane % 8 + lane / 16 * 8) * P + lane / 8 % 2 * 8;
        FOR(h, KS) {
            int x[MT][4], y[NT][2];
            FOR(i, MT) load(x[i], p + i * 16 * P + h * 16);
            FOR(j, NT / 2) load(y[2 * j], q + j * 16 * P + h * 16);
