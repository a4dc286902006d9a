/* A cuBLASLt that knows two algorithms and refuses what they cannot do. It multiplies nothing. */
#include <stdint.h>
#include <string.h>

typedef struct { int32_t id, tile, stages, split_k, reduction, swizzle, custom; uint16_t inner, cluster; int32_t rest[8]; } Algo;
typedef struct { Algo algo; size_t workspace; int state; float waves; int reserved[4]; } Result;

int types[6];

#define MADE(name) int name(void **made) { static int one; *made = &one; return 0; }
#define NOTHING(name) int name(void) { return 0; }
MADE(cublasCreate_v2) MADE(cublasLtCreate) MADE(cublasLtMatmulDescCreate) MADE(cublasLtMatrixLayoutCreate)
MADE(cublasLtMatmulPreferenceCreate)
NOTHING(cublasDestroy_v2) NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasGemmEx)
NOTHING(cublasLtDestroy) NOTHING(cublasLtMatmulDescSetAttribute) NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatrixLayoutDestroy) NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy) NOTHING(cublasLtMatmulAlgoGetHeuristic) NOTHING(cublasLtMatmul)

size_t cublasLtGetVersion(void) { return 130100; }

int cublasLtMatmulAlgoGetIds(void *handle, int compute, int scale, int a, int b, int c, int d, int wanted, int *ids,
                             int *count) {
    memcpy(types, (int[]){compute, scale, a, b, c, d}, sizeof types);
    memcpy(ids, (int[]){66, 7, 9}, sizeof(int[3]));
    *count = 3;
    return wanted < 3;
}

int cublasLtMatmulAlgoInit(void *handle, int compute, int scale, int a, int b, int c, int d, int id, Algo *algo) {
    *algo = (Algo){.id = id, .split_k = 1};
    return id == 66 || id == 7 ? 0 : 15;
}

static int give(const void *from, size_t size, void *to, size_t given, size_t *written) {
    if (given && given != size) return 7;
    if (given) memcpy(to, from, size);
    *written = size;
    return 0;
}

int cublasLtMatmulAlgoCapGetAttribute(const Algo *algo, int cap, void *to, size_t given, size_t *written) {
    static const int tiles[] = {20, 24, 31}, stages[] = {35};
    int big = algo->id == 66;
    switch (cap) {
    case 0: return give(&(int){big}, 4, to, given, written);
    case 1: return give(&(int){big ? 7 : 0}, 4, to, given, written);
    case 2: return give(&(int){big}, 4, to, given, written);
    case 6: return give(tiles, big ? sizeof tiles : 0, to, given, written);
    case 7: return give(&(int){big ? 3 : 0}, 4, to, given, written);
    case 13: return give(stages, big ? sizeof stages : 0, to, given, written);
    }
    return 7;
}

static void *attribute(Algo *algo, int number, size_t *size) {
    *size = number < 7 ? 4 : 2;
    return number < 7 ? (void *)(&algo->id + (int[]){0, 1, 3, 4, 5, 6, 2}[number]) : number == 7 ? &algo->inner : &algo->cluster;
}

int cublasLtMatmulAlgoConfigSetAttribute(Algo *algo, int number, const void *from, size_t given) {
    size_t size;
    void *to = attribute(algo, number, &size);
    if (number == 0 || given != size) return 7;
    memcpy(to, from, size);
    return 0;
}

int cublasLtMatmulAlgoConfigGetAttribute(const Algo *algo, int number, void *to, size_t given, size_t *written) {
    size_t size;
    void *from = attribute((Algo *)algo, number, &size);
    return give(from, size, to, given, written);
}

/* Clusters 0, 3 and 5 exist, inner shapes do not; a split K needs a reduction, and in 8 parts 1 GiB of workspace. */
int cublasLtMatmulAlgoCheck(void *handle, void *operation, void *b, void *a, void *c, void *d, const Algo *algo,
                            Result *result) {
    memset(result, 0, sizeof *result);
    result->workspace = algo->split_k == 8 ? 1 << 30 : 4096;
    result->waves = 1;
    if (algo->inner || (algo->cluster && algo->cluster != 3 && algo->cluster != 5)) return 15;
    return algo->split_k != 1 && !algo->reduction ? 7 : 0;
}
