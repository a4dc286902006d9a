// torch.ops.cuda_l2: matrix products by the kernels that were measured to win, everything else by torch.
//
// Host code alone, on torch's stable ABI as of torch 2.9: one binary serves every later version, and no CUDA is needed
// to compile it. Python fills the table (calls.py); a call does not enter Python.
//
//   product(a, b)            records no gradients; what cuda_l2.matmul calls where none are wanted
//   linear(x, weight, bias)  the same for B = weight^T
//   matmul(a, b, bias)       gradients are registered in Python
//   matmul.out(a, b, bias, out)
//   product_by(a, b, rule)   a kernel by another rule than tuning: 1 deterministic, 2 with the same bits for every M
#include <torch/csrc/stable/library.h>

#include <optional>
#include <utility>

#include "table.h"
#include "tensor.h"

using namespace cuda_l2;

namespace {

void require(AOTITorchError error) {
  if (error) throw std::runtime_error("torch failed; its message stands above");
}

// What a call must know of a tensor. Sizes and strides stay the tensor's. No handle where Python has the tensor.
struct View {
  int64_t rank, *sizes, *strides;
  int32_t dtype, device_type, device, layout;
  AtenTensorHandle handle = nullptr;
  uint64_t start = 0;

  explicit View(const DLTensor& tensor)
      : rank(tensor.ndim), sizes(tensor.shape), strides(tensor.strides), dtype(-1), device_type(-1),
        device(tensor.device.id), layout(aoti_torch_layout_strided()),
        start(reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset) {
    if (tensor.device.type == DLPACK_CUDA) device_type = aoti_torch_device_type_cuda();
    if (tensor.device.type == DLPACK_CPU) device_type = aoti_torch_device_type_cpu();
    const bool two_bytes = tensor.dtype.bits == 16 && tensor.dtype.lanes == 1;
    if (two_bytes && tensor.dtype.code == DLPACK_FLOAT) dtype = aoti_torch_dtype_float16();
    if (two_bytes && tensor.dtype.code == DLPACK_BFLOAT) dtype = aoti_torch_dtype_bfloat16();
  }
  explicit View(AtenTensorHandle tensor) : handle(tensor) {
    require(aoti_torch_get_dim(tensor, &rank));
    require(aoti_torch_get_sizes(tensor, &sizes));
    require(aoti_torch_get_dtype(tensor, &dtype));
    require(aoti_torch_get_device_type(tensor, &device_type));
    require(aoti_torch_get_device_index(tensor, &device));
    require(aoti_torch_get_layout(tensor, &layout));
    strides = nullptr;
    if (layout == aoti_torch_layout_strided()) require(aoti_torch_get_strides(tensor, &strides));
  }
  int64_t size(int64_t from_end) const { return sizes[rank - from_end]; }
  bool row_major() const {
    int64_t expected = 1;
    for (int64_t i = rank - 1; i >= 0; i--) {
      if (sizes[i] != 1 && strides[i] != expected) return false;
      expected *= sizes[i];
    }
    return strides != nullptr;
  }
  uint64_t address() const {
    if (!handle) return start;
    void* data = nullptr;
    require(aoti_torch_get_data_ptr(handle, &data));
    return reinterpret_cast<uint64_t>(data);
  }
};

StableIValue value(AtenTensorHandle handle) { return torch::stable::detail::from(handle); }

// A handle points to an at::Tensor, which is one pointer: to what a Python tensor's _cdata names. Were it another one,
// no operand would be found constant.
const void* identity(AtenTensorHandle handle) { return *reinterpret_cast<const void* const*>(handle); }

// The number of writes to a tensor that torch counted. It raises for inference tensors, which are never constant.
int64_t version(AtenTensorHandle handle) {
  AtenTensorHandle same = nullptr;
  require(aoti_torch_new_tensor_handle(handle, &same));
  StableIValue stack[1] = {value(same)};
  require(aoti_torch_call_dispatcher("aten::_version", "", stack));
  return torch::stable::detail::to<int64_t>(stack[0]);
}

// A product as a kernel sees it; not where torch serves it.
struct Problem {
  Key key;
  bool good = false;

