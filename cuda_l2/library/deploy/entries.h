// What is launched for one shape on one device, as entries.py packs it, and the launch itself.
#pragma once
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "cublaslt.h"

namespace cuda_l2 {

constexpr uint32_t kVersion = 3;  // of the packed form
constexpr int kMaxDims = 5, kMaxMaps = 8, kMaxWorkspaces = 4, kMaxArguments = 32;
constexpr size_t kMaxEncoded = 4096;       // tensor maps kept for an entry; then all are dropped
constexpr size_t kWorkspaceAlign = 1024;   // docs/contract.md
constexpr unsigned kPortableCluster = 8;
enum Rule : int32_t { kTuned, kDeterministic, kInvariant, kAhead };

struct Key {
  int32_t device;
  int32_t dtype;   // 0 fp16, 1 bf16
  int32_t layout;  // of B: 0 nn, 1 tn
  int32_t rule;    // by which a kernel is chosen
  int64_t m, n, k;

  bool operator==(const Key& o) const {
    return m == o.m && n == o.n && k == o.k && device == o.device && dtype == o.dtype && layout == o.layout &&
           rule == o.rule;
  }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = static_cast<uint64_t>(key.m);
    for (uint64_t part : {static_cast<uint64_t>(key.n), static_cast<uint64_t>(key.k),
                          static_cast<uint64_t>(key.device * 16 + key.rule * 4 + key.dtype * 2 + key.layout)}) {
      hash = (hash ^ part) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

// Reads packed numbers; throws where they end early.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  template <class T, size_t N>
  void numbers(T (&values)[N]) {
    std::memcpy(values, take(sizeof(values)), sizeof(values));
  }
  uint32_t count(uint32_t most) {
    uint32_t value = number<uint32_t>();
    if (value > most) throw std::runtime_error("the plan holds too many parts");
    return value;
  }
  std::string bytes() {
    uint32_t size = number<uint32_t>();
    const uint8_t* from = take(size);
    return std::string(reinterpret_cast<const char*>(from), size);
  }

 private:
  const uint8_t* take(size_t size) {
    if (static_cast<size_t>(end_ - at_) < size) throw std::runtime_error("the plan ends early");
    const uint8_t* from = at_;
    at_ += size;
    return from;
  }
  const uint8_t *at_, *end_;
};

struct Workspace {
  uint64_t bytes;
  uint32_t persistent, fill;
};

// Tensors 0, 1, 2 are A, B, C; from 3 on the workspaces.
struct MapPlan {
  uint32_t tensor, rank, dtype, interleave, swizzle, promotion, out_of_bounds;
  uint64_t dims[kMaxDims], strides[kMaxDims - 1];
  uint32_t box[kMaxDims], element_strides[kMaxDims];
};

struct Argument {
  enum Kind : uint32_t { kPointer, kMap, kBytes };
  uint32_t kind, index;
  std::string data;
};

struct Launch {
  std::string kernel;
  uint32_t grid[3], block[3], cluster[3], shared_bytes, programmatic, coresident;
  std::vector<Argument> arguments;
  Function function = nullptr;
  LaunchAttribute attributes[2];
  unsigned attribute_count = 0;

  // ordinary: not before the launch ahead has ended, whatever the plan says.
  LaunchConfig config(Stream stream, bool ordinary = false) {
    unsigned count = attribute_count - (ordinary && programmatic ? 1 : 0);  // its attribute is the last one
    return {{grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes, stream, attributes, count};
  }
};

struct Entry {
  Key key;
  std::vector<Workspace> workspaces;
  std::vector<MapPlan> maps;
  std::vector<Launch> launches;
  std::string algorithm, library;  // cuBLASLt's, and its file; empty where kernels are launched
  std::atomic<bool> broken{false};

