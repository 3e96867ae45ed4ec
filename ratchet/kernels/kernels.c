/* The decoder's small operations in float32, each one pass over memory where PyTorch takes several.

   Rows are independent: a row's bits depend on nothing else in the call, and on no number of threads. Sums over rows (the
   gradients of norms' weights) go through PARTS partial sums, whose bounds depend on the number of rows alone.

   T = rows, D = head_dim or hidden size, C = D / 2, H = query heads, K = key/value heads, G = H / K, F = size of the gated layer.
*/

#include "rows.h"

#define PARTS 8
#define GRAIN 16384   /* elements below which another thread costs more than it brings */

static inline i64 bound(i64 part, i64 rows) { return part * rows / PARTS; }

static void add_up(const float *parts, float *sum, i64 size) {
    memcpy(sum, parts, size * sizeof(float));
    for (i64 p = 1; p < PARTS; p++)
        for (i64 i = 0; i < size; i++) sum[i] += parts[p * size + i];
}

/* --- y = w x r with r = (mean(x^2) + eps)^-1/2 */

/* r: [T], or null where nobody asks. */
void norm(const float *x, const float *w, float *y, float *r, i64 T, i64 D, float eps) {
#pragma omp parallel for schedule(static) if (T * D > GRAIN)
    for (i64 t = 0; t < T; t++) {
        const float *a = x + t * D;
        float *o = y + t * D, q = inverse_rms(a, D, eps);
        if (r) r[t] = q;
        for (i64 i = 0; i < D; i++) o[i] = a[i] * q * w[i];
    }
}

/* dw = sum(g x r), dx = r (g w - x r^2 mean(g w x)). parts: [PARTS, D]. */
void norm_backward(const float *g, const float *x, const float *w, const float *r, float *dx, float *dw, float *parts, i64 T, i64 D) {
    memset(parts, 0, PARTS * D * sizeof(float));
#pragma omp parallel for schedule(static) if (T * D > GRAIN)
    for (i64 p = 0; p < PARTS; p++) {
        float *sum = parts + p * D;
        for (i64 t = bound(p, T); t < bound(p + 1, T); t++) {
            const float *a = x + t * D, *b = g + t * D;
            float *o = dx + t * D, q = r[t], mean = 0;
            for (i64 i = 0; i < D; i++) {
                mean += b[i] * w[i] * a[i];
                sum[i] += b[i] * a[i] * q;
            }
            mean *= q * q / D;
            for (i64 i = 0; i < D; i++) o[i] = (b[i] * w[i] - a[i] * mean) * q;
        }
    }
    add_up(parts, dw, D);
}

/* --- queries and keys out of the fused product: normalised where there are weights, then turned by their position */

/* qkv: [T, H + 2 K, D]. wq, wk: [D], or null. cos: rows of D, whose halves are alike; sin: rows of C.
   q: [T, H, D], k: [T, K, D]. r: [T, H + K], or null. */
void heads(const float *qkv, const float *wq, const float *wk, const float *cos, const float *sin, float *q, float *k, float *r,
           i64 T, i64 H, i64 K, i64 D, float eps) {
    i64 C = D / 2, row = (H + 2 * K) * D;
#pragma omp parallel for schedule(static) if (T * (H + K) * D > GRAIN)
    for (i64 t = 0; t < T; t++) {
        float scaled[WIDEST];
        for (i64 h = 0; h < H + K; h++) {
            const float *x = qkv + t * row + h * D, *w = h < H ? wq : wk;
            float *o = h < H ? q + (t * H + h) * D : k + (t * K + h - H) * D;
            if (w) {
                float s = inverse_rms(x, D, eps);
                if (r) r[t * (H + K) + h] = s;
                for (i64 i = 0; i < D; i++) scaled[i] = x[i] * s * w[i];
                x = scaled;
            }
            turn(x, cos + t * D, sin + t * C, o, C, 1);
        }
    }
}

/* gq: [T, H, D], gk: [T, K, D], gv: [T, K, D], each token's own in one piece, ldq, ldk, ldv apart. dqkv: [T, H + 2 K, D].
   dw: [2, D]; parts: [PARTS, 2, D]. Without weights qkv, r, dw and parts are null: a rotation turns back by itself. */
