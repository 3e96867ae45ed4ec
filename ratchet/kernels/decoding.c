/* A decoding step of the dense decoder: each thread takes some rows through all layers, so that threads meet once a step.

   Between layers its rows lie side by side in panels, [features, WIDE]: so the weights of a product are read where and as they
   are, and what is added up stays in registers. A row's bits depend on nothing else in the call: sums run in the order of their
   terms, DEEP at a time.

   N = rows, d = hidden size, H = query heads, K = key/value heads, L = capacity of a slot in tokens, D = head_dim, F = size of
   the gated layer.
*/

#include <omp.h>

#include "rows.h"

#ifdef __AVX512F__
#define LANES 16
#define PIECES 4
#else
#define LANES 8
#define PIECES 2
#endif
#define WIDE (PIECES * LANES)
#define HIGH(pieces) ((pieces) == PIECES ? 6 : 8) /* features of a tile: its sums fill the registers */
#define DEEP 128         /* terms of a tile: of a panel, what fits the nearest cache */
#define PANELS (64 / WIDE) /* of a thread: weights that come from afar are read once for so many */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* --- panels: [panels, features, WIDE] */

/* y += w x for `high` features and the first `pieces` of the panel, which are known when this is compiled. ld: from a row of w to
   the next. The features after these are asked for meanwhile: their rows are too short for the processor to guess. */
static inline __attribute__((always_inline)) void tile(const float *w, i64 ld, const float *x, float *y, i64 terms, int high,
                                                       int pieces) {
    lanes sum[HIGH(1)][PIECES];
    for (int i = 0; i < high; i++)
        for (int p = 0; p < pieces; p++) sum[i][p] = (lanes){0};
    for (i64 k = 0; k < terms; k++) {
        lanes term[PIECES];
        if (k % LINE == 0)
            for (int i = 0; i < high; i++) __builtin_prefetch(w + (i + high) * ld + k);
        for (int p = 0; p < pieces; p++) term[p] = *(const lanes *)(x + k * WIDE + p * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < high; i++)
            for (int p = 0; p < pieces; p++) sum[i][p] += w[i * ld + k] * term[p];
    }
    for (int i = 0; i < high; i++)
        for (int p = 0; p < pieces; p++) *(lanes *)(y + i * WIDE + p * LANES) += sum[i][p];
}

static inline __attribute__((always_inline)) void tiles(const float *w, const float *x, i64 held, float *y, i64 panels,
                                                        i64 features, i64 terms, int pieces) {
    for (i64 k = 0; k < terms; k += DEEP) {
        i64 n = 0, some = terms - k < DEEP ? terms - k : DEEP;
#define TILES(high) for (i64 p = 0; p < panels; p++) \
    tile(w + n * terms + k, terms, x + (p * held + k) * WIDE, y + (p * features + n) * WIDE, some, high, pieces)
        for (; n + HIGH(pieces) <= features; n += HIGH(pieces)) TILES(HIGH(pieces));
        for (; n < features; n++) TILES(1);
#undef TILES
    }
}

/* y += w x, by panel. w: [features, terms]. x: panels of `held` features, the first `terms` of which it takes. */
static void add_product(const float *w, const float *x, i64 held, float *y, i64 rows, i64 features, i64 terms) {
    if (rows <= LANES) tiles(w, x, held, y, 1, features, terms, 1);
    else if (rows <= 2 * LANES) tiles(w, x, held, y, 1, features, terms, 2);
    else tiles(w, x, held, y, (rows + WIDE - 1) / WIDE, features, terms, PIECES);
}

static void add_bias(const float *bias, float *y, i64 panels, i64 features) {
    if (!bias) return;
    for (i64 i = 0; i < panels * features; i++)
        for (i64 j = 0; j < WIDE; j++) y[i * WIDE + j] += bias[i % features];
}

/* y = bias, or 0 where there is none */
static void fill(const float *bias, float *y, i64 panels, i64 features) {
    memset(y, 0, panels * features * WIDE * sizeof(float));
    add_bias(bias, y, panels, features);
}

/* y may be x. */
static void normalise(const float *x, const float *w, float *y, i64 panels, i64 d, float eps) {
    for (i64 p = 0; p < panels; p++, x += d * WIDE, y += d * WIDE) {
        float r[WIDE] = {0};
        for (i64 i = 0; i < d; i++)
            for (i64 j = 0; j < WIDE; j++) r[j] += x[i * WIDE + j] * x[i * WIDE + j];
        for (i64 j = 0; j < WIDE; j++) r[j] = 1.0f / sqrtf(r[j] / d + eps);
        for (i64 i = 0; i < d; i++)
            for (i64 j = 0; j < WIDE; j++) y[i * WIDE + j] = x[i * WIDE + j] * r[j] * w[i];
    }
}

/* x: panels of 2 F features, the first half of which becomes silu(first) * second. */
static void gate(float *x, i64 panels, i64 F) {
    for (i64 p = 0; p < panels; p++, x += 2 * F * WIDE)
        for (i64 i = 0; i < F * WIDE; i++) x[i] = silu(x[i]) * x[F * WIDE + i];
}

/* From rows of d to panels, zeros beside them; and back. */
static void lay(const float *x, float *panels, i64 rows, i64 d) {
    for (i64 first = 0; first < rows; first += WIDE)
        for (i64 i = 0; i < d; i++)
            for (i64 t = first; t < first + WIDE; t++) *panels++ = t < rows ? x[t * d + i] : 0;
}

