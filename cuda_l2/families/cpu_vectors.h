#pragma once
/* Vectors of floats in GCC's and clang's own words, and the functions that kernels for tasks are made of.
 *
 * Set from outside: VECTOR_BITS, DEGREE (of the exponential's polynomial), STREAM (1: stores go around the caches, of floats
 * alone), ELEMENT (what matrices hold: 0 float, 1 bfloat16, 2 float16; all is computed in floats). */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES (VECTOR_BITS / 32)
typedef float vec __attribute__((vector_size(VECTOR_BITS / 8)));
typedef int32_t ints __attribute__((vector_size(VECTOR_BITS / 8)));
typedef vec loose_vec __attribute__((aligned(4), may_alias));

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static inline vec every(float value) { return value - (vec){0}; }
static inline vec choose(ints where, vec yes, vec no) { return (vec)((where & (ints)yes) | (~where & (ints)no)); }

#if ELEMENT == 0
typedef float element;
typedef loose_vec raw;
#define WIDEN(bits) (bits)
#define NARROW(value) (value)
#else
typedef uint16_t element;
typedef uint16_t raw __attribute__((vector_size(VECTOR_BITS / 16), aligned(2), may_alias));
#if ELEMENT == 1
#define WIDEN(bits) ((vec)(__builtin_convertvector(bits, ints) << 16))
#define NARROW(value) narrow(value)
static inline raw narrow(vec value) { /* to nearest, ties to even */
    const ints bits = (ints)value, up = bits + 0x7fff + ((bits >> 16) & 1);
    return __builtin_convertvector(((ints)choose(value == value, (vec)up, value) >> 16) | ((value != value) & 0x40), raw);
}
#elif defined(__x86_64__)
#define WIDEN(bits) widen(bits)
#define NARROW(value) narrow(value)
#if VECTOR_BITS == 512
static inline vec widen(raw bits) { return (vec)_mm512_cvtph_ps((__m256i)bits); }
static inline raw narrow(vec value) { return (raw)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT); }
#elif VECTOR_BITS == 256
static inline vec widen(raw bits) { return (vec)_mm256_cvtph_ps((__m128i)bits); }
static inline raw narrow(vec value) { return (raw)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT); }
#else
static inline vec widen(raw bits) {
    __m128i low = _mm_setzero_si128();
    memcpy(&low, &bits, sizeof bits);
    return (vec)_mm_cvtph_ps(low);
}
static inline raw narrow(vec value) {
    const __m128i low = _mm_cvtps_ph((__m128)value, _MM_FROUND_TO_NEAREST_INT);
    raw bits;
    memcpy(&bits, &low, sizeof bits);
    return bits;
}
#endif
#else
typedef _Float16 half_vec __attribute__((vector_size(VECTOR_BITS / 16)));
#define WIDEN(bits) __builtin_convertvector((half_vec)(bits), vec)
#define NARROW(value) ((raw)__builtin_convertvector(value, half_vec))
#endif
#endif

static inline vec load(const element *from) { return WIDEN(*(const raw *)from); }
static inline void store(element *to, vec value) { *(raw *)to = NARROW(value); }

/* Fewer than LANES elements; the other lanes repeat the first. */
static inline vec load_some(const element *from, int64_t count) {
    raw value = from[0] - (raw){0};
    memcpy(&value, from, (size_t)count * sizeof *from);
    return WIDEN(value);
}

static inline void store_some(element *to, vec value, int64_t count) {
    const raw bits = NARROW(value);
    memcpy(to, &bits, (size_t)count * sizeof *to);
}

static inline float at(const element *from) { return load_some(from, 1)[0]; }
static inline void set(element *to, float value) { store_some(to, every(value), 1); }

/* A store that need not stay in the cache, where the place is aligned. */
static inline void put(element *to, vec value) {
#if STREAM && defined(__AVX512F__) && VECTOR_BITS == 512
    if (((uintptr_t)to & 63) == 0) {
        _mm512_stream_ps(to, (__m512)value);
        return;
    }
#elif STREAM && defined(__AVX__) && VECTOR_BITS == 256
    if (((uintptr_t)to & 31) == 0) {
        _mm256_stream_ps(to, (__m256)value);
        return;
    }
#endif
    store(to, value);
}

