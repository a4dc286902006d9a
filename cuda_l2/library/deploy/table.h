// Every entry by its key, modules by device, workspaces by stream. One instance, which lives as long as the process.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <shared_mutex>
#include <tuple>

#include "entries.h"

namespace cuda_l2 {

using Resolve = void (*)(int32_t device, int32_t dtype, int32_t layout, int32_t rule, int64_t m, int64_t n, int64_t k);

using Begin = void (*)();

enum Count { kLaunched, kVendor, kEncoded, kResolved, kAllocated, kReadAhead, kCounts };

// Frees a tensor handle.
class Owned {
 public:
  explicit Owned(AtenTensorHandle handle = nullptr) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_;
};

// Bytes of torch's allocator, on a device's current stream; an empty handle where there are none left.
inline Owned allocate(int32_t device_type, int32_t device, uint64_t bytes, uint64_t& address) {
  AtenTensorHandle handle = nullptr;
  int64_t size = static_cast<int64_t>(bytes + kWorkspaceAlign), stride = 1;
  void* data = nullptr;
  if (aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(), device_type, device, &handle))
    return Owned();
  Owned owned(handle);
  if (aoti_torch_get_data_ptr(handle, &data)) return Owned();
  address = (reinterpret_cast<uint64_t>(data) + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
  return owned;
}

// What an operand was at a launch. Where a later launch finds the same, nothing was written to it since.
struct Seen {
  uint64_t address = 0, epoch = 0;
  int64_t version = -1;
  bool operator==(const Seen& o) const { return address == o.address && epoch == o.epoch && version == o.version; }
};

// Operands that their owner declared constant, by the tensor's identity, and whether a launch may read one before the
// launch ahead of it has ended. All that can be in flight then was enqueued after an ordinary edge that came after
// the operand's last write.
class Constants {
 public:
  std::atomic<size_t> count{0};
  std::atomic<uint64_t> epoch{1};  // moves on at writes that no version counter sees

  void add(const void* tensor) {
    std::lock_guard<std::mutex> hold(mutex_);
    operands_[tensor], count = operands_.size();
  }
  void remove(const void* tensor) {
    std::lock_guard<std::mutex> hold(mutex_);
    operands_.erase(tensor), count = operands_.size();
  }
  bool has(const void* tensor) {
    if (!count) return false;
    std::lock_guard<std::mutex> hold(mutex_);
    return operands_.count(tensor) > 0;
  }
  // Whether a launch on a stream may read an operand ahead. capture: of the graph that is captured there, or 0.
  bool read_ahead(const void* tensor, const Seen& now, Stream stream, uint64_t capture) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = operands_.find(tensor);
    if (found == operands_.end()) return false;
    Operand& operand = found->second;
    if (!capture) return operand.on[stream] == now;
    if (!(operand.latest == now)) operand.writer = capture;  // this graph writes it, or nothing is known of it
    return captures_[stream] == capture && operand.writer != capture;
  }
  // Told once that launch is enqueued, and not before: another thread's would take its edge for granted.
  void launched(const void* tensor, const Seen& now, uint64_t bytes, Stream stream, uint64_t capture) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = operands_.find(tensor);
    if (capture) captures_[stream] = capture;
    else if (found != operands_.end())
      found->second.on[stream] = found->second.latest = now, found->second.bytes = bytes;
  }
  // Memory is written that may be an operand's.
  void wrote(uint64_t begin, uint64_t end) {
    if (!count) return;
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto& [tensor, operand] : operands_)
      if (operand.latest.address < end && begin < operand.latest.address + operand.bytes) {
        epoch++;
        return;
      }
  }

 private:
  struct Operand {
    std::map<Stream, Seen> on;  // at the latest launch on each stream, outside of captures
    Seen latest;                // ... on any
    uint64_t bytes = 0;         // ... from its address on
    uint64_t writer = 0;        // the capture in which it was found changed
  };
  std::mutex mutex_;
  std::unordered_map<const void*, Operand> operands_;
  std::unordered_map<Stream, uint64_t> captures_;  // the latest capture that launched on each stream
};

class Table {
 public:
  Constants constants;
  Driver driver;
  std::atomic<uint64_t> counts[kCounts] = {};
  std::atomic<Resolve> resolve{nullptr};
  std::atomic<Begin> begin{nullptr};  // called once, when a tensor on a CUDA device comes up
  std::atomic<bool> started{false};
  std::atomic<bool> serves_cpu{false};  // in tests, with a driver that records

  // The entry for a shape, asked for once where nothing is known; null for the vendor's kernel.
  std::shared_ptr<Entry> find(const Key& key) {
    {
      std::shared_lock<std::shared_mutex> hold(mutex_);
      auto found = entries_.find(key);
      if (found != entries_.end()) return found->second;
    }
    Resolve ask = resolve;
    if (!ask) return nullptr;
    counts[kResolved]++;
    ask(key.device, key.dtype, key.layout, key.rule, key.m, key.n, key.k);
    std::unique_lock<std::shared_mutex> hold(mutex_);
    return entries_.emplace(key, nullptr).first->second;
  }

