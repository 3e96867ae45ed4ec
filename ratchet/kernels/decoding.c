/* A decoding step of the dense decoder, and the prefill of short prompts. Each thread computes all layers for some rows, so that
   threads wait for one another only once per call.

   Between layers the rows of a thread lie side by side in panels, [features, PANEL_ROWS]. A matrix product can then read the weights
   in their own layout and keep its sums in registers. The bits of a row depend on nothing else in the call: sums run in the order
   of their terms, TILE_TERMS at a time.

   N = rows, d = hidden size, H = query heads, K = key/value heads, L = capacity of a slot in tokens, D = head_dim, F = size of
   the gated layer.
*/

#include <omp.h>

#include "rows.h"

#ifdef __AVX512F__
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define PANEL_ROWS (VECTORS * LANES)
#define TILE_FEATURES(vectors) ((vectors) == VECTORS ? 6 : 8) /* features of a tile; their sums fill the registers */
#define TILE_TERMS 128 /* terms of a tile; that part of a panel fits the L1 cache */
#define MAX_CHUNK_ROWS 64 /* rows that a thread computes together; weights are read from memory once for all of them */
#define THREAD_PANELS (MAX_CHUNK_ROWS / PANEL_ROWS)

/* --- panels: [panels, features, PANEL_ROWS] */

/* y += w x for `n_features` features and the first `vectors` vectors of the panel. Both numbers are known when this is compiled.
   ld: distance between rows of w. The rows of the next tile's features are prefetched, because they are too short for the
   processor to guess. */
static inline __attribute__((always_inline)) void tile(const float *w, i64 ld, const float *x, float *y, i64 terms, int n_features,
                                                       int vectors) {
    lanes sum[TILE_FEATURES(1)][VECTORS];
    for (int i = 0; i < n_features; i++)
        for (int p = 0; p < vectors; p++) sum[i][p] = (lanes){0};
    for (i64 k = 0; k < terms; k++) {
        lanes term[VECTORS];
        if (k % CACHE_LINE == 0)
            for (int i = 0; i < n_features; i++) __builtin_prefetch(w + (i + n_features) * ld + k);
        for (int p = 0; p < vectors; p++) term[p] = *(const lanes *)(x + k * PANEL_ROWS + p * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < n_features; i++)
            for (int p = 0; p < vectors; p++) sum[i][p] = multiply_add(w[i * ld + k], term[p], sum[i][p]);
    }
    for (int i = 0; i < n_features; i++)
        for (int p = 0; p < vectors; p++) *(lanes *)(y + i * PANEL_ROWS + p * LANES) += sum[i][p];
}

/* y += w x, tile by tile, for the first `vectors` vectors of each panel. */
static inline __attribute__((always_inline)) void tiles(const float *w, const float *x, i64 x_features, float *y, i64 panels,
                                                        i64 features, i64 terms, int vectors) {
    for (i64 k = 0; k < terms; k += TILE_TERMS) {
        i64 n = 0, tile_terms = terms - k < TILE_TERMS ? terms - k : TILE_TERMS;
#define ALL_PANELS(n_features) for (i64 p = 0; p < panels; p++) \
    tile(w + n * terms + k, terms, x + (p * x_features + k) * PANEL_ROWS, y + (p * features + n) * PANEL_ROWS, tile_terms, \
         n_features, vectors)
        for (; n + TILE_FEATURES(vectors) <= features; n += TILE_FEATURES(vectors)) ALL_PANELS(TILE_FEATURES(vectors));
        for (; n < features; n++) ALL_PANELS(1);
#undef ALL_PANELS
    }
}

/* y += w x for each panel. w: [features, terms]. x: panels of `x_features` features, of which the first `terms` are used. */
static void add_product(const float *w, const float *x, i64 x_features, float *y, i64 rows, i64 features, i64 terms) {
    if (rows <= LANES) tiles(w, x, x_features, y, 1, features, terms, 1);
    else if (rows <= 2 * LANES) tiles(w, x, x_features, y, 1, features, terms, 2);
    else tiles(w, x, x_features, y, (rows + PANEL_ROWS - 1) / PANEL_ROWS, features, terms, VECTORS);
}

/* --- products of operands in bfloat16, with sums in float32 that are rounded to bfloat16, as the learner's products are */

