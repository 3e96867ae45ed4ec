/* The decoder's small operations in float32, each one pass over memory where PyTorch takes several.

   Rows are independent: the bits of a row depend neither on the other rows nor on the number of threads. Sums over rows (the
   gradients of the norms' weights) are made of N_PARTIAL_SUMS partial sums, whose bounds depend only on the number of rows.

   T = rows, D = head_dim or hidden size, C = D / 2, H = query heads, K = key/value heads, G = H / K, F = size of the gated layer.
*/

#include "rows.h"

#define N_PARTIAL_SUMS 8
#define MIN_PARALLEL 16384   /* elements below which a second thread costs more time than it saves */

static inline i64 part_start(i64 part, i64 rows) { return part * rows / N_PARTIAL_SUMS; }

static void add_partial_sums(const float *partial_sums, float *sum, i64 size) {
    memcpy(sum, partial_sums, size * sizeof(float));
    for (i64 p = 1; p < N_PARTIAL_SUMS; p++)
        for (i64 i = 0; i < size; i++) sum[i] += partial_sums[p * size + i];
}

/* --- y = w x r with r = (mean(x^2) + eps)^-1/2 */

/* r: [T], or null if it is not needed. */
void norm(const float *x, const float *w, float *y, float *r, i64 T, i64 D, float eps) {
#pragma omp parallel for schedule(static) if (T * D > MIN_PARALLEL)
    for (i64 t = 0; t < T; t++) {
        const float *x_row = x + t * D;
        float *y_row = y + t * D, scale = inverse_rms(x_row, D, eps);
        if (r) r[t] = scale;
        for (i64 i = 0; i < D; i++) y_row[i] = x_row[i] * scale * w[i];
    }
}

/* dw = sum(g x r), dx = r (g w - x r^2 mean(g w x)). partial_sums: [N_PARTIAL_SUMS, D]. */
void norm_backward(const float *g, const float *x, const float *w, const float *r, float *dx, float *dw, float *partial_sums, i64 T,
                   i64 D) {
    memset(partial_sums, 0, N_PARTIAL_SUMS * D * sizeof(float));
#pragma omp parallel for schedule(static) if (T * D > MIN_PARALLEL)
    for (i64 p = 0; p < N_PARTIAL_SUMS; p++) {
        float *sum = partial_sums + p * D;
        for (i64 t = part_start(p, T); t < part_start(p + 1, T); t++) {
            const float *x_row = x + t * D, *g_row = g + t * D;
            float *dx_row = dx + t * D, scale = r[t], mean = 0;
            for (i64 i = 0; i < D; i++) {
                mean += g_row[i] * w[i] * x_row[i];
                sum[i] += g_row[i] * x_row[i] * scale;
            }
            mean *= scale * scale / D;
            for (i64 i = 0; i < D; i++) dx_row[i] = (g_row[i] * w[i] - x_row[i] * mean) * scale;
        }
    }
    add_partial_sums(partial_sums, dw, D);
}

/* --- queries and keys from the fused product: normalised if there are norm weights, then given rotary positions (RoPE) */

/* qkv: [T, H + 2 K, D]. wq, wk: [D], or null. cos: [T, D], whose two halves are equal; sin: [T, C].
   q: [T, H, D], k: [T, K, D]. r: [T, H + K], or null. */
void heads(const float *qkv, const float *wq, const float *wk, const float *cos, const float *sin, float *q, float *k, float *r,
           i64 T, i64 H, i64 K, i64 D, float eps) {
    i64 C = D / 2, row = (H + 2 * K) * D;
#pragma omp parallel for schedule(static) if (T * (H + K) * D > MIN_PARALLEL)
    for (i64 t = 0; t < T; t++) {
        float scaled[MAX_HEAD_DIM];
        for (i64 h = 0; h < H + K; h++) {
            const float *x = qkv + t * row + h * D, *w = h < H ? wq : wk;
            float *out = h < H ? q + (t * H + h) * D : k + (t * K + h - H) * D;
            if (w) {
                float scale = inverse_rms(x, D, eps);
                if (r) r[t * (H + K) + h] = scale;
                for (i64 i = 0; i < D; i++) scaled[i] = x[i] * scale * w[i];
                x = scaled;
            }
            rotate(x, cos + t * D, sin + t * C, out, C, 1);
        }
    }
}

/* gq: [T, H, D], gk: [T, K, D], gv: [T, K, D]: each token is contiguous, and tokens are ldq, ldk, ldv floats apart.
   dqkv: [T, H + 2 K, D]. dw: [2, D]; partial_sums: [N_PARTIAL_SUMS, 2, D]. Without norm weights qkv, r, dw and partial_sums are
   null, because the gradient of a rotation does not depend on its input. */
