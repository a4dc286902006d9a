// The instructions of the sm80 family, one a function.

#define DEVICE __device__ __forceinline__

DEVICE unsigned shared_address(const void *pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// The type that moves this many elements of 2 bytes at once.
template <int ELEMENTS> struct VectorOf;
template <> struct VectorOf<1> { using type = unsigned short; };
template <> struct VectorOf<2> { using type = unsigned; };
template <> struct VectorOf<4> { using type = uint2; };
template <> struct VectorOf<8> { using type = uint4; };
template <int ELEMENTS> using Vector = typename VectorOf<ELEMENTS>::type;

// Loads are plain, never through the read-only path: under dependent launch the kernel before may still have been
// writing when this one began.
template <int ELEMENTS> DEVICE Vector<ELEMENTS> load(const Element *from, bool inside) {
  return inside ? *reinterpret_cast<const Vector<ELEMENTS> *>(from) : Vector<ELEMENTS>{};
}

DEVICE void store_shared(unsigned to, unsigned short x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}
DEVICE void store_shared(unsigned to, unsigned x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
DEVICE void store_shared(unsigned to, uint2 x) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(x.x), "r"(x.y) : "memory");
}
DEVICE void store_shared(unsigned to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// cp.async of 4, 8 or 16 bytes; zeros arrive and nothing is read where not inside.
template <int BYTES> DEVICE void copy_async(unsigned to, const Element *from, bool inside) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(inside ? BYTES : 0)
                 : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 2-byte elements, row addresses from lanes 0-7, 8-15, 16-23, 24-31.
DEVICE void load_matrices(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
DEVICE void load_matrices_transposed(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

#if BF16
#define OPERANDS "bf16.bf16"
#else
#define OPERANDS "f16.f16"
#endif
// sums += A (16 x 16) B (16 x 8). Volatile keeps the multiplications where the schedule put them among the loads.
DEVICE void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERANDS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same with sums in fp16.
DEVICE void multiply(unsigned (&sums)[2], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
               : "+r"(sums[0]), "+r"(sums[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Dependent launch (PTX: griddepcontrol). The first waits until the kernel before has ended and its writes are seen. The
// second is for kernels launched so themselves, as the parameter says: where no dependent is there, every later launch of
// the context takes 0.18 us longer.
#if PDL
#define DEPENDENT , int dependent
#else
#define DEPENDENT
#endif
DEVICE void wait_for_kernel_before() {
#if PDL && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_kernel_begin() {
#if PDL && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