/* What was stored around the caches is seen by all from here on. */
static inline void settle(void) {
#if STREAM && defined(__x86_64__)
    _mm_sfence();
#endif
}

/* The larger and the smaller of each pair; b where either is NaN, as the instructions have it. */
#if defined(__AVX512F__) && VECTOR_BITS == 512
static inline vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__) && VECTOR_BITS == 256
static inline vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }
static inline vec smaller(vec a, vec b) { return choose(a < b, a, b); }
#endif
static inline vec absolute(vec a) { return (vec)((ints)a & 0x7fffffff); }

/* Lanes from `count` on as zero. */
static inline vec first_lanes(vec value, int64_t count) {
    ints lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    return choose(lane < (int32_t)count, value, every(0));
}

static inline float sum_of(vec value) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) value[i] += value[i + half];
    return value[0];
}

static inline float most_of(vec value) {
    float most = value[0];
    for (int i = 1; i < LANES; ++i) most = value[i] > most ? value[i] : most;
    return most;
}

/* e^x for x up to 88, at least -87 is taken: 2^n e^r with |r| <= ln(2)/2. The polynomials were fitted for the least largest error:
 * 1e-7 of e^r at degree 5, 3e-9 at degree 6. */
static inline vec falling(vec x) {
    x = larger(every(-87.0f), x);
    const float shift = 12582912.0f; /* 1.5 * 2^23: sums with it are whole numbers */
    const vec shifted = x * 1.442695041f + shift, n = shifted - shift;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
#if DEGREE == 5
    vec p = 8.312520187e-3f * r + 4.189015688e-2f;
    p = p * r + 1.666711465e-1f;
    p = p * r + 4.999923149e-1f;
#else
    vec p = 1.381459851e-3f * r + 8.368716884e-3f;
    p = p * r + 4.166838805e-2f;
    p = p * r + 1.666652063e-1f;
    p = p * r + 4.999999345e-1f;
#endif
    p = p * r * r + r + 1; /* the first two terms as they are, so that small numbers stay exact */
    return (vec)((ints)p + (((ints)shifted - 0x4b400000) << 23));
}

/* e^x with infinity above 88 and zero below -87. */
static inline vec exponential(vec x) {
    const vec e = choose(x > 88.0f, every(__builtin_inff()), falling(smaller(every(88.0f), x)));
    return choose(x < -87.0f, every(0), e);
}

/* ln(1 + u) for u from 0 to 1, as 2 artanh(u / (2 + u)) in its series, within 1e-8. */
static inline vec log_one_plus(vec u) {
    const vec s = u / (u + 2), z = s * s;
    vec p = 1.0f / 15 + every(0);
    p = p * z + 1.0f / 13;
    p = p * z + 1.0f / 11;
    p = p * z + 1.0f / 9;
    p = p * z + 1.0f / 7;
    p = p * z + 1.0f / 5;
    p = p * z + 1.0f / 3;
    return 2 * s * (p * z + 1);
}

/* The error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26). */
static inline vec error_function(vec x) {
    const vec size = absolute(x), t = 1 / (size * 0.3275911f + 1);
    vec p = 1.061405429f + every(0);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const vec y = 1 - p * t * falling(-size * size);
    return choose(x < 0, -y, y);
}

/* ln(x) of one positive number or NaN: exponent and artanh's series of the rest. */
static inline float logarithm(float x) {
    if (!(x < __builtin_inff())) return x; /* NaN too */
    union { float f; int32_t i; } bits = {x};
    const int32_t power = ((bits.i - 0x3f3504f3) >> 23); /* the rest from sqrt(1/2) to sqrt(2) */
    bits.i -= power * (1 << 23);
    const float s = (bits.f - 1) / (bits.f + 1), z = s * s;
    const float series = z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9 + z / 11))));
    return (float)power * 0.693359375f + ((2 * s * series + 2 * s) - (float)power * 2.12194440e-4f);
}

/* 1 / sqrt(x) of one positive number or NaN by Newton's steps from a rough start. */
static inline float inverse_root(float x) {
    if (x == __builtin_inff()) return 0;
    union { float f; uint32_t u; } y = {x};
    y.u = 0x5f375a86u - (y.u >> 1);
    for (int i = 0; i < 4; ++i) y.f *= 1.5f - 0.5f * x * y.f * y.f;
    return y.f;
}
