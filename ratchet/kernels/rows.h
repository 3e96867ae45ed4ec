/* Functions on single rows, for the other C files of this directory.

   D = head_dim or hidden size, C = D / 2.
*/

#ifdef __FMA__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

#define MAX_HEAD_DIM 512   /* the largest supported head_dim */
#define CHUNK_TOKENS 256   /* tokens whose attention scores are in memory at the same time */
#define CACHE_LINE 16         /* floats of a cache line */

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* sum + w x, rounded once where the processor can. By name, because compilers choose between one rounding and two by the size of the
   tile (GCC's -mtune for AMD and for newer Intel processors), and a row's bits would depend on the number of rows. */
static inline __attribute__((always_inline)) lanes multiply_add(float w, lanes x, lanes sum) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps(_mm512_set1_ps(w), (__m512)x, (__m512)sum);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps(_mm256_set1_ps(w), (__m256)x, (__m256)sum);
#else
    return sum + w * x;
#endif
}

static inline float exp_approx(float x) {
    /* exp(x) as in Cephes' expf, without branches, so that the compiler can vectorise loops over it. NaN stays NaN. The relative
       error is at most 2e-6, near the ends of the range, because compilers may merge the two parts of ln 2. */
    x = x > 88.3762626647949f ? 88.3762626647949f : x;
    x = x < -87.3365447504019f ? -87.3365447504019f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { float f; int32_t i; } power = {.i = ((int32_t)n + 127) << 23};
    return p * power.f;
}

static inline float inverse_rms(const float *x, i64 D, float eps) {
    float sum = 0;
    for (i64 i = 0; i < D; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / D + eps);
}

static inline float silu(float x) { return x / (1.0f + exp_approx(-x)); }

/* A float from its upper half, and the nearest upper half of a float (ties to even; NaN stays NaN). */
static inline float widen(uint16_t x) {
    union { uint32_t bits; float value; } wide = {.bits = (uint32_t)x << 16};
    return wide.value;
}

static inline uint16_t narrow(float x) {
    union { float value; uint32_t bits; } wide = {.value = x};
    uint32_t rounded = (wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16;
    return (wide.bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

/* Applies rotary position embeddings to one head; direction -1 inverts it. */
static inline void rotate(const float *x, const float *cos, const float *sin, float *y, i64 C, float direction) {
    for (i64 i = 0; i < C; i++) {
        float a = x[i], b = x[i + C], s = direction * sin[i];
        y[i] = a * cos[i] - b * s;
        y[i + C] = b * cos[i] + a * s;
    }
}

/* Prefetches a row that is needed soon. The rows of a slot are too few for the processor to guess the address of the next slot. */
static inline void prefetch_row(const float *row, i64 D) {
    for (i64 i = 0; i < D; i += CACHE_LINE) __builtin_prefetch(row + i, 0, 2);
}

/* Attention of one query over `length` tokens, with an online softmax over chunks of tokens.
   next_offset: distance from these keys and values to those that are needed next, which are prefetched; 0 prefetches nothing. */
static inline void attend(const float *restrict q, const float *restrict keys, const float *restrict values, float *restrict out,
                          i64 length, i64 D, float scale, i64 next_offset) {
    float weights[CHUNK_TOKENS], sum[MAX_HEAD_DIM] = {0}, total = 0, highest = -INFINITY;
    for (i64 first = 0; first < length; first += CHUNK_TOKENS) {
        i64 n = length - first < CHUNK_TOKENS ? length - first : CHUNK_TOKENS;
        float new_highest = highest;
        for (i64 j = 0; j < n; j++) {
            const float *k = keys + (first + j) * D;
            float score = 0;
            if (next_offset) prefetch_row(k + next_offset, D);
            for (i64 i = 0; i < D; i++) score += q[i] * k[i];
            weights[j] = score * scale;
        }
        for (i64 j = 0; j < n; j++) new_highest = weights[j] > new_highest ? weights[j] : new_highest;
        float shrink = first ? exp_approx(highest - new_highest) : 0;
        float chunk_total = 0;
        for (i64 j = 0; j < n; j++) chunk_total += weights[j] = exp_approx(weights[j] - new_highest);
        for (i64 i = 0; i < D; i++) sum[i] *= shrink;
        for (i64 j = 0; j < n; j++) {
            const float *v = values + (first + j) * D;
            if (next_offset) prefetch_row(v + next_offset, D);
            for (i64 i = 0; i < D; i++) sum[i] += weights[j] * v[i];
        }
        total = total * shrink + chunk_total;
        highest = new_highest;
    }
    for (i64 i = 0; i < D; i++) out[i] = sum[i] / total;
}

/* `attend`, compiled separately for each usual head_dim so that its loops are unrolled. */
static inline void attend_unrolled(const float *q, const float *keys, const float *values, float *out, i64 length, i64 D,
                                   float scale, i64 next_offset) {
    if (D == 32) attend(q, keys, values, out, length, 32, scale, next_offset);
    else if (D == 64) attend(q, keys, values, out, length, 64, scale, next_offset);
    else if (D == 128) attend(q, keys, values, out, length, 128, scale, next_offset);
    else attend(q, keys, values, out, length, D, scale, next_offset);
}
