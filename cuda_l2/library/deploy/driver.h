// The part of the CUDA driver API that a call uses, found at run time: the op compiles without CUDA, and loads where
// there is no driver. Types and numbers are those of the driver API's reference (cuda.h), which are stable.
#pragma once
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace cuda_l2 {

using Status = int;  // CUresult
using Context = void*;
using Module = void*;
using Function = void*;
using Stream = void*;

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  int pad;
  union {
    unsigned cluster[3];
    int programmatic;
    char room[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "as in cuda.h");

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56, "as in cuda.h");

struct alignas(128) EncodedMap {  // CUtensorMap; 64 before CUDA 13
  uint64_t words[16];
};

constexpr int kClusterDimension = 4, kProgrammaticSerialization = 6;              // CUlaunchAttributeID
constexpr int kMaxThreads = 0, kMaxDynamicShared = 8, kNonPortableClusters = 14;  // CUfunction_attribute
constexpr int kMultiprocessors = 16;                                              // CUdevice_attribute
constexpr int kCapturing = 1;                                                     // CUstreamCaptureStatus
constexpr int kRelaxed = 2;                                                       // CUstreamCaptureMode

// Every entry point: name, then its parameters.
#define CUDA_L2_DRIVER(X)                                                                                           \
  X(cuInit, unsigned)                                                                                               \
  X(cuDeviceGet, int*, int)                                                                                         \
  X(cuDeviceGetAttribute, int*, int, int)                                                                           \
  X(cuDevicePrimaryCtxRetain, Context*, int)                                                                        \
  X(cuCtxGetCurrent, Context*)                                                                                      \
  X(cuCtxSetCurrent, Context)                                                                                       \
  X(cuModuleLoadData, Module*, const void*)                                                                         \
  X(cuModuleGetFunction, Function*, Module, const char*)                                                            \
  X(cuFuncGetAttribute, int*, int, Function)                                                                        \
  X(cuFuncSetAttribute, Function, int, int)                                                                         \
  X(cuFuncGetParamInfo, Function, size_t, size_t*, size_t*)                                                         \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, int*, Function, int, size_t)                                       \
  X(cuOccupancyMaxActiveClusters, int*, Function, const LaunchConfig*)                                              \
  X(cuTensorMapEncodeTiled, EncodedMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,   \
    const uint32_t*, int, int, int, int)                                                                            \
  X(cuMemsetD32Async, uint64_t, unsigned, size_t, Stream)                                                           \
  X(cuStreamGetCaptureInfo, Stream, int*, uint64_t*)                                                                \
  X(cuThreadExchangeStreamCaptureMode, int*)                                                                        \
  X(cuLaunchKernelEx, const LaunchConfig*, Function, void**, void**)

// A new tensor by torch's at::detail::empty_strided_cuda(IntArrayRef, IntArrayRef, ScalarType, optional<Device>), as
// torch.compile's programs have it, without the dispatcher. No part of the stable ABI; its name holds the types of its
// parameters, and a tensor is one pointer (op.cpp).
struct Integers {
  const int64_t* data;
  size_t size;
};
struct Place {
  int8_t type, index;
};
class Made {  // as a tensor that is returned: its destructor has it made in place
 public:
  ~Made() {}

 private:
  void* tensor_;
};
using EmptyStrided = Made (*)(Integers, Integers, int8_t, std::optional<Place>);
constexpr char kEmptyStrided[] =
    "_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_6DeviceEE";

struct Driver {
#define CUDA_L2_MEMBER(name, ...) Status (*name)(__VA_ARGS__) = nullptr;
  CUDA_L2_DRIVER(CUDA_L2_MEMBER)
#undef CUDA_L2_MEMBER
  int (*current_stream)(int32_t, void**) = nullptr;  // aoti_torch_get_current_cuda_stream
  EmptyStrided empty_strided = nullptr;              // null where torch has no such function

  // Why it cannot be used; empty where it can. torch_cuda: torch's library for CUDA, which is loaded already.
  std::string open(const char* driver, const char* torch_cuda) {
    void* library = dlopen(driver, RTLD_NOW | RTLD_LOCAL);
    if (!library) return std::string("the NVIDIA driver is not installed: ") + dlerror();
#define CUDA_L2_FIND(name, ...)                                             \
  name = reinterpret_cast<Status (*)(__VA_ARGS__)>(dlsym(library, #name)); \
  if (!name) return "the NVIDIA driver is too old: it lacks " #name;
    CUDA_L2_DRIVER(CUDA_L2_FIND)
#undef CUDA_L2_FIND
    void* torch = dlopen(torch_cuda, RTLD_NOW | RTLD_NOLOAD);
    const char* name = "aoti_torch_get_current_cuda_stream";
    if (torch) current_stream = reinterpret_cast<int (*)(int32_t, void**)>(dlsym(torch, name));
    if (torch) empty_strided = reinterpret_cast<EmptyStrided>(dlsym(torch, kEmptyStrided));
    if (!current_stream) return "torch was built without CUDA, or does not say which stream is the current one";
    if (Status status = cuInit(0)) return "the NVIDIA driver does not start: error " + std::to_string(status);
    return "";
  }
};

}  // namespace cuda_l2
