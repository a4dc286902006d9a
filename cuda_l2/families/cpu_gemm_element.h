#pragma once
/* Elements of A, B and C as vectors of VW floats and back: `widen` is exact, `narrow` rounds to nearest even. */
typedef float vf __attribute__((vector_size(VW * 4), aligned(4), may_alias));

#if BF16
/* By shifts: vcvtneps2bf16 and vdpbf16ps of AVX-512 take subnormal numbers as zero. */
typedef uint32_t wi __attribute__((vector_size(VW * 4)));
typedef uint16_t half_words __attribute__((vector_size(VW * 2), aligned(2), may_alias));
INLINE vf widen(const uint16_t *p) { return (vf)(__builtin_convertvector(*(const half_words *)p, wi) << 16); }
INLINE void narrow(uint16_t *p, vf v) {
    const wi bits = (wi)v, nan = (wi)(v != v);
    const wi nearest = bits + 0x7fff + ((bits >> 16) & 1);
    *(half_words *)p = __builtin_convertvector((((bits | 0x400000) & nan) | (nearest & ~nan)) >> 16, half_words);
}
#elif VECTOR_BITS == 512
INLINE vf widen(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void narrow(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, 0)); }
#elif VECTOR_BITS == 256
INLINE vf widen(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void narrow(uint16_t *p, vf v) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, 0)); }
#elif defined(__aarch64__)
INLINE vf widen(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void narrow(uint16_t *p, vf v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
#else
INLINE float widen_bits(uint16_t h) {
    union { uint32_t u; float f; } magic = {(uint32_t)113 << 23}, out;
    uint32_t exponent = h & 0x7c00u;
    out.u = (uint32_t)(h & 0x7fffu) << 13;
    if (exponent == 0x7c00u) out.u += (uint32_t)(255 - 31) << 23;      /* Inf, NaN */
    else if (exponent) out.u += (uint32_t)(127 - 15) << 23;
    else { out.u += (uint32_t)113 << 23; out.f -= magic.f; }           /* zero, subnormal */
    out.u |= (uint32_t)(h & 0x8000u) << 16;
    return out.f;
}
INLINE uint16_t narrow_bits(float f) {
    union { uint32_t u; float f; } in = {.f = f}, magic = {(uint32_t)126 << 23};
    uint32_t sign = in.u & 0x80000000u, half;
    in.u ^= sign;
    if (in.u >= 0x47800000u) half = in.u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    else if (in.u < 0x38800000u) { in.f += magic.f; half = in.u - magic.u; }
    else half = (in.u + 0xc8000fffu + ((in.u >> 13) & 1)) >> 13;
    return (uint16_t)(half | sign >> 16);
}
INLINE vf widen(const uint16_t *p) {
    vf v;
    for (int i = 0; i < VW; ++i) v[i] = widen_bits(p[i]);
    return v;
}
INLINE void narrow(uint16_t *p, vf v) {
    for (int i = 0; i < VW; ++i) p[i] = narrow_bits(v[i]);
}
#endif
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE float widen_one(uint16_t h) {
    uint16_t lanes[VW] = {h};
    return widen(lanes)[0];
}
INLINE uint16_t narrow_one(float f) {
    uint16_t lanes[VW];
    narrow(lanes, (vf){f});
    return lanes[0];
}
