/* Attention of packed segments with its gradient: each segment's queries attend to its past, then causally to itself.

   A segment's keys and values are gathered once and used by all query heads that share them, QUERY_BLOCK queries at a time, so
   that nothing is padded to the length of another segment. The bits of a query depend on no other segment: sums run in the order
   of the keys.

   T = tokens, H = query heads, K = key/value heads, D = head_dim, S = segments, n = keys of a segment (its past and itself),
   B = queries of a block, ld = distance between rows of n columns in the scratch memory.
*/

#include <omp.h>

#include "rows.h"

#ifdef __AVX512F__
#define TILE_ROWS 8
#else
#define TILE_ROWS 4
#endif
#define TILE_COLUMNS 16 /* D, and n rounded up, are multiples of it */
#define TILE_VECTORS (TILE_COLUMNS / LANES)
#define QUERY_BLOCK 16 /* a multiple of TILE_ROWS */

typedef int32_t lane_mask __attribute__((vector_size(4 * LANES)));

/* The columns of a tile, for loops without a remainder. */
#define FOR_TILE(p) for (i64 p = 0; p < TILE_COLUMNS; p++)

static inline i64 round_up(i64 n, i64 multiple) { return (n + multiple - 1) / multiple * multiple; }

/* c = a b, or c += a b if `adds`, for a tile of c. a: element (i, k) is at a[i * row + k * term]. */
static inline __attribute__((always_inline)) void multiply_tile(const float *a, i64 row, i64 term, const float *b, i64 ldb, float *c,
                                                                i64 ldc, i64 terms, int adds) {
    lanes sum[TILE_ROWS][TILE_VECTORS];
    for (int i = 0; i < TILE_ROWS; i++)
        for (int p = 0; p < TILE_VECTORS; p++) sum[i][p] = adds ? *(const lanes *)(c + i * ldc + p * LANES) : (lanes){0};
    for (i64 k = 0; k < terms; k++) {
        lanes b_row[TILE_VECTORS];
        for (int p = 0; p < TILE_VECTORS; p++) b_row[p] = *(const lanes *)(b + k * ldb + p * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < TILE_ROWS; i++)
            for (int p = 0; p < TILE_VECTORS; p++) sum[i][p] = multiply_add(a[i * row + k * term], b_row[p], sum[i][p]);
    }
    for (int i = 0; i < TILE_ROWS; i++)
        for (int p = 0; p < TILE_VECTORS; p++) *(lanes *)(c + i * ldc + p * LANES) = sum[i][p];
}

/* c = a b, [rows, columns]. */
static void multiply(const float *a, i64 lda, const float *b, i64 ldb, float *c, i64 ldc, i64 rows, i64 columns, i64 terms) {
    for (i64 j = 0; j < columns; j += TILE_COLUMNS)
        for (i64 i = 0; i < rows; i += TILE_ROWS)
            multiply_tile(a + i * lda, lda, 1, b + j, ldb, c + i * ldc + j, ldc, terms, 0);
}

/* c += a^T b, [rows, columns]. */
static void add_transposed_product(const float *a, i64 lda, const float *b, i64 ldb, float *c, i64 ldc, i64 rows, i64 columns,
                                   i64 terms) {
    for (i64 j = 0; j < columns; j += TILE_COLUMNS)
        for (i64 i = 0; i < rows; i += TILE_ROWS)
            multiply_tile(a + i, 1, lda, b + j, ldb, c + i * ldc + j, ldc, terms, 1);
}

/* Gathers a head's keys or values of a segment: rows [n, D] and their transpose [D, ld], each unless it is null. Rows and columns up
   to a multiple of TILE_COLUMNS become 0. */
static void gather(const float *x, i64 ldx, const i64 *keys, i64 n, i64 D, float *rows, float *columns, i64 ld) {
    i64 padded = round_up(n, TILE_COLUMNS);
    for (i64 j = 0; rows && j < n; j++) memcpy(rows + j * D, x + keys[j] * ldx, D * sizeof(float));
    if (rows) memset(rows + n * D, 0, (padded - n) * D * sizeof(float));
    for (i64 j = 0; columns && j < n; j++)
        for (i64 i = 0; i < D; i++) columns[i * ld + j] = x[keys[j] * ldx + i];
    for (i64 i = 0; columns && i < D; i++) memset(columns + i * ld + n, 0, (padded - n) * sizeof(float));
}

/* Copies a block of B rows, times `factor`, and adds rows of 0 up to a multiple of TILE_ROWS. */
static void copy_block(const float *x, i64 ldx, i64 B, i64 D, float factor, float *block) {
    for (i64 i = 0; i < B; i++)
        for (i64 c = 0; c < D; c += TILE_COLUMNS) FOR_TILE(p) block[i * D + c + p] = x[i * ldx + c + p] * factor;
    memset(block + B * D, 0, (round_up(B, TILE_ROWS) - B) * D * sizeof(float));
}