#ifdef __AVX512BF16__
/* Rounds panels in place. Each 32-bit word then holds two terms of a row, the even one in the lower half. */
static void round_panels(float *x, i64 x_features, i64 panels, i64 terms) {
    for (i64 p = 0; p < panels; p++, x += x_features * PANEL_ROWS)
        for (i64 k = 0; k < terms; k += 2)
            for (i64 j = 0; j < PANEL_ROWS; j += LANES) {
                __m256i even = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + k * PANEL_ROWS + j));
                __m256i odd = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + (k + 1) * PANEL_ROWS + j));
                __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
                _mm512_storeu_si512(x + k / 2 * PANEL_ROWS + j, _mm512_or_si512(_mm512_cvtepu16_epi32(even), high));
            }
}

/* y += w x, like `tile`, for all terms. x: a rounded panel. */
static inline __attribute__((always_inline)) void bfloat16_tile(const uint16_t *w, const float *x, float *y, i64 terms,
                                                                int n_features, int vectors) {
    __m512 sum[TILE_FEATURES(1)][VECTORS];
    for (int i = 0; i < n_features; i++)
        for (int p = 0; p < vectors; p++) sum[i][p] = _mm512_setzero_ps();
    for (i64 k = 0; k < terms; k += 2) {
        __m512bh term[VECTORS];
        if (k % (2 * CACHE_LINE) == 0)
            for (int i = 0; i < n_features; i++) __builtin_prefetch(w + (i + n_features) * terms + k);
        for (int p = 0; p < vectors; p++) term[p] = (__m512bh)_mm512_loadu_si512(x + k / 2 * PANEL_ROWS + p * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < n_features; i++) {
            int32_t pair;
            memcpy(&pair, w + i * terms + k, sizeof pair);
            for (int p = 0; p < vectors; p++) sum[i][p] = _mm512_dpbf16_ps(sum[i][p], (__m512bh)_mm512_set1_epi32(pair), term[p]);
        }
    }
    for (int i = 0; i < n_features; i++)
        for (int p = 0; p < vectors; p++) {
            float *target = y + i * PANEL_ROWS + p * LANES;
            __m512i rounded = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(sum[i][p])), 16);
            _mm512_storeu_ps(target, _mm512_add_ps(_mm512_loadu_ps(target), _mm512_castsi512_ps(rounded)));
        }
}

static inline __attribute__((always_inline)) void bfloat16_tiles(const uint16_t *w, const float *x, i64 x_features, float *y,
                                                                 i64 panels, i64 features, i64 terms, int vectors) {
    i64 n = 0;
#define ALL_PANELS(n_features) for (i64 p = 0; p < panels; p++) \
    bfloat16_tile(w + n * terms, x + p * x_features * PANEL_ROWS, y + (p * features + n) * PANEL_ROWS, terms, n_features, vectors)
    for (; n + TILE_FEATURES(vectors) <= features; n += TILE_FEATURES(vectors)) ALL_PANELS(TILE_FEATURES(vectors));
    for (; n < features; n++) ALL_PANELS(1);
#undef ALL_PANELS
}

/* Like `add_product`, with w in bfloat16 and an even number of terms. x is rounded in place. */
static void add_bfloat16_product(const uint16_t *w, float *x, i64 x_features, float *y, i64 rows, i64 features, i64 terms) {
    i64 panels = (rows + PANEL_ROWS - 1) / PANEL_ROWS;
    round_panels(x, x_features, panels, terms);
    if (rows <= LANES) bfloat16_tiles(w, x, x_features, y, 1, features, terms, 1);
    else if (rows <= 2 * LANES) bfloat16_tiles(w, x, x_features, y, 1, features, terms, 2);
    else bfloat16_tiles(w, x, x_features, y, panels, features, terms, VECTORS);
}
int has_bfloat16(void) { return 1; }
#else
static void add_bfloat16_product(const uint16_t *w, float *x, i64 x_features, float *y, i64 rows, i64 features, i64 terms) {}
int has_bfloat16(void) { return 0; }
#endif

/* y += w x for each panel. w: in bfloat16 if `is_bfloat16` (x is then overwritten), else in float32. */
static void add_any_product(int is_bfloat16, const void *w, float *x, i64 x_features, float *y, i64 rows, i64 features, i64 terms) {
    if (is_bfloat16) add_bfloat16_product(w, x, x_features, y, rows, features, terms);
    else add_product(w, x, x_features, y, rows, features, terms);
}

static void add_bias(const float *bias, float *y, i64 panels, i64 features) {
    if (!bias) return;
    for (i64 i = 0; i < panels * features; i++)
        for (i64 j = 0; j < PANEL_ROWS; j++) y[i * PANEL_ROWS + j] += bias[i % features];
}

/* y = bias, or 0 without a bias. */
static void set_bias(const float *bias, float *y, i64 panels, i64 features) {
    memset(y, 0, panels * features * PANEL_ROWS * sizeof(float));
    add_bias(bias, y, panels, features);
}

