/* What DLPack 1.x says of a tensor, as dlpack.h has it: between call.c, which asks torch for it, and op.cpp. */
#pragma once
#include <stdint.h>

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4 };

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