/* The scores of keys that a query does not attend to become -infinity, and their exponential 0. */
static inline void mask_scores(float *scores, i64 attended, i64 columns) {
    for (i64 j = attended; j < columns; j++) scores[j] = -INFINITY;
}

static inline float exp_score(float score, float shift) { return score == -INFINITY ? 0 : exp_approx(score - shift); }

static inline lanes larger(lanes a, lanes b) {
    lane_mask is_larger = a > b;
    return (lanes)(((lane_mask)a & is_larger) | ((lane_mask)b & ~is_larger));
}

/* Turns a row of scores into exponentials. Returns the logarithm of their sum, and in `factor` what makes the sum 1. */
static float exponentiate(float *scores, i64 columns, float *factor) {
    lanes maxima = *(const lanes *)scores, sums = {0};
    float highest = -INFINITY, sum = 0;
    for (i64 j = LANES; j < columns; j += LANES) maxima = larger(*(const lanes *)(scores + j), maxima);
    for (int p = 0; p < LANES; p++) highest = maxima[p] > highest ? maxima[p] : highest;
    for (i64 j = 0; j < columns; j += TILE_COLUMNS) FOR_TILE(p) scores[j + p] = exp_score(scores[j + p], highest);
    for (i64 j = 0; j < columns; j += LANES) sums += *(const lanes *)(scores + j);
    for (int p = 0; p < LANES; p++) sum += sums[p];
    *factor = 1.0f / sum;
    return highest + logf(sum);
}

/* Number of floats that a thread needs. max_keys: the largest n. */
i64 attention_scratch(i64 max_keys, i64 D) {
    i64 ld = round_up(max_keys, TILE_COLUMNS) + TILE_COLUMNS;
    return 5 * D * ld + 2 * QUERY_BLOCK * ld + 3 * QUERY_BLOCK * D;
}

/* q: [T, H, D], k and v: [T, K, D]: each token is contiguous, and tokens are ldq, ldk, ldv floats apart. out: [T, H, D].
   trees: [n_trees + 1], the first segment of each tree; its segments share keys with no other tree.
   segments: [S, 2], the first token and the number of tokens. key_starts: [S + 1], where the segment's keys start in `keys`, which
   holds the index of each key's token; the segment's own tokens come last.
   log_sums: [T, H], the logarithm of each softmax's sum, or null. */
void attention(const float *q, i64 ldq, const float *k, i64 ldk, const float *v, i64 ldv, const i64 *trees, i64 n_trees,
               const i64 *segments, const i64 *key_starts, const i64 *keys, float *out, float *log_sums, float *scratch, int threads,
               i64 max_keys, i64 H, i64 K, i64 D, float scale) {
    i64 G = H / K, ld = round_up(max_keys, TILE_COLUMNS) + TILE_COLUMNS, thread_size = attention_scratch(max_keys, D);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (i64 m = 0; m < n_trees * K; m++) {
        i64 head = m % K;
        float *k_columns = scratch + omp_get_thread_num() * thread_size, *v_rows = k_columns + D * ld, *weights = v_rows + D * ld;
        float *q_block = weights + QUERY_BLOCK * ld, *out_block = q_block + QUERY_BLOCK * D, factors[QUERY_BLOCK];
        for (i64 s = trees[m / K]; s < trees[m / K + 1]; s++) {
            i64 first = segments[2 * s], length = segments[2 * s + 1], n = key_starts[s + 1] - key_starts[s], past = n - length;
            gather(k + head * D, ldk, keys + key_starts[s], n, D, NULL, k_columns, ld);
            gather(v + head * D, ldv, keys + key_starts[s], n, D, v_rows, NULL, ld);
            for (i64 h = head * G; h < (head + 1) * G; h++)
                for (i64 start = 0; start < length; start += QUERY_BLOCK) {
                    i64 B = length - start < QUERY_BLOCK ? length - start : QUERY_BLOCK, rows = round_up(B, TILE_ROWS);
                    i64 t = first + start, columns = round_up(past + start + B, TILE_COLUMNS);
                    copy_block(q + t * ldq + h * D, ldq, B, D, scale, q_block);
                    multiply(q_block, D, k_columns, ld, weights, ld, rows, columns, D);
                    for (i64 i = 0; i < B; i++) {
                        mask_scores(weights + i * ld, past + start + i + 1, columns);
                        float log_sum = exponentiate(weights + i * ld, columns, factors + i);
                        if (log_sums) log_sums[(t + i) * H + h] = log_sum;
                    }
                    multiply(weights, ld, v_rows, D, out_block, D, rows, D, past + start + B);
                    for (i64 i = 0; i < B; i++)
                        for (i64 c = 0; c < D; c += TILE_COLUMNS)
                            FOR_TILE(p) out[((t + i) * H + h) * D + c + p] = out_block[i * D + c + p] * factors[i];
                }
        }
    }
}

