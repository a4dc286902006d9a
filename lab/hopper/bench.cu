// Times kernels (cubins named in a manifest) against autotuned cuBLASLt in one process, and checks every one.
//   bench MANIFEST SHAPES OUT_PREFIX SECONDS [cap]
// MANIFEST: lines "cubin kind NAME=VALUE ..." (kind: wave, persistent, mma, probe). SHAPES: lines M,N,K.
// OUT_PREFIX_best.csv: one row a shape; OUT_PREFIX_all.csv: every candidate; OUT_PREFIX_lt.csv: cuBLASLt's candidates.
// Device time, warm: replays of a CUDA graph of back-to-back launches. Errors are relative RMS against an fp32 sum.
#include <cublasLt.h>
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

static std::string g_last, g_skip_path, g_done_path;
// A fault kills the context: note the kernel so that the next run of this program leaves it out.
static void give_up(int code) { FILE* f = fopen(g_skip_path.c_str(), "a"); if (f) { fprintf(f, "%s\n", g_last.c_str()); fclose(f); } fflush(stdout); _exit(code); }
#define CHECK(x) do { auto e_ = (x); if (e_ != cudaSuccess) { fprintf(stderr, "cuda %s line %d last %s\n", cudaGetErrorString(e_), __LINE__, g_last.c_str()); give_up(3); } } while (0)
#define CU(x) do { CUresult e_ = (x); if (e_) { const char* s_; cuGetErrorString(e_, &s_); fprintf(stderr, "cu %s line %d last %s\n", s_, __LINE__, g_last.c_str()); give_up(4); } } while (0)

static double now() { static auto t0 = std::chrono::steady_clock::now(); return std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count(); }
static cudaStream_t S; static cudaEvent_t E0, E1;
static half *A, *B, *BT, *C; static float *CF, *WS; static double* ACC; static unsigned* CNT; static void* LTWS;
static const size_t WS_BYTES = 192u << 20, CNT_BYTES = 1 << 20; static size_t LTWS_BYTES = 256u << 20;
static const int SMEM_MAX = 232448;