/* RMS norm of each row; y may be x. */
static void normalise(const float *x, const float *w, float *y, i64 panels, i64 d, float eps) {
    for (i64 p = 0; p < panels; p++, x += d * PANEL_ROWS, y += d * PANEL_ROWS) {
        float r[PANEL_ROWS] = {0};
        for (i64 i = 0; i < d; i++)
            for (i64 j = 0; j < PANEL_ROWS; j++) r[j] += x[i * PANEL_ROWS + j] * x[i * PANEL_ROWS + j];
        for (i64 j = 0; j < PANEL_ROWS; j++) r[j] = 1.0f / sqrtf(r[j] / d + eps);
        for (i64 i = 0; i < d; i++)
            for (i64 j = 0; j < PANEL_ROWS; j++) y[i * PANEL_ROWS + j] = x[i * PANEL_ROWS + j] * r[j] * w[i];
    }
}

/* x: panels of 2 F features. The first half of them becomes silu(first half) * second half. */
static void gate(float *x, i64 panels, i64 F) {
    for (i64 p = 0; p < panels; p++, x += 2 * F * PANEL_ROWS)
        for (i64 i = 0; i < F * PANEL_ROWS; i++) x[i] = silu(x[i]) * x[F * PANEL_ROWS + i];
}

/* Copies rows of d features to panels; a panel with fewer rows than PANEL_ROWS is filled up with zeros. */
static void pack_rows(const float *x, float *panels, i64 rows, i64 d) {
    for (i64 first = 0; first < rows; first += PANEL_ROWS)
        for (i64 i = 0; i < d; i++)
            for (i64 t = first; t < first + PANEL_ROWS; t++) *panels++ = t < rows ? x[t * d + i] : 0;
}

/* Copies panels to rows of d features. */
static void unpack_rows(const float *panels, float *x, i64 rows, i64 d) {
    for (i64 t = 0; t < rows; t++)
        for (i64 i = 0; i < d; i++) x[t * d + i] = panels[(t / PANEL_ROWS * d + i) * PANEL_ROWS + t % PANEL_ROWS];
}

/* --- attention, row by row */

/* The tensors of a layer, in the order of the caller's table. Biases, q_norm and k_norm may be null. The matrices are in float32 or
   in bfloat16. keys, values: the KV cache, [slots, K, L, D]. */
typedef struct {
    const float *norm;
    const void *qkv;
    const float *qkv_bias, *q_norm, *k_norm;
    const void *o;
    const float *o_bias, *post_norm;
    const void *gate_up;
    const float *gate_up_bias;
    const void *down;
    const float *down_bias;
    float *keys, *values;
} Layer;

typedef struct { i64 d, H, K, L, D, F; float eps; } Sizes;

/* One head: RMS norm if w is not null, then rotary positions. y must not be x. */
static inline void normalise_and_rotate(const float *x, const float *w, const float *cos, const float *sin, float *y, i64 D,
                                        float eps) {
    float scaled[MAX_HEAD_DIM];
    if (w) {
        float r = inverse_rms(x, D, eps);
        for (i64 i = 0; i < D; i++) scaled[i] = x[i] * r * w[i];
        x = scaled;
    }
    rotate(x, cos, sin, y, D / 2, 1);
}

/* Stores the rows' keys and values in the KV cache, and writes their attention to `out`.
   qkv: panels of (H + 2 K) D features. cos: [rows, D], sin: [rows, D / 2]. out: panels of H D features. */
static void attend_all(const Layer *layer, const float *qkv, const float *cos, const float *sin, const i64 *positions,
                       const i64 *slots, float *out, i64 rows, Sizes sizes) {
    i64 G = sizes.H / sizes.K, D = sizes.D, pairs = rows * sizes.K;
    float scale = 1.0f / sqrtf(D), head_values[MAX_HEAD_DIM], query[MAX_HEAD_DIM];
#define PANEL_OFFSET(t, heads, head) (((t) / PANEL_ROWS * (heads) + (head)) * D * PANEL_ROWS + (t) % PANEL_ROWS)
#define LOAD_HEAD(head) for (i64 i = 0, at = PANEL_OFFSET(t, sizes.H + 2 * sizes.K, head); i < D; i++) \
    head_values[i] = qkv[at + i * PANEL_ROWS]
#define SLOT_START(m) ((slots[(m) / sizes.K] * sizes.K + (m) % sizes.K) * sizes.L * D)
    for (i64 m = 0; m < pairs; m++) {
        i64 t = m / sizes.K, head = m % sizes.K, start = SLOT_START(m), position = positions[t];
        const float *row_cos = cos + t * D, *row_sin = sin + t * D / 2;
        float *keys = layer->keys + start, *values = layer->values + start;
        LOAD_HEAD(sizes.H + head);
        normalise_and_rotate(head_values, layer->k_norm, row_cos, row_sin, keys + position * D, D, sizes.eps);
        LOAD_HEAD(sizes.H + sizes.K + head);
        memcpy(values + position * D, head_values, D * sizeof(float));
        for (i64 g = head * G; g < (head + 1) * G; g++) {
            i64 next_offset = g == head * G && m + 1 < pairs ? SLOT_START(m + 1) - start : 0;
            LOAD_HEAD(g);
            normalise_and_rotate(head_values, layer->q_norm, row_cos, row_sin, query, D, sizes.eps);
            attend_unrolled(query, keys, values, head_values, position + 1, D, scale, next_offset);
            for (i64 i = 0, at = PANEL_OFFSET(t, sizes.H, g); i < D; i++) out[at + i * PANEL_ROWS] = head_values[i];
        }
    }
#undef SLOT_START
#undef LOAD_HEAD
#undef PANEL_OFFSET
}