  Problem(const View& a, const View& b, bool transposed, int32_t rule) {
    Table& t = table();
    bool cuda = a.device_type == aoti_torch_device_type_cuda();
    if (!t.started.load(std::memory_order_acquire) && cuda)
      if (Begin begin = t.begin.exchange(nullptr)) begin();
    if (!t.started.load(std::memory_order_acquire) || (!cuda && !t.serves_cpu)) return;
    static const int32_t half = aoti_torch_dtype_float16(), bfloat = aoti_torch_dtype_bfloat16();
    if ((a.dtype != half && a.dtype != bfloat) || b.dtype != a.dtype) return;
    if (a.rank < 1 || b.rank != 2 || !a.strides || !b.strides || !a.row_major()) return;
    if (b.device_type != a.device_type || b.device != a.device) return;
    int64_t k = b.sizes[transposed], n = b.sizes[!transposed];
    int64_t by_k = b.strides[transposed], by_n = b.strides[!transposed];
    if (k != a.size(1) || k == 0 || n == 0) return;
    int64_t m = 1;
    for (int64_t i = 0; i < a.rank - 1; i++) m *= a.sizes[i];
    if (m == 0 || m > INT32_MAX || n > INT32_MAX || k > INT32_MAX) return;
    bool nn = (n == 1 || by_n == 1) && (k == 1 || by_k == n), tn = (k == 1 || by_k == 1) && (n == 1 || by_n == k);
    if (!nn && !tn) return;
    key = {cuda ? a.device : 0, a.dtype == bfloat, !nn, rule, m, n, k};
    good = true;
  }
};

// Sets the current device where a tensor is on another one.
class DeviceGuard {
 public:
  explicit DeviceGuard(const View& view) {
    int32_t current = view.device;
    if (view.device_type != aoti_torch_device_type_cuda()) return;
    require(aoti_torch_get_current_device_index(&current));
    if (current != view.device) require(aoti_torch_create_device_guard(view.device, &guard_));
  }
  ~DeviceGuard() {
    if (guard_) aoti_torch_delete_device_guard(guard_);
  }