  Entry(const uint8_t* data, size_t size) {
    Reader in(data, size);
    if (in.number<uint32_t>() != kVersion) throw std::runtime_error("the plan is of another version");
    key.device = in.number<int32_t>(), key.dtype = in.number<int32_t>(), key.layout = in.number<int32_t>();
    key.rule = in.number<int32_t>();
    key.m = in.number<int64_t>(), key.n = in.number<int64_t>(), key.k = in.number<int64_t>();
    workspaces.resize(in.count(kMaxWorkspaces));
    for (Workspace& w : workspaces) {
      w.bytes = in.number<uint64_t>(), w.persistent = in.number<uint32_t>(), w.fill = in.number<uint32_t>();
    }
    maps.resize(in.count(kMaxMaps));
    for (MapPlan& map : maps) {
      map.tensor = in.number<uint32_t>(), map.rank = in.number<uint32_t>(), map.dtype = in.number<uint32_t>();
      map.interleave = in.number<uint32_t>(), map.swizzle = in.number<uint32_t>();
      map.promotion = in.number<uint32_t>(), map.out_of_bounds = in.number<uint32_t>();
      in.numbers(map.dims), in.numbers(map.strides), in.numbers(map.box), in.numbers(map.element_strides);
      if (map.tensor >= 3 + workspaces.size()) throw std::runtime_error("a tensor map is over no tensor");
    }
    launches.resize(in.count(16));
    for (Launch& launch : launches) {
      launch.kernel = in.bytes();
      in.numbers(launch.grid), in.numbers(launch.block), in.numbers(launch.cluster);
      launch.shared_bytes = in.number<uint32_t>(), launch.programmatic = in.number<uint32_t>();
      launch.coresident = in.number<uint32_t>();
      launch.arguments.resize(in.count(kMaxArguments));
      for (Argument& argument : launch.arguments) {
        argument.kind = in.number<uint32_t>(), argument.index = in.number<uint32_t>(), argument.data = in.bytes();
        size_t most = argument.kind == Argument::kPointer ? 3 + workspaces.size() : maps.size();
        if (argument.kind != Argument::kBytes && argument.index >= most) throw std::runtime_error("no such argument");
      }
    }
    algorithm = in.bytes(), library = in.bytes();
  }

  // Finds the kernels of a module and prepares them; throws where the device cannot launch them as planned.
  void prepare(const Driver& driver, Module module, int multiprocessors) {
    if (!algorithm.empty()) {
      size_t bytes = workspaces.empty() ? 0 : workspaces[0].bytes;
      product_ = std::make_unique<LtProduct>(driver, library, algorithm, key.device, key.dtype == 1, key.layout == 1,
                                             key.m, key.n, key.k, bytes);
    }
    for (Launch& launch : launches) {
      const std::string& name = launch.kernel;
      if (driver.cuModuleGetFunction(&launch.function, module, name.c_str()))
        throw std::runtime_error(name + " is missing");
      pad_arguments(driver, launch);
      fit(driver, launch, multiprocessors);
    }
  }

  // Enqueues every launch; 0 or the driver's error. pointers: A, B, C, then the workspaces. ordinary: as of a Launch.
  Status launch(const Driver& driver, const uint64_t* pointers, Stream stream, std::atomic<uint64_t>& encoded,
                int repeats = 1, bool ordinary = false) {
    if (product_) {
      for (int i = 0; i < repeats; i++)
        if (Status status = product_->launch(pointers, stream)) return status;
      return 0;
    }
    EncodedMap encodings[kMaxMaps];
    if (Status status = encode(driver, pointers, encodings, encoded)) return status;
    for (Launch& launch : launches) {
      void* parameters[kMaxArguments];
      for (size_t i = 0; i < launch.arguments.size(); i++) {
        Argument& argument = launch.arguments[i];
        parameters[i] = argument.kind == Argument::kPointer ? const_cast<uint64_t*>(pointers + argument.index)
                        : argument.kind == Argument::kMap   ? static_cast<void*>(encodings + argument.index)
                                                            : argument.data.data();
      }
      LaunchConfig config = launch.config(stream, ordinary);
      for (int i = 0; i < repeats; i++)
        if (Status status = driver.cuLaunchKernelEx(&config, launch.function, parameters, nullptr)) return status;
    }
    return 0;
  }

