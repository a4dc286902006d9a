static void work(void *context, long index) {
    const struct job *j = context;
    panel_t space[PANEL_SIZE];
    for (long col = 0; col < j->n; col += NR) {
        const panel_t *panel = prepare(space, j->b + col, j->n, j->k);
        for (long row = index * MR; row < j->m; row += THREADS * MR)
            tile(j->a + row * j->k, panel, j->c + row * j->n + col, j->n, j->k);
    }
}