void heads_backward(const float *gq, i64 ldq, const float *gk, i64 ldk, const float *gv, i64 ldv, const float *qkv,
                    const float *wq, const float *wk, const float *cos, const float *sin, const float *r, float *dqkv, float *dw,
                    float *parts, i64 T, i64 H, i64 K, i64 D) {
    i64 C = D / 2, row = (H + 2 * K) * D;
    if (wq) memset(parts, 0, PARTS * 2 * D * sizeof(float));
#pragma omp parallel for schedule(static) if (T * row > GRAIN)
    for (i64 p = 0; p < PARTS; p++) {
        float back[WIDEST];
        for (i64 t = bound(p, T); t < bound(p + 1, T); t++) {
            for (i64 h = 0; h < H + K; h++) {
                const float *w = h < H ? wq : wk, *x = w ? qkv + t * row + h * D : NULL;
                const float *g = h < H ? gq + t * ldq + h * D : gk + t * ldk + (h - H) * D;
                float *o = dqkv + t * row + h * D;
                if (!w) {
                    turn(g, cos + t * D, sin + t * C, o, C, -1);
                    continue;
                }
                float *sum = parts + (2 * p + (h >= H)) * D, s = r[t * (H + K) + h], mean = 0;
                turn(g, cos + t * D, sin + t * C, back, C, -1);
                for (i64 i = 0; i < D; i++) {
                    mean += back[i] * w[i] * x[i];
                    sum[i] += back[i] * x[i] * s;
                }
                mean *= s * s / D;
                for (i64 i = 0; i < D; i++) o[i] = (back[i] * w[i] - x[i] * mean) * s;
            }
            memcpy(dqkv + t * row + (H + K) * D, gv + t * ldv, K * D * sizeof(float));
        }
    }
    if (wq) add_up(parts, dw, 2 * D);
}

/* --- silu(gate) up */

void gated(const float *x, float *y, i64 T, i64 F) {
#pragma omp parallel for schedule(static) if (T * F > GRAIN)
    for (i64 t = 0; t < T; t++) {
        const float *gate = x + t * 2 * F, *up = gate + F;
        float *o = y + t * F;
        for (i64 i = 0; i < F; i++) o[i] = silu(gate[i]) * up[i];
    }
}

void gated_backward(const float *g, const float *x, float *dx, i64 T, i64 F) {
#pragma omp parallel for schedule(static) if (T * F > GRAIN)
    for (i64 t = 0; t < T; t++) {
        const float *gate = x + t * 2 * F, *up = gate + F, *b = g + t * F;
        float *dgate = dx + t * 2 * F, *dup = dgate + F;
        for (i64 i = 0; i < F; i++) {
            float s = 1.0f / (1.0f + exponential(-gate[i])), silu = gate[i] * s;
            dgate[i] = b[i] * up[i] * (s + silu * (1.0f - s));
            dup[i] = b[i] * silu;
        }
    }
}

/* --- attention of one new token a slot over the slot's keys and values, which its own join first */

/* keys, values: [N or more, K, C, D]. q: [N, H, D], k and v: [N, K, D], each token's own in one piece, ldq, ldk, ldv apart.
   positions: [N], where the new token goes. out: [N, H, D]. */
void decode(float *keys, float *values, const float *q, i64 ldq, const float *k, i64 ldk, const float *v, i64 ldv,
            const i64 *positions, float *out, i64 N, i64 H, i64 K, i64 C, i64 D, float scale) {
    i64 G = H / K;
#pragma omp parallel for schedule(dynamic, 8)
    for (i64 m = 0; m < N * K; m++) {
        i64 n = m / K, head = m % K, position = positions[n];
        float *own_keys = keys + m * C * D, *own_values = values + m * C * D;
        memcpy(own_keys + position * D, k + n * ldk + head * D, D * sizeof(float));
        memcpy(own_values + position * D, v + n * ldv + head * D, D * sizeof(float));
        for (i64 g = head * G; g < (head + 1) * G; g++) {
            i64 ahead = g == head * G && m + 1 < N * K ? C * D : 0;
            const float *query = q + n * ldq + g * D;
            float *o = out + (n * H + g) * D;
            attend_to(query, own_keys, own_values, o, position + 1, D, scale, ahead);
        }
    }
}