 private:
  DeviceGuardHandle guard_ = nullptr;
};

// Launches an entry on the current stream; false where it cannot be, and torch is to serve the call.
bool run(Entry& entry, const View& a, const View& b, uint64_t address_a, uint64_t address_b, uint64_t address_c) {
  Table& t = table();
  bool reads_ahead = entry.key.rule == kAhead, ordinary = false;
  uint64_t capture = 0;
  Seen now;
  void* stream = nullptr;
  if ((address_a | address_b | address_c) % 16 || !t.enter(entry.key.device)) return false;
  require(t.driver.current_stream(a.device, &stream));
  uint64_t pointers[3 + kMaxWorkspaces] = {address_a, address_b, address_c};
  Owned scratch[kMaxWorkspaces];  // the allocator gives it to later work on this stream alone
  for (size_t i = 0; i < entry.workspaces.size(); i++) {
    const Workspace& w = entry.workspaces[i];
    if (w.persistent) {
      pointers[3 + i] = t.persistent(a.device_type, entry.key, stream, i, w);
    } else {
      scratch[i] = allocate(a.device_type, a.device, w.bytes, pointers[3 + i]);
    }
    if (!pointers[3 + i]) return false;
  }
  if (reads_ahead) {
    capture = t.captured(stream);
    now = {address_b, t.constants.epoch, version(b.handle)};
    ordinary = !t.constants.read_ahead(identity(b.handle), now, stream, capture);
    if (!ordinary) t.counts[kReadAhead]++;
  }
  if (Status status = entry.launch(t.driver, pointers, stream, t.counts[kEncoded], 1, ordinary)) {
    if (!entry.broken.exchange(true)) {
      std::string text = "cuda-l2: a kernel cannot be launched (error " + std::to_string(status) +
                         "); torch's own serves its shape from now on";
      aoti_torch_warn(__func__, __FILE__, __LINE__, text.c_str());
    }
    return false;
  }
  if (reads_ahead)
    t.constants.launched(identity(b.handle), now, 2 * uint64_t(entry.key.k) * entry.key.n, stream, capture);
  t.counts[kLaunched]++;
  return true;
}

// A new tensor with the type and the device of another one; an empty handle where there is no memory left.
Owned empty(const View& like, const int64_t* sizes, const int64_t* strides) {
  AtenTensorHandle handle = nullptr;
  if (EmptyStrided make = table().driver.empty_strided) {
    const size_t rank = static_cast<size_t>(like.rank);
    const Place place = {static_cast<int8_t>(like.device_type), static_cast<int8_t>(like.device)};
    void* room = ::operator new(sizeof(Made));
    try {
      new (room) Made(make({sizes, rank}, {strides, rank}, static_cast<int8_t>(like.dtype), place));
    } catch (...) {
      ::operator delete(room);
      return Owned();
    }
    return Owned(static_cast<AtenTensorHandle>(room));
  }
  if (aoti_torch_empty_strided(like.rank, sizes, strides, like.dtype, like.device_type, like.device, &handle))
    return Owned();
  return Owned(handle);
}

// Whether a kernel served the product. out: where it stands, or null for a new tensor, which `made` owns then.
bool serve(const View& a, const View& b, bool transposed, const View* out, Owned& made, int32_t rule = kTuned) {
  Problem problem(a, b, transposed, rule);
  if (!problem.good) return false;
  DeviceGuard guard(a);
  std::shared_ptr<Entry> entry;
  if (rule == kTuned && b.handle && table().constants.has(identity(b.handle))) {
    Key ahead = problem.key;
    ahead.rule = kAhead;
    entry = table().find(ahead);
  }
  if (!entry || entry->broken) entry = table().find(problem.key);
  if (!entry || entry->broken) return false;
  int64_t sizes[64], strides[64], stride = 1;
  if (a.rank > 64) return false;
  for (int64_t i = a.rank - 1; i >= 0; i--) {
    sizes[i] = i == a.rank - 1 ? problem.key.n : a.sizes[i];
    strides[i] = stride;
    stride *= sizes[i];
  }
  uint64_t address_a = a.address(), address_b = b.address();
  if (out) {
    const View& c = *out;
    bool fits = c.dtype == a.dtype && c.device_type == a.device_type && c.device == a.device && c.rank == a.rank &&
                c.strides && c.row_major() && !std::memcmp(c.sizes, sizes, a.rank * sizeof(int64_t));
    if (!fits) return false;
    const Key& key = problem.key;
    uint64_t address_c = c.address(), end_c = address_c + 2 * key.m * key.n;
    bool apart = (address_a >= end_c || address_a + 2 * key.m * key.k <= address_c) &&
                 (address_b >= end_c || address_b + 2 * key.k * key.n <= address_c);
    return apart && run(*entry, a, b, address_a, address_b, address_c);
  }
  made = empty(a, sizes, strides);
  void* address_c = nullptr;
  if (!made.get() || aoti_torch_get_data_ptr(made.get(), &address_c)) return false;
  if (run(*entry, a, b, address_a, address_b, reinterpret_cast<uint64_t>(address_c))) return true;
  made = Owned();  // torch makes its own
  return false;
}

AtenTensorHandle handle(StableIValue value) { return torch::stable::detail::to<AtenTensorHandle>(value); }

// Operands that torch.matmul refuses. It would print its error; the caller in Python asks it for the error instead.
void refuse(AtenTensorHandle handle_a, AtenTensorHandle handle_b, bool transposed) {
  View a(handle_a), b(handle_b);
  bool good = a.rank > 0 && b.rank > 0 && a.dtype == b.dtype && a.device_type == b.device_type &&
              a.device == b.device && a.size(1) == (transposed || b.rank == 1 ? b.size(1) : b.size(2));
  if (!good)
    throw std::runtime_error("torch.matmul does not take these operands: their types, devices or sizes do not match");
}

// A write to a tensor, which may be a constant operand of other products, and which only Python counts: told before and
// after, so that no thread's launch between the two is taken for one that came after it.
class Write {
 public:
  explicit Write(AtenTensorHandle out) {
    View view(out);
    if (!table().constants.count || !view.strides) return;
    const bool two = view.dtype == aoti_torch_dtype_float16() || view.dtype == aoti_torch_dtype_bfloat16();
    const uint64_t element = two ? 2 : kMaxElementBytes;
    begin_ = end_ = view.address();
    for (int64_t i = 0; i < view.rank; i++) end_ += element * (view.sizes[i] - 1) * view.strides[i];
    table().constants.wrote(begin_, end_ += element);
  }
  Write(const Write&) = delete;
  ~Write() { table().constants.wrote(begin_, end_); }