static void take(const float *panels, float *x, i64 rows, i64 d) {
    for (i64 t = 0; t < rows; t++)
        for (i64 i = 0; i < d; i++) x[t * d + i] = panels[(t / WIDE * d + i) * WIDE + t % WIDE];
}

/* --- attention, by row */

/* As the caller's table has it. Biases, and norms of heads, may be null. keys, values: [slots, K, L, D]. */
typedef struct {
    const float *norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    float *keys, *values;
} Layer;

typedef struct { i64 d, H, K, L, D, F; float eps; } Sizes;

/* One head's: normalised where there is a weight, then turned. y must not be x. */
static inline void place(const float *x, const float *w, const float *cos, const float *sin, float *y, i64 D, float eps) {
    float scaled[WIDEST];
    if (w) {
        float r = inverse_rms(x, D, eps);
        for (i64 i = 0; i < D; i++) scaled[i] = x[i] * r * w[i];
        x = scaled;
    }
    turn(x, cos, sin, y, D / 2, 1);
}

/* qkv: panels of (H + 2 K) D features. cos: [rows, D], sin: [rows, D / 2]. out: panels of H D. */
static void attend_all(const Layer *l, const float *qkv, const float *cos, const float *sin, const i64 *positions,
                       const i64 *slots, float *out, i64 rows, Sizes z) {
    i64 G = z.H / z.K, D = z.D, pairs = rows * z.K;
    float scale = 1.0f / sqrtf(D), own[WIDEST], query[WIDEST];
#define AT(t, heads, head) (((t) / WIDE * (heads) + (head)) * D * WIDE + (t) % WIDE)
#define OWN(head) for (i64 i = 0, at = AT(t, z.H + 2 * z.K, head); i < D; i++) own[i] = qkv[at + i * WIDE]
#define STORE(m) ((slots[(m) / z.K] * z.K + (m) % z.K) * z.L * D)
    for (i64 m = 0; m < pairs; m++) {
        i64 t = m / z.K, head = m % z.K, start = STORE(m), position = positions[t];
        const float *c = cos + t * D, *s = sin + t * D / 2;
        float *keys = l->keys + start, *values = l->values + start;
        OWN(z.H + head);
        place(own, l->k_norm, c, s, keys + position * D, D, z.eps);
        OWN(z.H + z.K + head);
        memcpy(values + position * D, own, D * sizeof(float));
        for (i64 g = head * G; g < (head + 1) * G; g++) {
            i64 ahead = g == head * G && m + 1 < pairs ? STORE(m + 1) - start : 0;
            OWN(g);
            place(own, l->q_norm, c, s, query, D, z.eps);
            attend_to(query, keys, values, own, position + 1, D, scale, ahead);
            for (i64 i = 0, at = AT(t, z.H, g); i < D; i++) out[at + i * WIDE] = own[i];
        }
    }
#undef STORE
#undef OWN
#undef AT
}

/* --- the step */

/* Floats that a thread needs between layers. */
i64 step_scratch(i64 d, i64 H, i64 K, i64 D, i64 F) { return PANELS * WIDE * (2 * d + 2 * (H + K) * D + 2 * F); }

/* x: [N, d], embeddings, over which the normalised hidden states are written. cos: [N, D], sin: [N, D / 2]. positions, slots: [N],
   where the new tokens go. scratch: of each thread. */
void step(const Layer *layers, i64 count, float *x, const float *norm, const float *cos, const float *sin, const i64 *positions,
          const i64 *slots, float *scratch, int threads, i64 N, i64 d, i64 H, i64 K, i64 L, i64 D, i64 F, float eps) {
    if (!N) return;
    Sizes z = {d, H, K, L, D, F, eps};
    i64 most = threads * PANELS * WIDE, turns = (N + most - 1) / most * threads, rows = (N + turns - 1) / turns;
    i64 panels = (rows + WIDE - 1) / WIDE, row = (H + 2 * K) * D;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (i64 first = 0; first < N; first += rows) {
        /* Places that don't depend on N: compilers choose a loop by how far apart two are. */
        float *hidden = scratch + omp_get_thread_num() * step_scratch(d, H, K, D, F), *normed = hidden + PANELS * WIDE * d;
        float *qkv = normed + PANELS * WIDE * d, *out = qkv + PANELS * WIDE * row, *wide = out + PANELS * WIDE * H * D;
        i64 own = N - first < rows ? N - first : rows;
        memset(hidden, 0, panels * d * WIDE * sizeof(float));
        memset(out, 0, panels * H * D * WIDE * sizeof(float));
        lay(x + first * d, hidden, own, d);
        for (const Layer *l = layers; l < layers + count; l++) {
            normalise(hidden, l->norm, normed, panels, d, eps);
            fill(l->qkv_bias, qkv, panels, row);
            add_product(l->qkv, normed, d, qkv, own, row, d);
            attend_all(l, qkv, cos + first * D, sin + first * D / 2, positions + first, slots + first, out, own, z);
            add_bias(l->o_bias, hidden, panels, d);
            add_product(l->o, out, H * D, hidden, own, d, H * D);
            normalise(hidden, l->post_norm, normed, panels, d, eps);
            fill(l->gate_up_bias, wide, panels, 2 * F);
            add_product(l->gate_up, normed, d, wide, own, 2 * F, d);
            gate(wide, panels, F);
            add_bias(l->down_bias, hidden, panels, d);
            add_product(l->down, wide, 2 * F, hidden, own, d, F);
        }
        normalise(hidden, norm, hidden, panels, d, eps);
        take(hidden, x + first * d, own, d);
    }
}
