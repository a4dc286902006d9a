/* A cuBLASLt that multiplies nothing and records what it is asked for. An algorithm whose first byte is 1 is refused. */
#include <stdint.h>
#include <string.h>

typedef struct { int type; uint64_t rows, columns; int64_t leading; } Matrix;
typedef struct { int compute, scale, transposed; } Operation;
typedef struct { uint64_t algorithm[8]; size_t workspace_bytes; int rest[6]; } Result;
typedef struct { uint64_t addresses[3], workspace, bytes, stream, algorithm[8]; Matrix a, b, c; Operation operation; } Call;

static Matrix matrices[256];
static Operation operations[64];
static int matrix_count, operation_count;
Call calls[16];
int call_count, alive;

int cublasLtCreate(void **handle) { *handle = matrices; return 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) {
    Operation *found = operations + operation_count++ % 64;
    *found = (Operation){compute, scale, 0}, *made = found, alive++;
    return 0;
}
int cublasLtMatmulDescDestroy(void *made) { alive--; return !made; }
int cublasLtMatmulDescSetAttribute(void *made, int attribute, const void *value, size_t size) {
    ((Operation *)made)->transposed = *(const int *)value;
    return attribute != 3 || size != 4;
}
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    Matrix *found = matrices + matrix_count++ % 256;
    *found = (Matrix){type, rows, columns, leading}, *made = found, alive++;
    return 0;
}
int cublasLtMatrixLayoutDestroy(void *made) { alive--; return !made; }
int cublasLtMatmulAlgoCheck(void *handle, void *operation, void *b, void *a, void *c, void *d, const void *algorithm,
                            Result *result) {
    memset(result, 0, sizeof *result);
    result->workspace_bytes = 4096;
    return *(const char *)algorithm == 1 ? 15 : 0;
}
int cublasLtMatmul(void *handle, void *operation, const float *one, const void *b, Matrix *b_is, const void *a,
                   Matrix *a_is, const float *zero, const void *c, Matrix *c_is, void *d, Matrix *d_is,
                   const void *algorithm, void *workspace, size_t bytes, void *stream) {
    Call *call = calls + call_count++ % 16;
    *call = (Call){{(uint64_t)a, (uint64_t)b, (uint64_t)d}, (uint64_t)workspace, bytes, (uint64_t)stream,
                   {0}, *a_is, *b_is, *d_is, *(Operation *)operation};
    memcpy(call->algorithm, algorithm, 64);
    return *one != 1 || *zero != 0 || c != d || c_is != d_is;
}
