static void work(void *context, long index) {
    const struct job *j = context;
    panel_t space[PANEL_SIZE];
    for (long col = index * NR; col < j->n; col += THREADS * NR) {
        const panel_t *panel = prepare(space, j->b + col, j->n, j->k);
        for (long row = 0; row < j->m; row += MR)
            tile(j->a + row * j->k, panel, j->c + row * j->n + col, j->n, j->k);
    }
}