 private:
  static constexpr uint64_t kMaxElementBytes = 16;
  uint64_t begin_ = 0, end_ = 0;
};

// torch's own operator on a stack of its arguments, which it takes.
void vendor(const char* name, const char* overload, StableIValue* stack) {
  table().counts[kVendor]++;
  require(aoti_torch_call_dispatcher(name, overload, stack));
}

// weight^T, in place of weight, as a new handle.
StableIValue transpose(StableIValue tensor) {
  StableIValue stack[3] = {tensor, torch::stable::detail::from(int64_t{-2}), torch::stable::detail::from(int64_t{-1})};
  require(aoti_torch_call_dispatcher("aten::transpose", "int", stack));
  return stack[0];
}

void product(StableIValue* stack, uint64_t, uint64_t) {
  Owned a(handle(stack[0])), b(handle(stack[1]));
  Owned c;
  if (serve(View(a.get()), View(b.get()), false, nullptr, c)) {
    stack[0] = value(c.release());
    return;
  }
  refuse(a.get(), b.get(), false);
  stack[0] = value(a.release()), stack[1] = value(b.release());
  vendor("aten::matmul", "", stack);
}

// A bias is an epilogue of the vendor's: its sum is rounded once, and a second kernel would cost more than ours wins.
void linear(StableIValue* stack, uint64_t, uint64_t) {
  if (!stack[2]) {  // an optional that is empty
    Owned x(handle(stack[0])), weight(handle(stack[1]));
    Owned c;
    if (serve(View(x.get()), View(weight.get()), true, nullptr, c)) {
      stack[0] = value(c.release());
      return;
    }
    refuse(x.get(), weight.get(), true);
    stack[0] = value(x.release()), stack[1] = value(weight.release());
  }
  vendor("aten::linear", "", stack);
}

void matmul(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  if (!stack[2]) return product(stack, inputs, outputs);
  AtenTensorHandle b = handle(stack[1]);
  int64_t rank = 0;
  require(aoti_torch_get_dim(b, &rank));
  if (rank == 2) {
    stack[1] = transpose(stack[1]);
    return vendor("aten::linear", "", stack);
  }
  StableIValue bias = stack[2];
  std::optional<AtenTensorHandle> added = torch::stable::detail::to<std::optional<AtenTensorHandle>>(bias);
  vendor("aten::matmul", "", stack);
  StableIValue sum[3] = {stack[0], value(*added), torch::stable::detail::from(int64_t{1})};
  require(aoti_torch_call_dispatcher("aten::add", "Tensor", sum));
  stack[0] = sum[0];
}

// torch's own kernels give a row other bits in another batch, so none of them may take an invariant kernel's place.
void product_by(StableIValue* stack, uint64_t, uint64_t) {
  int64_t rule = torch::stable::detail::to<int64_t>(stack[2]);
  Owned a(handle(stack[0])), b(handle(stack[1]));
  if (rule != kDeterministic && rule != kInvariant) throw std::runtime_error("rule must be 1 or 2");
  Owned c;
  if (serve(View(a.get()), View(b.get()), false, nullptr, c, static_cast<int32_t>(rule))) {
    stack[0] = value(c.release());
    return;
  }
  refuse(a.get(), b.get(), false);
  if (rule == kInvariant) throw std::runtime_error("no kernel computes this product in the same way for every M");
  stack[0] = value(a.release()), stack[1] = value(b.release());
  vendor("aten::matmul", "", stack);
}

void matmul_out(StableIValue* stack, uint64_t, uint64_t) {
  Owned a(handle(stack[0])), b(handle(stack[1])), out(handle(stack[3]));
  if (stack[2]) throw std::runtime_error("matmul takes out or a bias, not both");
  Write write(out.get());
  Owned none;
  const View c(out.get());
  if (serve(View(a.get()), View(b.get()), false, &c, none)) {
    stack[0] = value(out.release());
    return;
  }
  refuse(a.get(), b.get(), false);
  stack[0] = value(a.release()), stack[1] = value(b.release()), stack[2] = value(out.release());
  vendor("aten::matmul", "out", stack);
}

int said(char* why, size_t size, const std::string& text) {
  if (size) why[text.copy(why, size - 1)] = 0;
  return text.empty() ? 0 : 1;
}

}  // namespace