void heads_backward(const float *gq, i64 ldq, const float *gk, i64 ldk, const float *gv, i64 ldv, const float *qkv,
                    const float *wq, const float *wk, const float *cos, const float *sin, const float *r, float *dqkv, float *dw,
                    float *partial_sums, i64 T, i64 H, i64 K, i64 D) {
    i64 C = D / 2, row = (H + 2 * K) * D;
    if (wq) memset(partial_sums, 0, N_PARTIAL_SUMS * 2 * D * sizeof(float));
#pragma omp parallel for schedule(static) if (T * row > MIN_PARALLEL)
    for (i64 p = 0; p < N_PARTIAL_SUMS; p++) {
        float rotated[MAX_HEAD_DIM];
        for (i64 t = part_start(p, T); t < part_start(p + 1, T); t++) {
            for (i64 h = 0; h < H + K; h++) {
                const float *w = h < H ? wq : wk, *x = w ? qkv + t * row + h * D : NULL;
                const float *g = h < H ? gq + t * ldq + h * D : gk + t * ldk + (h - H) * D;
                float *out = dqkv + t * row + h * D;
                if (!w) {
                    rotate(g, cos + t * D, sin + t * C, out, C, -1);
                    continue;
                }
                float *sum = partial_sums + (2 * p + (h >= H)) * D, scale = r[t * (H + K) + h], mean = 0;
                rotate(g, cos + t * D, sin + t * C, rotated, C, -1);
                for (i64 i = 0; i < D; i++) {
                    mean += rotated[i] * w[i] * x[i];
                    sum[i] += rotated[i] * x[i] * scale;
                }
                mean *= scale * scale / D;
                for (i64 i = 0; i < D; i++) out[i] = (rotated[i] * w[i] - x[i] * mean) * scale;
            }
            memcpy(dqkv + t * row + (H + K) * D, gv + t * ldv, K * D * sizeof(float));
        }
    }
    if (wq) add_partial_sums(partial_sums, dw, 2 * D);
}

/* --- silu(gate) * up */

void gated(const float *x, float *y, i64 T, i64 F) {
#pragma omp parallel for schedule(static) if (T * F > MIN_PARALLEL)
    for (i64 t = 0; t < T; t++) {
        const float *gate = x + t * 2 * F, *up = gate + F;
        float *y_row = y + t * F;
        for (i64 i = 0; i < F; i++) y_row[i] = silu(gate[i]) * up[i];
    }
}

void gated_backward(const float *g, const float *x, float *dx, i64 T, i64 F) {
#pragma omp parallel for schedule(static) if (T * F > MIN_PARALLEL)
    for (i64 t = 0; t < T; t++) {
        const float *gate = x + t * 2 * F, *up = gate + F, *g_row = g + t * F;
        float *dgate = dx + t * 2 * F, *dup = dgate + F;
        for (i64 i = 0; i < F; i++) {
            float sigmoid = 1.0f / (1.0f + exp_approx(-gate[i])), silu = gate[i] * sigmoid;
            dgate[i] = g_row[i] * up[i] * (sigmoid + silu * (1.0f - sigmoid));
            dup[i] = g_row[i] * silu;
        }
    }
}

/* The same with everything in bfloat16, between two products with operands in it. */

void gated_bfloat16(const uint16_t *x, uint16_t *y, i64 T, i64 F) {
#pragma omp parallel for schedule(static) if (T * F > MIN_PARALLEL)
    for (i64 t = 0; t < T; t++) {
        const uint16_t *gate = x + t * 2 * F, *up = gate + F;
        uint16_t *y_row = y + t * F;
        for (i64 i = 0; i < F; i++) y_row[i] = narrow(silu(widen(gate[i])) * widen(up[i]));
    }
}

void gated_backward_bfloat16(const uint16_t *g, const uint16_t *x, uint16_t *dx, i64 T, i64 F) {
#pragma omp parallel for schedule(static) if (T * F > MIN_PARALLEL)
    for (i64 t = 0; t < T; t++) {
        const uint16_t *gate = x + t * 2 * F, *up = gate + F, *g_row = g + t * F;
        uint16_t *dgate = dx + t * 2 * F, *dup = dgate + F;
        for (i64 i = 0; i < F; i++) {
            float z = widen(gate[i]), sigmoid = 1.0f / (1.0f + exp_approx(-z)), silu = z * sigmoid, grad = widen(g_row[i]);
            dgate[i] = narrow(grad * widen(up[i]) * (sigmoid + silu * (1.0f - sigmoid)));
            dup[i] = narrow(grad * silu);
        }
    }
}

/* --- attention of a decoding step: each slot's new token is stored in the KV cache, then attends to all tokens of the slot */

/* keys, values: [N or more, K, capacity, D]. q: [N, H, D], k and v: [N, K, D]: each token is contiguous, and tokens are ldq, ldk,
   ldv floats apart. positions: [N], where the new token is stored. out: [N, H, D]. */
void decode(float *keys, float *values, const float *q, i64 ldq, const float *k, i64 ldk, const float *v, i64 ldv,
            const i64 *positions, float *out, i64 N, i64 H, i64 K, i64 capacity, i64 D, float scale) {
    i64 G = H / K;
#pragma omp parallel for schedule(dynamic, 8)
    for (i64 m = 0; m < N * K; m++) {
        i64 n = m / K, head = m % K, position = positions[n];
        float *slot_keys = keys + m * capacity * D, *slot_values = values + m * capacity * D;
        memcpy(slot_keys + position * D, k + n * ldk + head * D, D * sizeof(float));
        memcpy(slot_values + position * D, v + n * ldv + head * D, D * sizeof(float));
        for (i64 g = head * G; g < (head + 1) * G; g++) {
            i64 next_offset = g == head * G && m + 1 < N * K ? capacity * D : 0;
            const float *query = q + n * ldq + g * D;
            float *out_row = out + (n * H + g) * D;
            attend_unrolled(query, slot_keys, slot_values, out_row, position + 1, D, scale, next_offset);
        }
    }
}
