/* A CUDA driver that launches nothing and records what it is asked for. Tests set what it answers. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LAUNCHES = 64, PARAMETERS = 32, MAPS = 4096 };

typedef struct { int id, pad; union { unsigned cluster[3]; int programmatic; char room[64]; } value; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; void *stream; Attribute *attributes; unsigned count; } Config;
typedef struct {
    unsigned grid[3], block[3], cluster[3], shared;
    int programmatic;
    void *stream, *function, *context;
    uint64_t words[PARAMETERS], tails[PARAMETERS];   /* the first and the last 8 bytes of every parameter */
} Launch;

typedef struct { uint64_t address, dims[5], strides[4]; unsigned rank, box[5], steps[5]; int enums[5]; } Map;

Launch launches[LAUNCHES];
Map maps[MAPS];
int launch_count, map_count, module_count, fill_count, fails, capturing, exchanged, context_sets, occupancy = 1;
uint64_t capture_id;
unsigned fill_word;
size_t sizes[PARAMETERS], size_count, fill_words;
void *stream;
static __thread void *current;
static char contexts[64];

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? 132 : 0;
    return device < 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = contexts + device; return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; context_sets++; return 0; }
int cuModuleLoadData(void **module, const void *data) {
    if (memcmp(data, "cubin", 5)) return 200;
    *module = (void *)(uintptr_t)(0x1000 + ++module_count);
    return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)((uintptr_t)module * 16);
    return strcmp(name, "gemm") ? 500 : 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 1024; return !function || attribute; }
int cuFuncSetAttribute(void *function, int attribute, int value) {
    return !function || (attribute == 8 && value > 232448);
}
int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    if (!function || index >= size_count) return 1;
    *offset = 0, *size = sizes[index];
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int threads, size_t shared) {
    *count = occupancy;
    return !function || threads < 1 || shared > 232448;
}
int cuOccupancyMaxActiveClusters(int *count, void *function, const Config *config) {
    *count = config->attributes[0].id == 4 ? occupancy : 0;
    return !function;
}
int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    Map *kept = maps + map_count++ % MAPS;
    memset(kept, 0, sizeof *kept);
    kept->address = (uint64_t)address, kept->rank = rank;
    memcpy(kept->dims, dims, 8 * rank), memcpy(kept->strides, strides, 8 * (rank - 1));
    memcpy(kept->box, box, 4 * rank), memcpy(kept->steps, steps, 4 * rank);
    int enums[5] = {type, interleave, swizzle, promotion, fill};
    memcpy(kept->enums, enums, sizeof enums);
    memset(map, 0, 128);
    map[0] = (uint64_t)address;
    return 0;
}
int cuMemsetD32Async(uint64_t address, unsigned word, size_t count, void *on) {
    if (on != stream) return 400;
    for (size_t i = 0; i < count; i++) ((unsigned *)address)[i] = word;
    fill_count++, fill_word = word, fill_words = count;
    return 0;
}
int cuStreamGetCaptureInfo(void *on, int *status, uint64_t *id) {
    *status = capturing, *id = capture_id;
    return on != stream;
}
int cuThreadExchangeStreamCaptureMode(int *mode) { exchanged += *mode == 2; *mode = 0; return 0; }
int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    if (fails || extra) return 719;
    Launch *launch = launches + launch_count++ % LAUNCHES;
    memset(launch, 0, sizeof *launch);
    memcpy(launch->grid, config->grid, 12), memcpy(launch->block, config->block, 12);
    launch->shared = config->shared, launch->stream = config->stream;
    launch->function = function, launch->context = current;
    for (int i = 0; i < 3; i++) launch->cluster[i] = 1;
    for (unsigned i = 0; i < config->count; i++) {
        if (config->attributes[i].id == 4) memcpy(launch->cluster, config->attributes[i].value.cluster, 12);
        if (config->attributes[i].id == 6) launch->programmatic = config->attributes[i].value.programmatic;
    }
    for (size_t i = 0; i < size_count; i++) {
        size_t known = sizes[i] < 8 ? sizes[i] : 8;
        memcpy(launch->words + i, parameters[i], known);
        memcpy(launch->tails + i, (char *)parameters[i] + sizes[i] - known, known);
    }
    return 0;
}
int aoti_torch_get_current_cuda_stream(int32_t device, void **found) { *found = stream; return device > 8; }

#ifdef EMPTY_STRIDED /* torch's at::detail::empty_strided_cuda, as x86-64 calls it; its tensors lie in this machine's memory */
#include <dlfcn.h>
typedef struct { int8_t type, index, given; } Place;
int empty_count, empty_type, empty_index;
void *empty_strided(void *made, const int64_t *sizes, size_t rank, const int64_t *strides, size_t strides_rank, int8_t type,
                    Place place)
    __asm__("_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_6DeviceEE");
void *empty_strided(void *made, const int64_t *sizes, size_t rank, const int64_t *strides, size_t strides_rank, int8_t type,
                    Place place) {
    const char *name = "_ZN2at6detail17empty_strided_cpuEN3c108ArrayRefIlEES3_NS1_10ScalarTypeEb";
    void *(*own)(void *, const int64_t *, size_t, const int64_t *, size_t, int8_t, int) =
        dlsym(dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD), name);
    empty_count++, empty_type = place.given ? place.type : -1, empty_index = place.index;
    return own(made, sizes, rank, strides, strides_rank, type, 0);
}
#endif