// ---- data and checks
__global__ void fill(half* p, size_t n, unsigned seed) {  // standard normal
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    unsigned long long z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0x632BE59BD9B4E019ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull; z = (z ^ (z >> 27)) * 0x94D049BB133111EBull; z ^= z >> 31;
    p[i] = __float2half(sqrtf(-2 * logf(((unsigned)(z >> 40) + 1) / 16777217.f)) * cospif(2 * (((unsigned)(z & 0xffffff)) / 16777216.f)));
  }
}
__global__ void transpose(const half* bt, half* b, int K, int N) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < (size_t)K * N) b[(i % K) * N + i / K] = bt[i];
}
__global__ void __launch_bounds__(256) reference(const half* A, const half* BT, float* C, int M, int N, int K) {
  __shared__ float as[16][65], bs[16][65];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, m0 = blockIdx.y * 64, n0 = blockIdx.x * 64;
  float c[4][4] = {};
  for (int k = 0; k < K; k += 16) {
    for (int i = threadIdx.x; i < 1024; i += 256) { int r = i / 16, q = i % 16; as[q][r] = __half2float(A[(size_t)(m0 + r) * K + k + q]); bs[q][r] = __half2float(BT[(size_t)(n0 + r) * K + k + q]); }
    __syncthreads();
    for (int q = 0; q < 16; q++) { float a[4], b[4]; for (int i = 0; i < 4; i++) { a[i] = as[q][ty * 4 + i]; b[i] = bs[q][tx * 4 + i]; } for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) c[i][j] += a[i] * b[j]; }
    __syncthreads();
  }
  for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) C[(size_t)(m0 + ty * 4 + i) * N + n0 + tx * 4 + j] = c[i][j];
}
__global__ void deviation(const half* c, const float* r, size_t n, double* acc) {
  double d = 0, q = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) { double x = __half2float(c[i]), y = r[i]; d += (x - y) * (x - y); q += y * y; }
  for (int o = 16; o; o >>= 1) { d += __shfl_xor_sync(~0u, d, o); q += __shfl_xor_sync(~0u, q, o); }
  if (threadIdx.x % 32 == 0) { atomicAdd(acc, d); atomicAdd(acc + 1, q); }
}
__global__ void all_equal(const unsigned* p, size_t n, unsigned v, double* acc) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) if (p[i] != v) atomicAdd(acc, 1.0);
}
static double rel_error(size_t n) {
  cudaMemsetAsync(ACC, 0, 16, S); deviation<<<264, 256, 0, S>>>(C, CF, n, ACC);
  double a[2]; cudaMemcpyAsync(a, ACC, 16, cudaMemcpyDeviceToHost, S); CHECK(cudaStreamSynchronize(S)); return sqrt(a[0] / a[1]);
}
static void poison(size_t n) { cudaMemsetAsync(C, 0xff, n * 2, S); }
static void reset_workspace() { cudaMemsetAsync(WS, 0xff, WS_BYTES, S); cudaMemsetAsync(CNT, 0, CNT_BYTES, S); }
static void set_shape(int M, int N, int K) {
  static unsigned seed = 1;
  fill<<<1024, 256, 0, S>>>(A, (size_t)M * K, seed++); fill<<<1024, 256, 0, S>>>(BT, (size_t)N * K, seed++);
  transpose<<<(unsigned)(((size_t)K * N + 255) / 256), 256, 0, S>>>(BT, B, K, N);
  reference<<<dim3(N / 64, M / 64), 256, 0, S>>>(A, BT, CF, M, N, K); CHECK(cudaGetLastError()); CHECK(cudaStreamSynchronize(S));
}
// ---- timing: microseconds a launch, median of `reps` replays of `launches` launches; < 0 if a launch is refused
static std::string g_kernels;
static float replay(const std::function<bool()>& f, int launches, int reps, bool names = false) {
  cudaGraph_t g; cudaGraphExec_t x;
  CHECK(cudaStreamBeginCapture(S, cudaStreamCaptureModeRelaxed));
  bool ok = true; for (int i = 0; i < launches && ok; i++) ok = f();
  cudaError_t e = cudaStreamEndCapture(S, &g); if (e || !ok) { cudaGetLastError(); return -1; }
  if (names) {
    g_kernels.clear(); size_t n = 0; cudaGraphGetNodes(g, nullptr, &n); std::vector<cudaGraphNode_t> v(n); cudaGraphGetNodes(g, v.data(), &n);
    for (auto node : v) {
      CUDA_KERNEL_NODE_PARAMS p; memset(&p, 0, sizeof p); CUgraphNodeType ty; cuGraphNodeGetType(node, &ty);
      char t[400];
      if (ty == CU_GRAPH_NODE_TYPE_KERNEL && !cuGraphKernelNodeGetParams(node, &p)) {
        const char* nm = "?"; if (p.func) cuFuncGetName(&nm, p.func); else if (p.kern) cuKernelGetName(&nm, p.kern);
        snprintf(t, 400, "%s[%ux%ux%u]", nm, p.gridDimX, p.gridDimY, p.gridDimZ);
      } else snprintf(t, 400, "node%d", (int)ty);
      if (!g_kernels.empty()) g_kernels += "+"; g_kernels += t;
    }
  }
  if (cudaGraphInstantiate(&x, g, 0)) { cudaGetLastError(); cudaGraphDestroy(g); return -1; }
  std::vector<float> v; cudaGraphLaunch(x, S);
  for (int r = 0; r < reps; r++) { cudaEventRecord(E0, S); cudaGraphLaunch(x, S); cudaEventRecord(E1, S); CHECK(cudaEventSynchronize(E1)); float ms; cudaEventElapsedTime(&ms, E0, E1); v.push_back(ms * 1000 / launches); }
  cudaGraphExecDestroy(x); cudaGraphDestroy(g); std::sort(v.begin(), v.end()); return v[v.size() / 2];
}
// ---- cuBLASLt
#define FN(n) static decltype(&n) p_##n;
FN(cublasLtCreate) FN(cublasLtGetVersion) FN(cublasLtMatmulDescCreate) FN(cublasLtMatmulDescSetAttribute) FN(cublasLtMatrixLayoutCreate) FN(cublasLtMatmulPreferenceCreate) FN(cublasLtMatmulPreferenceSetAttribute) FN(cublasLtMatmulAlgoGetHeuristic) FN(cublasLtMatmul)
static cublasLtHandle_t LT;
static void lt_init() {
  void* h = dlopen("libcublasLt.so.13", RTLD_NOW); if (!h) { printf("dlopen %s\n", dlerror()); exit(9); }
#define LD(n) p_##n = (decltype(&n))dlsym(h, #n);
  LD(cublasLtCreate) LD(cublasLtGetVersion) LD(cublasLtMatmulDescCreate) LD(cublasLtMatmulDescSetAttribute) LD(cublasLtMatrixLayoutCreate) LD(cublasLtMatmulPreferenceCreate) LD(cublasLtMatmulPreferenceSetAttribute) LD(cublasLtMatmulAlgoGetHeuristic) LD(cublasLtMatmul)
  p_cublasLtCreate(&LT); CHECK(cudaMalloc(&LTWS, LTWS_BYTES));
}
struct Lt {  // row-major C = A B seen as column-major C^T = B^T A^T
  cublasLtMatmulDesc_t op; cublasLtMatrixLayout_t a, b, c; std::vector<cublasLtMatmulHeuristicResult_t> algos; bool tn; float one = 1, zero = 0;
  Lt(int M, int N, int K, bool tn) : tn(tn) {
    p_cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasOperation_t t = tn ? CUBLAS_OP_T : CUBLAS_OP_N; p_cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t);
    if (tn) p_cublasLtMatrixLayoutCreate(&b, CUDA_R_16F, K, N, K); else p_cublasLtMatrixLayoutCreate(&b, CUDA_R_16F, N, K, N);
    p_cublasLtMatrixLayoutCreate(&a, CUDA_R_16F, K, M, K); p_cublasLtMatrixLayoutCreate(&c, CUDA_R_16F, N, M, N);
    cublasLtMatmulPreference_t p; p_cublasLtMatmulPreferenceCreate(&p);
    p_cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &LTWS_BYTES, sizeof LTWS_BYTES);
    algos.resize(100); int n = 0; p_cublasLtMatmulAlgoGetHeuristic(LT, op, b, a, c, c, p, 100, algos.data(), &n); algos.resize(n);
  }
  bool run(int i) { return p_cublasLtMatmul(LT, op, &one, tn ? BT : B, b, A, a, &zero, C, c, C, c, &algos[i].algo, LTWS, LTWS_BYTES, S) == CUBLAS_STATUS_SUCCESS; }
};
// ---- kernels
struct Kernel { std::string name, kind; std::map<std::string, int> d; CUfunction f; int operator()(const char* k, int def) const { auto i = d.find(k); return i == d.end() ? def : i->second; } };
static CUtensorMapL2promotion g_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
static CUtensorMap tensor_map(void* p, int rank, uint64_t d0, uint64_t d1, uint64_t d2, uint64_t s1, uint64_t s2, uint32_t b0, uint32_t b1, uint32_t b2, CUtensorMapSwizzle sw = CU_TENSOR_MAP_SWIZZLE_128B) {
  CUtensorMap m; cuuint64_t d[3] = {d0, d1, d2}, s[2] = {s1, s2}; cuuint32_t b[3] = {b0, b1, b2}, e[3] = {1, 1, 1};
  CU(cuTensorMapEncodeTiled(&m, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, p, d, s, b, e, CU_TENSOR_MAP_INTERLEAVE_NONE, sw, g_promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)); return m;
}
// K-major operand [rows, K] as (64, rows, K / 64); row-major B [K, N] as (64, K, N / 64)
static CUtensorMap k_major(void* p, int rows, int K, int box_rows, int box_k) { return tensor_map(p, 3, 64, rows, K / 64, (uint64_t)K * 2, 128, 64, box_rows, box_k); }
static CUtensorMap mn_major(void* p, int N, int K, int box_n, int box_k) { return tensor_map(p, 3, 64, K, N / 64, (uint64_t)N * 2, 128, 64, box_k, box_n / 64); }
// ---- where the hardware puts clusters, and orders of tiles made for it
__global__ void where(unsigned* out) { unsigned sm; asm volatile("mov.u32 %0, %%smid;" : "=r"(sm)); if (threadIdx.x == 0) out[blockIdx.x] = sm; for (int i = 0; i < 400; i++) __nanosleep(20); }
static std::vector<unsigned> sm_of_blocks(int cluster, int blocks) {  // one block an SM
  cudaFuncSetAttribute(where, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024); cudaFuncSetAttribute(where, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchConfig_t cfg = {}; cfg.gridDim = dim3(blocks); cfg.blockDim = dim3(32); cfg.dynamicSmemBytes = 200 * 1024; cfg.stream = S; cudaLaunchAttribute at; at.id = cudaLaunchAttributeClusterDimension; at.val.clusterDim.x = cluster; at.val.clusterDim.y = at.val.clusterDim.z = 1; cfg.attrs = &at; cfg.numAttrs = 1;
  std::vector<unsigned> v(blocks, 0); if (cudaLaunchKernelEx(&cfg, where, (unsigned*)C) != cudaSuccess) { cudaGetLastError(); return {}; }
  cudaMemcpyAsync(v.data(), C, blocks * 4, cudaMemcpyDeviceToHost, S); CHECK(cudaStreamSynchronize(S)); return v;
}
static std::map<unsigned, int> g_gpc;  // SM -> GPC
static void find_gpcs() {
  auto big = sm_of_blocks(16, 112), all = sm_of_blocks(1, 132); for (size_t i = 0; i < big.size(); i++) g_gpc[big[i]] = (int)i / 16 + 1;
  int last = 0; for (unsigned s : all) { if (g_gpc.count(s)) last = g_gpc[s]; else g_gpc[s] = -1 - last; }  // SMs that no cluster of 16 reaches: beside their neighbours in launch order
  std::map<int, int> n; for (auto& p : g_gpc) if (p.second < 0) n[p.second]++;
  for (auto& p : g_gpc) if (p.second < 0) p.second = n[p.second] > 4 ? 0 : -1 - p.second;
}
static const std::vector<int>& gpc_of_clusters(int cluster, int clusters) {
  static std::map<std::pair<int, int>, std::vector<int>> cache; auto key = std::make_pair(cluster, clusters); auto it = cache.find(key); if (it != cache.end()) return it->second;
  std::vector<int> g; if (cluster * clusters <= 132) { auto v = sm_of_blocks(cluster, cluster * clusters); for (size_t i = 0; i < v.size(); i += cluster) g.push_back(g_gpc[v[i]]); } return cache[key] = g;
}
// position of each cluster when they are sorted by GPC
static std::vector<int> rank_by_gpc(const std::vector<int>& g) {
  std::vector<int> order, rank(g.size()); std::map<int, int> first; for (size_t i = 0; i < g.size(); i++) if (!first.count(g[i])) first[g[i]] = (int)i;
  for (size_t i = 0; i < g.size(); i++) order.push_back((int)i);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return first[g[a]] < first[g[b]]; }); for (size_t i = 0; i < order.size(); i++) rank[order[i]] = (int)i; return rank;
}
typedef std::vector<uint16_t> Table;
static std::vector<std::pair<std::string, Table>> wave_orders(int gm, int gn, int cluster, int placed) {  // placed: clusters of the launch
  std::vector<std::pair<std::string, Table>> out; const int n = gm * gn; Table t(528, 0);
  for (int i = 0; i < n; i++) t[i] = (i / gn) | (i % gn) << 8; out.push_back({"r0", t}); if (gm == 1 || gn == 1) return out;
  for (int i = 0; i < n; i++) t[i] = (i % gm) | (i / gm) << 8; out.push_back({"r1", t});
  std::vector<int> g = gpc_of_clusters(cluster, placed); if (g.empty()) return out; g.resize(n); auto rank = rank_by_gpc(g);
  const int size = std::max(2, 16 / cluster);
  for (int bh = 1; bh <= size; bh *= 2) { const int bw = size / bh; if (gm % bh || gn % bw || n < size) continue;
    for (int i = 0; i < n; i++) { const int p = rank[i], blk = p / size, in = p % size, across = gn / bw, by = blk / across, bx0 = blk % across, bx = by & 1 ? across - 1 - bx0 : bx0; t[i] = (by * bh + in % bh) | (bx * bw + in / bh) << 8; }
    out.push_back({"q" + std::to_string(bh) + "x" + std::to_string(bw), t}); }
  return out;
}
struct Launch { const Kernel* k; CUtensorMap x, y, c; unsigned gx, gy, cluster, threads, smem; int M, N, K, extra; float est; std::string name; Table order = Table(528, 0); };
static bool go(const Launch& l, int pdl_mode) {
  CUlaunchConfig cfg; memset(&cfg, 0, sizeof cfg); cfg.gridDimX = l.gx; cfg.gridDimY = l.gy; cfg.gridDimZ = 1; cfg.blockDimX = l.threads; cfg.blockDimY = cfg.blockDimZ = 1; cfg.sharedMemBytes = l.smem; cfg.hStream = S;
  CUlaunchAttribute at[2]; int n = 0;
  if (l.cluster > 1) { at[n].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION; at[n].value.clusterDim.x = l.cluster; at[n].value.clusterDim.y = at[n].value.clusterDim.z = 1; n++; }
  if (pdl_mode) { at[n].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION; at[n].value.programmaticStreamSerializationAllowed = 1; n++; }
  cfg.attrs = at; cfg.numAttrs = n;
  int pdl = pdl_mode - 1, M = l.M, N = l.N, K = l.K, extra = l.extra; half *c = C, *a = A, *b = (*l.k)("TB", 0) ? B : BT; float* w = WS + ((*l.k)("L2X", 0) ? WS_BYTES / 8 : 0); unsigned* cnt = CNT;
  if (l.k->kind == "mma") { void* args[] = {&a, &b, &c, &M, &N, &K, &pdl}; return !cuLaunchKernelEx(&cfg, l.k->f, args, nullptr); }
  const bool res = l.k->kind == "resident"; void* second = l.k->kind == "probe" || res ? (void*)&a : (void*)&w; void* third = res ? (void*)&b : (void*)&cnt;
  void* args[] = {(void*)&l.x, (void*)&l.y, (void*)&l.c, &c, second, third, &M, &N, &K, &extra, &pdl, (void*)l.order.data()};
  CUresult e = cuLaunchKernelEx(&cfg, l.k->f, args, nullptr);
  if (e) { static int said = 0; if (said++ < 5) { const char* s; cuGetErrorString(e, &s); printf("launch %s: %s\n", l.name.c_str(), s); } }
  return !e;
}
static int resident(const Kernel& k, unsigned cluster, unsigned threads, unsigned smem) {
  if (cluster == 1) { int b = 0; cuOccupancyMaxActiveBlocksPerMultiprocessor(&b, k.f, threads, smem); return b * 132; }
  CUlaunchConfig cfg; memset(&cfg, 0, sizeof cfg); cfg.gridDimX = cluster * 132; cfg.gridDimY = cfg.gridDimZ = 1; cfg.blockDimX = threads; cfg.blockDimY = cfg.blockDimZ = 1; cfg.sharedMemBytes = smem;
  CUlaunchAttribute at; at.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION; at.value.clusterDim.x = cluster; at.value.clusterDim.y = at.value.clusterDim.z = 1; cfg.attrs = &at; cfg.numAttrs = 1;
  int n = 0; if (cuOccupancyMaxActiveClusters(&n, k.f, &cfg)) return 0; return n * cluster;
}
static std::vector<Launch> launches(const Kernel& k, int M, int N, int K) {
  std::vector<Launch> out; Launch l; memset(&l.x, 0, sizeof l.x); memset(&l.y, 0, sizeof l.y); memset(&l.c, 0, sizeof l.c);
  l.k = &k; l.M = M; l.N = N; l.K = K; l.gy = 1; l.extra = 0; l.cluster = 1; l.name = k.name;
  if (k.kind == "probe") {
    l.cluster = k("CM", 1); l.gx = k("GRID", 128); l.threads = 128; l.smem = 200 * 1024; l.est = 0; l.x = k_major(A, M, K, 64, 1); out.push_back(l); return out;
  }
  if (k.kind == "mma") {
    const int WM = k("WM", 1), WN = k("WN", 1), WK = k("WK", 1), bm = 16 * k("MI", 1) * WM, bn = 8 * k("NJ", 2) * WN, kq = 32 * k("KS", 2) * WK;
    if (M % bm || N % bn || K % kq || (k("ONCE", 0) && K != kq)) return out;
    const long ct = (long)(M / bm) * (N / bn); if (ct > 2112 || (double)M * N * K > 6e8) return out;
    l.gx = N / bn; l.gy = M / bm; l.threads = WM * WN * WK * 32; l.smem = 0;
    const double waves = std::max(1.0, ct * l.threads / (132. * 512)); l.est = 1.1 + (K / (double)kq) * 0.3 * waves + (double)ct * K * (bm + bn) * 2 / std::min(7e6, std::min<double>(ct, 132) * 100e3); out.push_back(l); return out;
  }
  if (k.kind == "resident") {
    const int BM = k("BM", 64), BN = k("BN", 32), NWG = k("NWG", 1), KWG = k("KWG", 1), steps = K / 64, blocks = M % BM || N % BN ? 0 : (M / BM) * (N / BN);
    l.smem = std::max(steps * (BM + BN) * 128, std::max(NWG * 4 * 16 * (BN * 2 + 16), (KWG - 1) * BM * BN * 4)) + 1024; if (!blocks || blocks > 264 || steps > 32 || steps < KWG || (int)l.smem > (k("MINB", 1) == 2 ? 115000 : SMEM_MAX - 512)) return out;
    l.gx = blocks; l.threads = NWG * KWG * 128; l.est = 1.4 + (double)blocks * K * (BM + BN) * 2 / std::min(9e6, std::min(132, blocks) * 200e3) * (blocks > 132 ? 1.3 : 1) + K * BN / 32. * BM / 64 / 1.7e3 * 0.3 + (double)M * N * 2 / 5e6;
    for (auto& o : wave_orders(M / BM, N / BN, 1, blocks)) { l.order = o.second; l.name = k.name + " " + o.first; out.push_back(l); } return out;
  }
  const bool pers = k.kind == "persistent";
  const int BM = k("BM", pers ? 128 : 64), BN = k("BN", pers ? 256 : 64), KB = k("KB", pers ? 1 : 2), ST = k("STAGES", 4), NWG = k("NWG", pers ? 2 : 1), CM = k("CM", pers ? 2 : 1), CN = k("CN", 1);
  const int CK = k("CK", 1), SL = k("SL", 1), MC = k("MC", 1), TB = k("TB", 0), SW = k("SWAP", 0), MINB = k("MINB", 1);
  const int rows = SW ? N : M, cols = SW ? M : N, steps = K / 64 / KB;
  if (K % (64 * KB) || steps < CK * SL || (!pers && (rows % (BM * CM) || cols % (BN * CN)))) return out;
  const bool multi = MC && CM * CN > 1; const int xk = multi ? 1 : KB, stage = KB * (BM + BN) * 128, NC = NWG * 128;
  g_promotion = (CUtensorMapL2promotion)k("PROMO", 3);
  l.cluster = CM * CN * CK; const long tiles = pers ? (long)((rows + BM * CM - 1) / (BM * CM)) * ((cols + BN * CN - 1) / (BN * CN)) * CM * CN : (long)(rows / BM) * (cols / BN), blocks = tiles * CK * SL;
  l.x = k_major(SW ? BT : A, rows, K, BM / (pers || multi ? CN : 1), xk);
  l.y = TB ? mn_major(B, N, K, BN / (pers || multi ? CM : 1), 64 * KB) : k_major(SW ? A : BT, cols, K, BN / (pers || multi ? CM : 1), xk);
  const int CW = BN % 64 == 0 ? 64 : BN % 80 == 0 ? 80 : BN;
  if (pers) l.c = SW ? tensor_map(C, 2, N, M, 1, (uint64_t)N * 2, 0, 64, BN, 1) : tensor_map(C, 2, N, M, 1, (uint64_t)N * 2, 0, CW, k("WGSTORE", 0) ? 64 : 16, 1, CW == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE);
  const int R = BM / 64 / NWG * BN / 2; 
  if (pers) {
    l.threads = NC + 128; l.smem = ST * stage + NWG * k("OUT", 2) * (SW || k("WGSTORE", 0) ? BN * 128 : 4 * CW * 32) + 1024; if (l.smem > SMEM_MAX - 256) return out;
    static std::map<const Kernel*, int> cache; if (!cache.count(&k)) cache[&k] = resident(k, l.cluster, l.threads, l.smem);
    const int cap = std::min(cache[&k], 132); if (!cap) return out;
    const long waves = (tiles + cap - 1) / cap; if (tiles < cap / 2) return out;
    l.gx = (unsigned)std::min<long>(cap, tiles); const double step = std::max(BM * BN / 2048. / 1.6e3, (BM / (double)CN + BN / (double)CM) * 128 / 75e3);
    l.est = 2 + waves * (K / 64 * step + (k("PINGPONG", 0) ? 0.2 : 1.0) * BM * BN / 32768.);
    const int gm = (rows + BM * CM - 1) / (BM * CM), gn = (cols + BN * CN - 1) / (BN * CN); if (BM * CM > rows + BM || (double)gm * BM * CM * gn * BN * CN > 1.35 * M * N) return out;
    const int n = gm * gn, nc = l.gx / l.cluster; std::vector<int> g = gpc_of_clusters(l.cluster, nc), rank; if (!g.empty()) rank = rank_by_gpc(g); else for (int i = 0; i < nc; i++) rank.push_back(i);
    for (int w : {4, 2, 8, 16, 1, -4, -2, -8, -16}) for (int p = 0; p < 2; p++) {
      const int dim = w > 0 ? gm : gn; if (std::abs(w) > dim && std::abs(w) > 4) continue; const int e = w > 0 ? std::min(w, gm) : -std::min(-w, gn); l.name = k.name + " g" + std::to_string(e) + (p ? "p" : "");
      if (n <= 528) { l.extra = 0; for (int t = 0; t < n; t++) { const int wave = t / nc * nc, left = std::min(nc, n - wave), q = p && left == nc ? wave + rank[t % nc] : t; const int a = std::abs(e), G = e > 0 ? gm : gn, H = e > 0 ? gn : gm, per = a * H, band = q / per, first = band * a, ww = std::min(a, G - first), in = q - band * per; const int x = first + in % ww, y = in / ww; l.order[t] = e > 0 ? x | y << 8 : y | x << 8; } }
      else { l.extra = e; for (int i = 0; i < nc && i < 528; i++) l.order[i] = p ? rank[i] : i; }
      out.push_back(l); }
    return out;
  }
  const bool sr = R >= 128 && NWG > 1; l.threads = NC + (sr ? 128 : 32);
  const int rk = R / CK; const int inbox = CK > 1 ? (CK - 1) * rk * NC * 4 : 0;
  const int staging = NC / 32 * (SW ? BN * 48 : 16 * (BN * 2 + 16));
  l.smem = (k("WARM", 0) ? ST * stage + staging : std::max(ST * stage, staging)) + inbox + 1024;
  if (l.smem > (MINB == 2 ? 228 * 1024 / 2 - 1280 : SMEM_MAX - 512)) return out;
  if (blocks > 264 * CM * CN * CK || (SL > 1 && (size_t)tiles * CK * SL * (SL - 1) * (rk / SL) * NC * 4 > WS_BYTES / 2)) return out;
  static std::map<const Kernel*, int> cache; if (!cache.count(&k)) cache[&k] = resident(k, l.cluster, l.threads, l.smem);
  const int cap = cache[&k]; if (!cap || (SL > 1 && blocks > cap)) return out;
  l.gx = (unsigned)(blocks / SL); l.gy = SL;
  const int per_sm = std::max(1, cap / 132); const double sms = std::min<double>(132, blocks), waves = std::ceil(blocks / (double)std::min(cap, 132 * per_sm)), part = std::ceil(steps / (double)(CK * SL)) * KB;
  const double mma = waves * std::min<double>(per_sm, std::ceil(blocks / 132.)) * part * BM * BN / 2048. / 1.75e3;
  const double bytes = (BM / (multi ? (double)CN : 1) + BN / (multi ? (double)CM : 1)) * 128 * part * blocks, l2 = bytes / std::min(9.0e6, sms * 200e3);
  l.est = 1.6 + std::max(mma, l2) + (CK > 1 ? 0.3 + rk * NC * 4. * (CK - 1) / 32e3 : 0) + (SL > 1 ? 0.6 + blocks * (double)(rk / SL) * (SL - 1) * NC * 4 * 2 / 5e6 : 0) + (double)M * N * 2 / 5e6;
  const int gm = rows / (BM * CM), gn = cols / (BN * CN); if (gm * gn > k("ORDER", 264)) return out;
  for (auto& o : wave_orders(gm, gn, l.cluster, (int)(blocks / l.cluster))) { l.order = o.second; l.name = k.name + " " + o.first; out.push_back(l); }
  return out;
}
struct Cand { Launch l; float t; };
int main(int argc, char** argv) {
  setvbuf(stdout, 0, _IOLBF, 0); now(); const double limit = atof(argv[4]); const int cap = argc > 5 ? atoi(argv[5]) : 120;
  std::string pre = argv[3]; g_skip_path = pre + "_skip.txt"; g_done_path = pre + "_done.txt"; std::map<std::string, int> skip, done; { std::string s; std::ifstream f(g_skip_path); while (std::getline(f, s)) skip[s] = 1; std::ifstream d(g_done_path); while (std::getline(d, s)) done[s] = 1; }
  CHECK(cudaSetDevice(0)); CHECK(cudaFree(0)); CHECK(cudaStreamCreateWithFlags(&S, cudaStreamNonBlocking)); CHECK(cudaEventCreate(&E0)); CHECK(cudaEventCreate(&E1));
  const size_t MX = (size_t)16384 * 16384;
  CHECK(cudaMalloc(&A, MX * 2)); CHECK(cudaMalloc(&B, MX * 2)); CHECK(cudaMalloc(&BT, MX * 2)); CHECK(cudaMalloc(&C, MX * 2)); CHECK(cudaMalloc(&CF, MX * 4)); CHECK(cudaMalloc(&ACC, 16)); CHECK(cudaMalloc(&WS, WS_BYTES)); CHECK(cudaMalloc(&CNT, CNT_BYTES));
  reset_workspace(); lt_init(); find_gpcs(); { std::map<int, int> n; for (auto& p : g_gpc) n[p.second]++; printf("GPCs:"); for (auto& p : n) printf(" %d", p.second); printf("\n"); }
  std::vector<Kernel> ks; { std::ifstream f(argv[1]); std::string line; while (std::getline(f, line)) { std::istringstream is(line); std::string path, kv; Kernel k; if (!(is >> path >> k.kind)) continue; while (is >> kv) { auto p = kv.find('='); k.d[kv.substr(0, p)] = atoi(kv.c_str() + p + 1); k.name += (k.name.empty() ? "" : " ") + kv; } k.name = k.kind + " " + k.name;
    CUmodule m; g_last = path; if (cuModuleLoad(&m, path.c_str())) { static int missing = 0; if (!missing++) printf("no module %s %s (and perhaps more)\n", path.c_str(), k.name.c_str()); continue; } CU(cuModuleGetFunction(&k.f, m, "gemm"));
    int st = 0; cuFuncGetAttribute(&st, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, k.f); int loc = 0; cuFuncGetAttribute(&loc, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, k.f); if (loc) printf("local memory %d: %s\n", loc, k.name.c_str());
    CU(cuFuncSetAttribute(k.f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SMEM_MAX - st)); CU(cuFuncSetAttribute(k.f, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)); ks.push_back(k); } }
  int drv; cudaDriverGetVersion(&drv); cudaDeviceProp pr; cudaGetDeviceProperties(&pr, 0); printf("%zu kernels, %s, driver API %d, cuBLASLt %zu, %.1fs\n", ks.size(), pr.name, drv, p_cublasLtGetVersion(), now());
  FILE* fb = fopen((pre + "_best.csv").c_str(), "a"); FILE* fa = fopen((pre + "_all.csv").c_str(), "a"); FILE* fl = fopen((pre + "_lt.csv").c_str(), "a");
  std::ifstream f(argv[2]); std::string line; int bad = 0;
  while (std::getline(f, line)) {
    int M, N, K; if (sscanf(line.c_str(), "%d,%d,%d", &M, &N, &K) != 3) continue; if (done.count(line)) continue; if (now() > limit) { printf("time limit\n"); break; }
    const double t0 = now(); set_shape(M, N, K); const size_t MN = (size_t)M * N; const double flops = 2. * M * N * K;
    if (ks.size() && ks[0].kind == "probe") { for (auto& k : ks) for (auto& l : launches(k, M, N, K)) { g_last = l.name; printf("probe %-40s %.3f us\n", l.name.c_str(), replay([&] { return go(l, 0); }, 100, 9)); } continue; }
    const double guess = std::max(2.5, flops / 600e6); const int Rq = std::max(2, (int)std::min(40., 120 / guess)), Qq = guess > 200 ? 3 : 5;
    { Lt w(M, N, K, true); for (int i = 0; i < (int)(300 / guess) + 1; i++) if (w.algos.size()) w.run(0); }
    Lt* L[2] = {new Lt(M, N, K, false), new Lt(M, N, K, true)}; float at = 0; int bi = 0; std::string atk; double aterr = 0; std::vector<std::string> names;
    if (getenv("PROFILE")) { if (atoi(getenv("PROFILE")) == 1) for (int t = 0; t < 2; t++) for (int i = 0; i < (int)L[t]->algos.size(); i++) L[t]->run(i); for (auto& k : ks) for (auto& l : launches(k, M, N, K)) { printf("profile %s\n", l.name.c_str()); go(l, 0); if (atoi(getenv("PROFILE")) == 1) break; } CHECK(cudaStreamSynchronize(S)); continue; }
    std::vector<std::tuple<float, int, int>> lv;
    for (int t = 0; t < 2; t++) for (int i = 0; i < (int)L[t]->algos.size(); i++) { g_last = "lt"; poison(MN); if (!L[t]->run(i)) continue; double e = rel_error(MN); float g = replay([&] { return L[t]->run(i); }, Rq, Qq, false); if (g < 0) continue; lv.push_back({g, t, i}); aterr = std::max(aterr, e); }
    std::sort(lv.begin(), lv.end());
    const int na = (int)std::min<size_t>(lv.size(), guess > 400 ? 3 : 4);  // baseline finalists, all of them timed again beside ours
    for (size_t i = 0; i < lv.size(); i++) { auto [g, t, j] = lv[i]; int t_ = t, j_ = j; replay([&] { return L[t_]->run(j_); }, 1, 1, true); fprintf(fl, "%d,%d,%d,%s,%.3f,%s\n", M, N, K, t ? "TN" : "NN", g, g_kernels.c_str()); if ((int)i < na) names.push_back(g_kernels); }
    fflush(fl);
    // First every kernel in its default order of tiles, then the best ones in every other order.
    std::vector<Launch> ls, more; for (auto& k : ks) { bool first = true; for (auto& l : launches(k, M, N, K)) if (!skip.count(l.name)) { (first ? ls : more).push_back(l); first = false; } }
    std::sort(ls.begin(), ls.end(), [](const Launch& a, const Launch& b) { return a.est < b.est; }); if ((int)ls.size() > cap) ls.resize(cap); if (guess > 400) ls.resize(std::min<size_t>(ls.size(), 30));
    std::vector<Cand> cs; const float limit_est = ls.empty() ? 0 : 2.5 * ls[0].est;
    auto attempt = [&](const Launch& l) {
      g_last = l.name; poison(MN); if (!go(l, 0)) return; double e = rel_error(MN);
      if (!(e < 4e-4)) { bad++; printf("WRONG %d,%d,%d %s error %g\n", M, N, K, l.name.c_str(), e); reset_workspace(); return; }
      float t = replay([&] { return go(l, 0); }, Rq, Qq); if (t < 0) return; cs.push_back({l, t}); fprintf(fa, "%d,%d,%d,%s,%.3f,%.3f,%.2g\n", M, N, K, l.name.c_str(), t, l.est, e);
    };
    // in random order: a warming chip must not favour whoever comes first
    while (!ls.empty() && ls.back().est > limit_est) ls.pop_back();
    unsigned rng = 12345; auto shuffle = [&](std::vector<Launch>& v) { for (size_t i = v.size(); i > 1; i--) { rng = rng * 1664525u + 1013904223u; std::swap(v[i - 1], v[(rng >> 8) % i]); } };
    shuffle(ls); shuffle(more);
    if (guess > 50) { Lt w(M, N, K, true); double t1 = now(); while (now() - t1 < 0.1) { for (int i = 0; i < 5; i++) w.run(0); cudaStreamSynchronize(S); } }
    for (auto& l : ls) { attempt(l); if (now() - t0 > 4 && cs.size() > 8) break; }
    std::sort(cs.begin(), cs.end(), [](const Cand& a, const Cand& b) { return a.t < b.t; });
    std::map<const Kernel*, int> good; for (size_t i = 0; i < cs.size() && i < 12; i++) good[cs[i].l.k] = 1;
    for (auto& l : more) if (good.count(l.k) && now() - t0 < 6) attempt(l);
    fflush(fa);
    if (cs.empty()) { printf("none for %d,%d,%d AT %.2f %s\n", M, N, K, at, atk.c_str()); continue; }
    std::sort(cs.begin(), cs.end(), [](const Cand& a, const Cand& b) { return a.t < b.t; });
    // finalists again, plain and with dependent launch (trigger at the top: mode 1, after the main loop: mode 2)
    const int Rf = std::max(guess > 400 ? 1 : 2, (int)std::min(60., 240 / guess)), rounds = guess > 400 ? 5 : 7, per = guess > 400 ? 1 : 3; float tp = 1e9, td = 1e9; int ip = 0, id = 0, md = 1;
    const int nf = (int)std::min<size_t>(cs.size(), guess > 50 ? 16 : 10);
    { std::vector<std::vector<float>> v(nf); for (int r = 0; r < (guess > 50 ? 3 : 5); r++) for (int i = 0; i < nf; i++) { g_last = cs[i].l.name; v[i].push_back(replay([&] { return go(cs[i].l, 0); }, Rf, 1)); }
      std::vector<std::pair<float, int>> o; for (int i = 0; i < nf; i++) { std::sort(v[i].begin(), v[i].end()); o.push_back({v[i][v[i].size() / 2], i}); } std::sort(o.begin(), o.end()); std::vector<Cand> c2; for (auto& p : o) c2.push_back(cs[p.second]); for (size_t i = nf; i < cs.size(); i++) c2.push_back(cs[i]); cs = c2; }
    // the best kernel plain, and the best four that can run under dependent launch
    int seen = 0; for (int i = 0; i < (int)cs.size() && seen < 4; i++) { const bool can = (*cs[i].l.k)("PDL", 1); seen += can; if (!can && i) continue; for (int m = 0; m < (can ? 3 : 1); m++) {
      g_last = cs[i].l.name; poison(MN); float t = replay([&] { return go(cs[i].l, m); }, Rf, 3); double e = rel_error(MN); if (!(e < 4e-4)) { bad++; printf("WRONG repeated %d,%d,%d %s mode %d error %g\n", M, N, K, cs[i].l.name.c_str(), m, e); reset_workspace(); continue; }
      if (m == 0) { if (i == 0) { tp = t; ip = i; } } else if (t < td) { td = t; id = i; md = m; } } }
    std::vector<float> va, vp, vd, rp, rd; std::vector<std::vector<float>> vl(na); for (int r = 0; r < rounds; r++) { for (int q = 0; q < na; q++) vl[q].push_back(replay([&, q] { return L[std::get<1>(lv[q])]->run(std::get<2>(lv[q])); }, Rf, per)); vp.push_back(replay([&] { return go(cs[ip].l, 0); }, Rf, per)); vd.push_back(replay([&] { return go(cs[id].l, md); }, Rf, per)); }
    // the baseline is the finalist with the best median in these rounds
    { float m = 1e9; for (int q = 0; q < na; q++) { auto s = vl[q]; std::sort(s.begin(), s.end()); if (s[rounds / 2] < m) { m = s[rounds / 2]; bi = q; } } va = vl[bi]; atk = std::string(std::get<1>(lv[bi]) ? "TN " : "NN ") + names[bi]; }
    for (int r = 0; r < rounds; r++) { rp.push_back(va[r] / vp[r]); rd.push_back(va[r] / vd[r]); }
    for (auto* v : {&va, &vp, &vd, &rp, &rd}) std::sort(v->begin(), v->end());
    double we = 0; if (cs[ip].l.k->kind != "mma") { cudaMemsetAsync(ACC, 0, 16, S); all_equal<<<264, 256, 0, S>>>((unsigned*)CNT, CNT_BYTES / 4, 0u, ACC); cudaMemcpyAsync(&we, ACC, 8, cudaMemcpyDeviceToHost, S); cudaStreamSynchronize(S); if (we > 0) { printf("COUNTERS NOT RESTORED %s\n", cs[ip].l.name.c_str()); } reset_workspace(); }
    fprintf(fb, "%d,%d,%d,%.3f,%.3f,%.3f,%.4f,%.4f,%s,%s m%d,%s,%.2g\n", M, N, K, va[rounds / 2], vp[rounds / 2], vd[rounds / 2], rp[rounds / 2], rd[rounds / 2], cs[ip].l.name.c_str(), cs[id].l.name.c_str(), md, atk.c_str(), aterr); fflush(fb);
    printf("S %d,%d,%d AT %.2f plain %.2f x%.3f pdl %.2f x%.3f | %s | %s | %zu %.1fs\n", M, N, K, va[3], vp[3], rp[3], vd[3], rd[3], cs[ip].l.name.c_str(), atk.substr(0, 60).c_str(), cs.size(), now() - t0);
    delete L[0]; delete L[1]; { FILE* d = fopen(g_done_path.c_str(), "a"); fprintf(d, "%s\n", line.c_str()); fclose(d); }
  }
  printf("wrong: %d\n", bad); return 0;
}