/* --- the step */

/* Returns the size (floats) of the scratch memory of one thread. */
i64 step_scratch(i64 d, i64 H, i64 K, i64 D, i64 F) { return THREAD_PANELS * PANEL_ROWS * (2 * d + 2 * (H + K) * D + 2 * F); }

/* x: [N, d]: embeddings, overwritten with the normalised hidden states. cos: [N, D], sin: [N, D / 2]. positions, slots: [N], where
   the new tokens are stored in the KV cache. chunk_starts: [n_chunks + 1], the first row of each chunk, and N; a chunk has at most
   MAX_CHUNK_ROWS rows. A token attends to tokens of its slot that earlier calls stored, or earlier rows of its chunk.
   scratch: `step_scratch` floats for each thread. is_bfloat16: the format of matrices. */
void step(const Layer *layers, i64 count, int is_bfloat16, float *x, const float *norm, const float *cos, const float *sin,
          const i64 *positions, const i64 *slots, float *scratch, int threads, const i64 *chunk_starts, i64 n_chunks, i64 d, i64 H,
          i64 K, i64 L, i64 D, i64 F, float eps) {
    Sizes sizes = {d, H, K, L, D, F, eps};
    i64 qkv_size = (H + 2 * K) * D;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (i64 chunk = 0; chunk < n_chunks; chunk++) {
        i64 first = chunk_starts[chunk], chunk_rows = chunk_starts[chunk + 1] - first;
        i64 panels = (chunk_rows + PANEL_ROWS - 1) / PANEL_ROWS;
        /* The offsets don't depend on N, because compiled code may choose a loop by the distance between two buffers. */
        float *hidden = scratch + omp_get_thread_num() * step_scratch(d, H, K, D, F);
        float *normed = hidden + THREAD_PANELS * PANEL_ROWS * d;
        float *qkv = normed + THREAD_PANELS * PANEL_ROWS * d;
        float *out = qkv + THREAD_PANELS * PANEL_ROWS * qkv_size;
        float *gate_up = out + THREAD_PANELS * PANEL_ROWS * H * D;
        memset(hidden, 0, panels * d * PANEL_ROWS * sizeof(float));
        memset(out, 0, panels * H * D * PANEL_ROWS * sizeof(float));
        pack_rows(x + first * d, hidden, chunk_rows, d);
        for (const Layer *layer = layers; layer < layers + count; layer++) {
            normalise(hidden, layer->norm, normed, panels, d, eps);
            set_bias(layer->qkv_bias, qkv, panels, qkv_size);
            add_any_product(is_bfloat16, layer->qkv, normed, d, qkv, chunk_rows, qkv_size, d);
            attend_all(layer, qkv, cos + first * D, sin + first * D / 2, positions + first, slots + first, out, chunk_rows, sizes);
            add_bias(layer->o_bias, hidden, panels, d);
            add_any_product(is_bfloat16, layer->o, out, H * D, hidden, chunk_rows, d, H * D);
            normalise(hidden, layer->post_norm, normed, panels, d, eps);
            set_bias(layer->gate_up_bias, gate_up, panels, 2 * F);
            add_any_product(is_bfloat16, layer->gate_up, normed, d, gate_up, chunk_rows, 2 * F, d);
            gate(gate_up, panels, F);
            add_bias(layer->down_bias, hidden, panels, d);
            add_any_product(is_bfloat16, layer->down, gate_up, 2 * F, hidden, chunk_rows, d, F);
        }
        normalise(hidden, norm, hidden, panels, d, eps);
        unpack_rows(hidden, x + first * d, chunk_rows, d);
    }
}
