typedef half_t panel_t;
static const panel_t *prepare(panel_t *panel, const half_t *b, long n, long k) { return b; }
#define STRIDE n
#define PANEL_SIZE 1