  void put(const Key& key, std::shared_ptr<Entry> entry) {
    std::unique_lock<std::shared_mutex> hold(mutex_);
    entries_[key] = std::move(entry);
  }

  void clear() {
    std::unique_lock<std::shared_mutex> hold(mutex_);
    entries_.clear();
  }

  // Forgets the driver; nothing may be under way. For tests, which start another one.
  void stop() {
    started = false;
    clear();
    std::lock_guard<std::mutex> hold(slow_);
    modules_.clear(), kept_.clear(), retired_.clear();
    for (auto& context : contexts_) context = nullptr;
    for (auto& count : counts) count = 0;
  }

  // A cubin on a device, loaded once and kept: graphs may hold its kernels.
  Module module(int32_t device, uint64_t name, const void* cubin) {
    if (!*static_cast<const char*>(cubin)) return nullptr;  // cuBLASLt has its own
    std::lock_guard<std::mutex> hold(slow_);
    Module& module = modules_[{device, name}];
    if (!module) {
      int mode = kRelaxed;  // loading is not captured, and allowed while another stream is
      driver.cuThreadExchangeStreamCaptureMode(&mode);
      Status status = driver.cuModuleLoadData(&module, cubin);
      driver.cuThreadExchangeStreamCaptureMode(&mode);
      if (status) {
        modules_.erase({device, name});
        throw std::runtime_error("the driver does not load the kernel: error " + std::to_string(status));
      }
    }
    return module;
  }

  int multiprocessors(int32_t device) {
    int count = 0, handle = 0;
    if (driver.cuDeviceGet(&handle, device < 0 ? 0 : device) ||
        driver.cuDeviceGetAttribute(&count, kMultiprocessors, handle))
      throw std::runtime_error("the driver does not know the device");
    return count;
  }

  // Makes the device's primary context, which torch uses, the thread's current one.
  bool enter(int32_t device) {
    Context current = nullptr, own = context(device);
    if (!own || driver.cuCtxGetCurrent(&current)) return false;
    return current == own || driver.cuCtxSetCurrent(own) == 0;
  }

  // The capture that a stream is in, or 0.
  uint64_t captured(Stream stream) {
    int status = 0;
    uint64_t capture = 0;
    return driver.cuStreamGetCaptureInfo(stream, &status, &capture) || status != kCapturing ? 0 : capture;
  }

  // A workspace that is filled once and that every launch on the stream leaves so. While a graph is captured it gets
  // its own, whose filling is a part of the graph: what one graph works on must be nobody else's. 0 where there is
  // none.
  uint64_t persistent(int32_t device_type, const Key& key, Stream stream, size_t number, const Workspace& wanted) {
    uint64_t capture = captured(stream);
    std::lock_guard<std::mutex> hold(slow_);
    Kept& kept = kept_[{key.device, stream, capture, wanted.fill, number}];
    if (kept.bytes >= wanted.bytes) return kept.address;
    uint64_t address = 0;
    Owned memory = allocate(device_type, key.device, wanted.bytes, address);
    if (!memory.get() || driver.cuMemsetD32Async(address, wanted.fill, (wanted.bytes + 3) / 4, stream)) return 0;
    counts[kAllocated]++;
    if (kept.memory.get()) retired_.push_back(std::move(kept.memory));  // work under way may use it
    kept.memory = std::move(memory), kept.address = address, kept.bytes = wanted.bytes, kept.number = ++made_;
    return address;
  }

  // Number of workspaces made so far.
  uint64_t mark() {
    std::lock_guard<std::mutex> hold(slow_);
    return made_;
  }

  // Frees the workspaces of graphs that were captured since a mark; those graphs must be gone.
  void release(uint64_t mark) {
    std::lock_guard<std::mutex> hold(slow_);
    for (auto each = kept_.begin(); each != kept_.end();)
      each = std::get<2>(each->first) && each->second.number > mark ? kept_.erase(each) : std::next(each);
  }

 private:
  struct Kept {
    Owned memory;
    uint64_t address = 0, bytes = 0, number = 0;
  };

  Context context(int32_t device) {
    size_t place = device < 0 ? 0 : static_cast<size_t>(device);
    if (place >= contexts_.size()) return nullptr;
    Context found = contexts_[place].load(std::memory_order_acquire);
    int handle = 0;
    if (!found && !driver.cuDeviceGet(&handle, static_cast<int>(place)) &&
        !driver.cuDevicePrimaryCtxRetain(&found, handle))
      contexts_[place].store(found, std::memory_order_release);
    return found;
  }

  std::shared_mutex mutex_;  // of the entries
  std::unordered_map<Key, std::shared_ptr<Entry>, KeyHash> entries_;
  std::mutex slow_;  // of modules and workspaces
  std::map<std::pair<int32_t, uint64_t>, Module> modules_;
  std::map<std::tuple<int32_t, Stream, uint64_t, uint32_t, size_t>, Kept> kept_;
  std::vector<Owned> retired_;
  uint64_t made_ = 0;
  std::array<std::atomic<Context>, 64> contexts_ = {};
};

inline Table& table() {
  static Table* instance = new Table;  // never destroyed: torch's allocator may be gone by then
  return *instance;
}

}  // namespace cuda_l2