STABLE_TORCH_LIBRARY(cuda_l2, m) {
  m.def("product(Tensor a, Tensor b) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  m.def("matmul(Tensor a, Tensor b, Tensor? bias=None) -> Tensor");
  m.def("product_by(Tensor a, Tensor b, int rule) -> Tensor");
  m.def("matmul.out(Tensor a, Tensor b, Tensor? bias=None, *, Tensor(a!) out) -> Tensor(a!)");
}

STABLE_TORCH_LIBRARY_IMPL(cuda_l2, CompositeExplicitAutograd, m) {
  m.impl("product", &product);
  m.impl("linear", &linear);
  m.impl("matmul", &matmul);
  m.impl("product_by", &product_by);
  m.impl("matmul.out", &matmul_out);
}

// What native.py calls. Functions that can fail write why, end it with 0 and return 1.
extern "C" {

int cuda_l2_start(const char* driver, const char* torch_cuda, int serves_cpu, char* why, size_t size) {
  Table& t = table();
  if (t.started) return 0;
  std::string reason = t.driver.open(driver, torch_cuda);
  t.serves_cpu = serves_cpu != 0;
  if (reason.empty()) t.started.store(true, std::memory_order_release);
  return said(why, size, reason);
}

void cuda_l2_begin(Begin begin) { table().begin = begin; }

void cuda_l2_resolve(Resolve resolve) { table().resolve = resolve; }

// Puts a plan into the table. name: of the cubin, its number; one module serves every plan of it.
int cuda_l2_put(const uint8_t* plan, size_t plan_size, uint64_t name, const void* cubin, char* why, size_t size) {
  Table& t = table();
  try {
    auto entry = std::make_shared<Entry>(plan, plan_size);
    if (!t.started || !t.enter(entry->key.device)) throw std::runtime_error("the driver has no such device");
    entry->prepare(t.driver, t.module(entry->key.device, name, cubin), t.multiprocessors(entry->key.device));
    t.put(entry->key, entry);
    return said(why, size, "");
  } catch (const std::exception& error) {
    return said(why, size, error.what());
  }
}

void cuda_l2_clear() { table().clear(); }

// tensor: Python's _cdata. Its owner says that all writes to it are counted or announced, until it is variable again.
void cuda_l2_constant(const void* tensor) { table().constants.add(tensor); }

void cuda_l2_variable(const void* tensor) { table().constants.remove(tensor); }

void cuda_l2_invalidate() { table().constants.epoch++; }

uint64_t cuda_l2_mark() { return table().mark(); }

void cuda_l2_release(uint64_t mark) { table().release(mark); }

// Launches what the table has for a shape, `repeats` times, on these addresses: the driver's part of a call.
int cuda_l2_bare(const int32_t* place, const int64_t* sizes, const uint64_t* addresses, Stream stream, int repeats) {
  Table& t = table();
  std::shared_ptr<Entry> entry = t.find({place[0], place[1], place[2], place[3], sizes[0], sizes[1], sizes[2]});
  if (!entry || !entry->workspaces.empty() || !t.enter(place[0])) return 1;
  return entry->launch(t.driver, addresses, stream, t.counts[kEncoded], repeats);
}

// For call.c, without Python's lock: whether a kernel served the product, into `out`, or where that is null into a new
// tensor, `made`. If not, torch.ops has to: so it does all that has constants, whose writes are counted by the tensor,
// and says what is wrong.
int cuda_l2_serve(const DLTensor* a, const DLTensor* b, int transposed, const DLTensor* out, AtenTensorHandle* made) {
  try {
    if (table().constants.count) return 0;
    Owned c;
    if (out) {
      const View given(*out);
      return serve(View(*a), View(*b), transposed != 0, &given, c);
    }
    if (!serve(View(*a), View(*b), transposed != 0, nullptr, c)) return 0;
    *made = c.release();
    return 1;
  } catch (...) {
    return 0;
  }
}

// For call.c: whether a kernel would serve the product. One that could not be launched still counts: what is computed again
// for a gradient is to be recorded as it was at first.
int cuda_l2_serves(const DLTensor* a, const DLTensor* b, int transposed) {
  try {
    const View first(*a), second(*b);
    Problem problem(first, second, transposed != 0, kTuned);
    if (!problem.good || (first.start | second.start) % 16) return 0;
    DeviceGuard guard(first);  // asking for a shape may change the device
    return table().find(problem.key) != nullptr;
  } catch (...) {
    return 0;
  }
}

// With Python's lock: a handle's tensor as an object of Python by torch's own function; null where that fails.
void* cuda_l2_wrapped(AtenTensorHandle handle, void* (*wrap)(const void* tensor)) {
  Owned owned(handle);
  try {
    return wrap(handle);
  } catch (...) {
    return nullptr;
  }
}

void cuda_l2_stop() { table().stop(); }

void cuda_l2_counts(uint64_t* counts) {
  for (int i = 0; i < kCounts; i++) counts[i] = table().counts[i];
}
}