/* The gradients of q, k and v, [T, heads, D] and contiguous; those of k and v start at 0. g: the gradient of `out`; both contiguous. */
void attention_backward(const float *g, const float *q, i64 ldq, const float *k, i64 ldk, const float *v, i64 ldv, const i64 *trees,
                        i64 n_trees, const i64 *segments, const i64 *key_starts, const i64 *keys, const float *out,
                        const float *log_sums, float *dq, float *dk, float *dv, float *scratch, int threads, i64 max_keys, i64 H,
                        i64 K, i64 D, float scale) {
    i64 G = H / K, ld = round_up(max_keys, TILE_COLUMNS) + TILE_COLUMNS, thread_size = attention_scratch(max_keys, D);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (i64 m = 0; m < n_trees * K; m++) {
        i64 head = m % K;
        float *k_rows = scratch + omp_get_thread_num() * thread_size, *k_columns = k_rows + D * ld, *v_columns = k_columns + D * ld;
        float *dk_rows = v_columns + D * ld, *dv_rows = dk_rows + D * ld, *weights = dv_rows + D * ld;
        float *dscores = weights + QUERY_BLOCK * ld, *q_block = dscores + QUERY_BLOCK * ld, *g_block = q_block + QUERY_BLOCK * D;
        float *dq_block = g_block + QUERY_BLOCK * D;
        for (i64 s = trees[m / K]; s < trees[m / K + 1]; s++) {
            const i64 *own_keys = keys + key_starts[s];
            i64 first = segments[2 * s], length = segments[2 * s + 1], n = key_starts[s + 1] - key_starts[s], past = n - length;
            gather(k + head * D, ldk, own_keys, n, D, k_rows, k_columns, ld);
            gather(v + head * D, ldv, own_keys, n, D, NULL, v_columns, ld);
            memset(dk_rows, 0, round_up(n, TILE_COLUMNS) * D * sizeof(float));
            memset(dv_rows, 0, round_up(n, TILE_COLUMNS) * D * sizeof(float));
            for (i64 h = head * G; h < (head + 1) * G; h++)
                for (i64 start = 0; start < length; start += QUERY_BLOCK) {
                    i64 B = length - start < QUERY_BLOCK ? length - start : QUERY_BLOCK, rows = round_up(B, TILE_ROWS);
                    i64 t = first + start, columns = round_up(past + start + B, TILE_COLUMNS);
                    copy_block(q + t * ldq + h * D, ldq, B, D, scale, q_block);
                    copy_block(g + (t * H + h) * D, H * D, B, D, 1, g_block);
                    multiply(q_block, D, k_columns, ld, weights, ld, rows, columns, D);
                    multiply(g_block, D, v_columns, ld, dscores, ld, rows, columns, D);
                    for (i64 i = 0; i < B; i++) {
                        i64 row = ((t + i) * H + h) * D;
                        float *w = weights + i * ld, *ds = dscores + i * ld, log_sum = log_sums[(t + i) * H + h], mean = 0;
                        for (i64 c = 0; c < D; c++) mean += g[row + c] * out[row + c];
                        mask_scores(w, past + start + i + 1, columns);
                        for (i64 j = 0; j < columns; j += TILE_COLUMNS)
                            FOR_TILE(p) {
                                w[j + p] = exp_score(w[j + p], log_sum);
                                ds[j + p] = w[j + p] * (ds[j + p] - mean);
                            }
                    }
                    multiply(dscores, ld, k_rows, D, dq_block, D, rows, D, past + start + B);
                    for (i64 i = 0; i < B; i++)
                        for (i64 c = 0; c < D; c += TILE_COLUMNS)
                            FOR_TILE(p) dq[((t + i) * H + h) * D + c + p] = dq_block[i * D + c + p] * scale;
                    add_transposed_product(dscores, ld, q_block, D, dk_rows, D, columns, D, B);
                    add_transposed_product(weights, ld, g_block, D, dv_rows, D, columns, D, B);
                }
            for (i64 j = 0; j < n; j++)
                for (i64 c = 0; c < D; c += TILE_COLUMNS)
                    FOR_TILE(p) {
                        dk[(own_keys[j] * K + head) * D + c + p] += dk_rows[j * D + c + p];
                        dv[(own_keys[j] * K + head) * D + c + p] += dv_rows[j * D + c + p];
                    }
        }
    }
}
