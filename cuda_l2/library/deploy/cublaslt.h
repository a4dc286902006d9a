// cuBLASLt's kernel for one shape by an algorithm that tuning chose. Functions and numbers are those of cublasLt.h.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "driver.h"

namespace cuda_l2 {

struct LtResult {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

#define CUDA_L2_LT(X)                                                                                             \
  X(cublasLtCreate, void**)                                                                                       \
  X(cublasLtMatmulDescCreate, void**, int, int)                                                                   \
  X(cublasLtMatmulDescDestroy, void*)                                                                             \
  X(cublasLtMatmulDescSetAttribute, void*, int, const void*, size_t)                                              \
  X(cublasLtMatrixLayoutCreate, void**, int, uint64_t, uint64_t, int64_t)                                         \
  X(cublasLtMatrixLayoutDestroy, void*)                                                                           \
  X(cublasLtMatmulAlgoCheck, void*, void*, void*, void*, void*, void*, const void*, LtResult*)                    \
  X(cublasLtMatmul, void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, \
    void*, void*, void*, const void*, void*, size_t, Stream)

// The library, and one handle a device; lives as long as the process.
struct Lt {
#define CUDA_L2_MEMBER(name, ...) Status (*name)(__VA_ARGS__) = nullptr;
  CUDA_L2_LT(CUDA_L2_MEMBER)
#undef CUDA_L2_MEMBER

  explicit Lt(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error("cuBLASLt cannot be loaded: " + std::string(dlerror()));
#define CUDA_L2_FIND(name, ...)                                             \
  name = reinterpret_cast<Status (*)(__VA_ARGS__)>(dlsym(library, #name)); \
  if (!name) throw std::runtime_error("cuBLASLt lacks " #name);
    CUDA_L2_LT(CUDA_L2_FIND)
#undef CUDA_L2_FIND
  }

  // On the device of the current context.
  void* handle(const Driver& driver, int32_t device) {
    void*& handle = handles_[device];
    int mode = kRelaxed;  // what it sets up is not captured, and allowed while another stream is
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    Status status = handle ? 0 : cublasLtCreate(&handle);
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    if (status) throw std::runtime_error("cuBLASLt does not start: error " + std::to_string(status));
    return handle;
  }

  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static Lt& of(const std::string& path) {  // mutex() must be held
    static std::map<std::string, std::unique_ptr<Lt>>* known = new std::map<std::string, std::unique_ptr<Lt>>;
    std::unique_ptr<Lt>& found = (*known)[path];
    if (!found) found = std::make_unique<Lt>(path);
    return *found;
  }

 private:
  std::map<int32_t, void*> handles_;
};

// Row-major C = A B is the column-major C^T = B^T A^T, as in measure/cublas.py: the library's first matrix is B.
class LtProduct {
 public:
  LtProduct(const Driver& driver, const std::string& library, const std::string& algorithm, int32_t device, bool bfloat,
            bool transposed, uint64_t m, uint64_t n, uint64_t k, size_t workspace_bytes)
      : workspace_bytes_(workspace_bytes) {
    std::lock_guard<std::mutex> hold(Lt::mutex());
    lt_ = &Lt::of(library);
    handle_ = lt_->handle(driver, device);
    int type = bfloat ? 14 : 2, transpose = 1;
    algorithm.copy(reinterpret_cast<char*>(algorithm_), sizeof(algorithm_));
    require(lt_->cublasLtMatmulDescCreate(&operation_, 68, 0));  // fp32 sums and scales
    if (transposed) require(lt_->cublasLtMatmulDescSetAttribute(operation_, 3, &transpose, sizeof(transpose)));
    require(transposed ? lt_->cublasLtMatrixLayoutCreate(&b_, type, k, n, k)
                       : lt_->cublasLtMatrixLayoutCreate(&b_, type, n, k, n));
    require(lt_->cublasLtMatrixLayoutCreate(&a_, type, k, m, k));
    require(lt_->cublasLtMatrixLayoutCreate(&c_, type, n, m, n));
    LtResult result = {};
    require(lt_->cublasLtMatmulAlgoCheck(handle_, operation_, b_, a_, c_, c_, algorithm_, &result));
    if (result.workspace_bytes > workspace_bytes) fail("cuBLASLt asks for more workspace");
  }
  LtProduct(const LtProduct&) = delete;
  ~LtProduct() { destroy(); }

  // 0 or the library's error. pointers: A, B, C, the workspace.
  Status launch(const uint64_t* pointers, Stream stream) const {
    float one = 1, zero = 0;
    auto at = [&](int i) { return reinterpret_cast<void*>(pointers[i]); };
    void* workspace = workspace_bytes_ ? at(3) : nullptr;
    return lt_->cublasLtMatmul(handle_, operation_, &one, at(1), b_, at(0), a_, &zero, at(2), c_, at(2), c_, algorithm_,
                               workspace, workspace_bytes_, stream);
  }

 private:
  void require(Status status) {
    if (status) fail("cuBLASLt does not take the algorithm here: error " + std::to_string(status));
  }
  void fail(const std::string& why) {
    destroy();
    throw std::runtime_error(why);
  }
  void destroy() {
    for (void* matrix : {a_, b_, c_})
      if (matrix) lt_->cublasLtMatrixLayoutDestroy(matrix);
    if (operation_) lt_->cublasLtMatmulDescDestroy(operation_);
  }

  Lt* lt_ = nullptr;
  void *handle_ = nullptr, *operation_ = nullptr, *a_ = nullptr, *b_ = nullptr, *c_ = nullptr;
  uint64_t algorithm_[8] = {};
  size_t workspace_bytes_;
};

}  // namespace cuda_l2