 private:
  // The contract's sizes must be those of the kernel's parameters; a table may be shorter than the structure.
  static void pad_arguments(const Driver& driver, Launch& launch) {
    size_t offset, size, count = 0;
    for (; driver.cuFuncGetParamInfo(launch.function, count, &offset, &size) == 0; count++) {
      if (count == launch.arguments.size()) throw std::runtime_error(launch.kernel + " takes more parameters");
      Argument& argument = launch.arguments[count];
      bool bytes = argument.kind == Argument::kBytes;
      size_t has = bytes ? argument.data.size() : argument.kind == Argument::kPointer ? 8 : sizeof(EncodedMap);
      if (has > size || (!bytes && has != size)) throw std::runtime_error(launch.kernel + " takes other parameters");
      if (bytes) argument.data.resize(size);
    }
    if (count != launch.arguments.size()) throw std::runtime_error(launch.kernel + " takes fewer parameters");
  }

  static void fit(const Driver& driver, Launch& launch, int multiprocessors) {
    Function function = launch.function;
    const unsigned* c = launch.cluster;
    unsigned threads = launch.block[0] * launch.block[1] * launch.block[2], cluster = c[0] * c[1] * c[2];
    int most = 0, fits = 0;
    auto require = [&](bool good, const char* what) {
      if (!good) throw std::runtime_error(launch.kernel + " cannot be launched here: " + what);
    };
    if (launch.shared_bytes)
      require(!driver.cuFuncSetAttribute(function, kMaxDynamicShared, launch.shared_bytes), "too much shared memory");
    require(!driver.cuFuncGetAttribute(&most, kMaxThreads, function) && static_cast<int>(threads) <= most,
            "too many threads");
    if (cluster > kPortableCluster)
      require(!driver.cuFuncSetAttribute(function, kNonPortableClusters, 1), "clusters are too large");
    if (cluster > 1) {
      LaunchAttribute& attribute = launch.attributes[launch.attribute_count++];
      attribute = {kClusterDimension, 0, {{c[0], c[1], c[2]}}};
    }
    if (launch.programmatic) {
      LaunchAttribute& attribute = launch.attributes[launch.attribute_count++];
      attribute = {kProgrammaticSerialization, 0, {}};
      attribute.value.programmatic = 1;
    }
    uint64_t resident;
    if (cluster > 1) {
      LaunchConfig config = launch.config(nullptr);
      require(!driver.cuOccupancyMaxActiveClusters(&fits, function, &config) && fits, "no cluster fits");
      resident = static_cast<uint64_t>(fits) * cluster;
    } else {
      Status status =
          driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&fits, function, threads, launch.shared_bytes);
      require(!status && fits, "no block fits");
      resident = static_cast<uint64_t>(fits) * multiprocessors;
    }
    uint64_t blocks = static_cast<uint64_t>(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    require(!launch.coresident || blocks <= resident, "its blocks wait for one another and do not fit at once");
  }

  // Every tensor map. One depends on the pointer alone: sizes, strides and type are the entry's.
  Status encode(const Driver& driver, const uint64_t* pointers, EncodedMap* out, std::atomic<uint64_t>& encoded) {
    if (maps.empty()) return 0;
    std::lock_guard<std::mutex> hold(mutex_);
    for (size_t i = 0; i < maps.size(); i++) {
      const MapPlan& map = maps[i];
      const uint64_t pointer = pointers[map.tensor];
      auto& known = encoded_[i];
      auto found = known.find(pointer);
      if (found != known.end()) {
        out[i] = found->second;
        continue;
      }
      Status status = driver.cuTensorMapEncodeTiled(
          out + i, map.dtype, map.rank, reinterpret_cast<void*>(pointer), map.dims, map.strides, map.box,
          map.element_strides, map.interleave, map.swizzle, map.promotion, map.out_of_bounds);
      if (status) return status;
      if (known.size() >= kMaxEncoded) known.clear();
      known[pointer] = out[i];
      encoded++;
    }
    return 0;
  }

  std::unique_ptr<LtProduct> product_;
  std::mutex mutex_;
  std::array<std::unordered_map<uint64_t, EncodedMap>, kMaxMaps> encoded_;
};

}  // namespace cuda_l2
