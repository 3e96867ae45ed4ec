/* What the sources of this directory share: single rows.

   D = head_dim or hidden size, C = D / 2.
*/

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

#define WIDEST 512    /* head_dim */
#define STRETCH 256   /* tokens whose scores exist at a time */
#define LINE 16       /* entries that memory hands over at a time */

static inline float exponential(float x) {
    /* Cephes' expf, without branches so that loops of it become vectors. NaN stays NaN. Off by 2e-6 of itself at most, at its
       ends: compilers may put the two parts of ln 2 together. */
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

static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

static inline void turn(const float *x, const float *cos, const float *sin, float *y, i64 C, float direction) {
    for (i64 i = 0; i < C; i++) {
        float a = x[i], b = x[i + C], s = direction * sin[i];
        y[i] = a * cos[i] - b * s;
        y[i + C] = b * cos[i] + a * s;
    }
}

/* Asks for a row that is needed soon: what is stored of a slot is too short for the processor to guess where the next lies. */
static inline void fetch(const float *row, i64 D) {
    for (i64 i = 0; i < D; i += LINE) __builtin_prefetch(row + i, 0, 2);
}

/* ahead: from here to the keys and values of the next head, 0 where there is none, or they were asked for. */
static inline void attend(const float *restrict q, const float *restrict keys, const float *restrict values, float *restrict out,
                          i64 length, i64 D, float scale, i64 ahead) {
    float weights[STRETCH], sum[WIDEST] = {0}, total = 0, highest = -INFINITY;
    for (i64 first = 0; first < length; first += STRETCH) {
        i64 n = length - first < STRETCH ? length - first : STRETCH;
        float above = highest;
        for (i64 j = 0; j < n; j++) {
            const float *k = keys + (first + j) * D;
            float score = 0;
            if (ahead) fetch(k + ahead, D);
            for (i64 i = 0; i < D; i++) score += q[i] * k[i];
            weights[j] = score * scale;
        }
        for (i64 j = 0; j < n; j++) above = weights[j] > above ? weights[j] : above;
        float shrink = first ? exponential(highest - above) : 0;
        float added = 0;
        for (i64 j = 0; j < n; j++) added += weights[j] = exponential(weights[j] - above);
        for (i64 i = 0; i < D; i++) sum[i] *= shrink;
        for (i64 j = 0; j < n; j++) {
            const float *v = values + (first + j) * D;
            if (ahead) fetch(v + ahead, D);
            for (i64 i = 0; i < D; i++) sum[i] += weights[j] * v[i];
        }
        total = total * shrink + added;
        highest = above;
    }
    for (i64 i = 0; i < D; i++) out[i] = sum[i] / total;
}

/* With the loops of the usual sizes laid out. */
static inline void attend_to(const float *q, const float *keys, const float *values, float *out, i64 length, i64 D, float scale,
                             i64 ahead) {
    if (D == 32) attend(q, keys, values, out, length, 32, scale, ahead);
    else if (D == 64) attend(q, keys, values, out, length, 64, scale, ahead);
    else if (D == 128) attend(q, keys, values, out, length, 128, scale, ahead);
    else attend(q, keys, values, out, length, D, scale, ahead);
}
