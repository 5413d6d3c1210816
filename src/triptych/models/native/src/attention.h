// Attention for one unit of work: some queries of one key/value head over that head's keys and values.
//
// Portable: one query at a time, float arithmetic, keys read where they lie in the pool.
// Tiles (AMX): 16 queries at a time. Scores come out transposed, [key][16 queries], so that keys are read in place as the
// first operand and the softmax works down lanes; values are transposed once for all queries of the head.
#pragma once

#include <limits>

#include "gemm.h"

namespace triptych {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int kMaxGroup = 16;  // query heads of one key/value head that a decode unit takes at once

inline float soft_capped(float score, float cap) { return cap > 0 ? cap * std::tanh(score / cap) : score; }
inline v16 soft_capped(v16 score, float cap) { return cap > 0 ? cap * tanh16(score * (1 / cap)) : score; }

// One layer's keys or values: row of a slot and head, `dim` elements.
template <class T>
struct Pool {
  T* base;
  int heads, dim;
  T* row(int64_t slot, int head) const { return base + (slot * heads + head) * dim; }
  int64_t slot_stride() const { return (int64_t)heads * dim; }
};

template <class T>
inline float dot(const float* a, const T* b, int dim) {
  v16 total = {};
  for (int i = 0; i < dim; i += 16) total += load16(a + i) * load16(b + i);
  return sum(total);
}

// Which keys a query may see: [lo, hi].
struct Reach {
  const int32_t* lo;  // [queries], or nullptr: all keys
  const int32_t* hi;
};

// What one stretch of keys gives a query: the largest score, the sum of exponentials and the weighted sum of values.
struct Partial {
  float* peak;   // [queries]
  float* total;  // [queries]
  float* out;    // [queries][dim]
};

// Rows of a pool lie where the slots say, which the machine's own prefetching does not follow: it is told `kKeysAhead`
// rows early. A row spans dim / 16 lines of 64 bytes at most.
constexpr int kKeysAhead = 12;

template <class T>
inline void prefetch_row(Pool<T> pool, const int64_t* slots, int key, int num_keys, int head) {
  if (key + kKeysAhead >= num_keys) return;
  const char* row = (const char*)pool.row(slots[key + kKeysAhead], head);
  for (size_t line = 0; line < pool.dim * sizeof(T); line += 64) __builtin_prefetch(row + line);
}

// Adds weights[q][key] * value[key] to out[q] for Q queries and D lanes of 16 columns at once.
template <int Q, int D, class T>
inline void weigh(const float* weights, int weight_stride, int num_keys, const int64_t* slots, Pool<T> values, int head,
                  int col, float* out, int dim) {
  v16 acc[Q][D] = {};
  for (int key = 0; key < num_keys; key++) {
    if (col == 0) prefetch_row(values, slots, key, num_keys, head);
    const T* value = values.row(slots[key], head) + col;
    v16 lanes[D];
    for (int d = 0; d < D; d++) lanes[d] = load16(value + 16 * d);
    for (int q = 0; q < Q; q++)
      for (int d = 0; d < D; d++) acc[q][d] += weights[(size_t)q * weight_stride + key] * lanes[d];
  }
  for (int q = 0; q < Q; q++)
    for (int d = 0; d < D; d++) store16(out + (size_t)q * dim + col + 16 * d, acc[q][d]);
}

template <int Q, class T>
inline void weigh_all_columns(const float* weights, int stride, int num_keys, const int64_t* slots, Pool<T> values,
                              int head, float* out) {
  const int dim = values.dim;
  int col = 0;
  for (; col + 64 <= dim; col += 64) weigh<Q, 4>(weights, stride, num_keys, slots, values, head, col, out, dim);
  for (; col < dim; col += 16) weigh<Q, 1>(weights, stride, num_keys, slots, values, head, col, out, dim);
}

template <class T>
inline void weigh_values(const float* weights, int stride, int num_queries, int num_keys, const int64_t* slots,
                         Pool<T> values, int head, float* out) {
  int q = 0;
  for (; q + 4 <= num_queries; q += 4)
    weigh_all_columns<4>(weights + (size_t)q * stride, stride, num_keys, slots, values, head, out + (size_t)q * values.dim);
  if (num_queries - q == 3)
    weigh_all_columns<3>(weights + (size_t)q * stride, stride, num_keys, slots, values, head, out + (size_t)q * values.dim);
  else
    for (; q < num_queries; q++)
      weigh_all_columns<1>(weights + (size_t)q * stride, stride, num_keys, slots, values, head,
                           out + (size_t)q * values.dim);
}

// weights[num_keys] holds scores and becomes exp(score - peak); padded to a multiple of 16 with kNever by the caller.
inline void exponentiate(float* weights, int num_keys, float* peak, float* total) {
  v16 top = splat(kNever);
  for (int key = 0; key < num_keys; key += 16) top = max16(top, load16(weights + key));
  float largest = kNever;
  for (int i = 0; i < 16; i++) largest = std::max(largest, top[i]);
  v16 sums = {};
  for (int key = 0; key < num_keys; key += 16) {
    const v16 weight = exp16(load16(weights + key) - largest);
    sums += weight;
    store16(weights + key, weight);
  }
  *peak = largest;
  *total = sum(sums);
}

// Scores of Q queries against one key: the key is read once for all of them.
template <int Q, class T>
inline void score(const float* queries, const T* key, int dim, float* to, int stride, float scale, float cap) {
  v16 total[Q] = {};
  for (int i = 0; i < dim; i += 16) {
    const v16 lanes = load16(key + i);
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) total[q] += load16(queries + (size_t)q * dim + i) * lanes;
  }
  for (int q = 0; q < Q; q++) to[(size_t)q * stride] = soft_capped(sum(total[q]) * scale, cap);
}

// Scores of Q queries against sixteen keys that lie as [dim][16].
template <int Q>
inline void score_block(const float* queries, const float* columns, int dim, float* to, int stride, float scale,
                        float cap) {
  v16 total[Q] = {};
  for (int i = 0; i < dim; i++) {
    const v16 lanes = load16(columns + i * 16);
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) total[q] += queries[(size_t)q * dim + i] * lanes;
  }
  for (int q = 0; q < Q; q++) store16(to + (size_t)q * stride, soft_capped(total[q] * scale, cap));
}

// Few queries: one key after the other.
template <class T>
inline void score_keys(const float* queries, int num_queries, const int64_t* slots, int num_keys, Pool<T> keys, int head,
                       float scale, float cap, float* scratch) {
  const int padded = round_up(num_keys, 16), dim = keys.dim;
  for (int key = 0; key < num_keys; key++) {
    prefetch_row(keys, slots, key, num_keys, head);
    const T* row = keys.row(slots[key], head);
    int q = 0;
    for (; q + 4 <= num_queries; q += 4)
      score<4>(queries + (size_t)q * dim, row, dim, scratch + (size_t)q * padded + key, padded, scale, cap);
    if (num_queries - q == 3)
      score<3>(queries + (size_t)q * dim, row, dim, scratch + (size_t)q * padded + key, padded, scale, cap);
    else
      for (; q < num_queries; q++)
        score<1>(queries + (size_t)q * dim, row, dim, scratch + (size_t)q * padded + key, padded, scale, cap);
  }
}

// Many queries: sixteen keys at a time, turned once for all of them, so that no sum goes across lanes.
// columns: [dim][16] floats.
template <class T>
inline void score_blocks(const float* queries, int num_queries, const int64_t* slots, int num_keys, Pool<T> keys,
                         int head, float scale, float cap, float* scratch, float* columns) {
  const int padded = round_up(num_keys, 16), dim = keys.dim;
  for (int first = 0; first < num_keys; first += 16) {
    const int count = std::min(16, num_keys - first);
    if (count < 16) std::fill(columns, columns + dim * 16, 0.0f);
    for (int key = 0; key < count; key++) {
      const T* row = keys.row(slots[first + key], head);
      for (int i = 0; i < dim; i += 16) {
        float lanes[16];
        store16(lanes, load16(row + i));
        for (int lane = 0; lane < 16; lane++) columns[(i + lane) * 16 + key] = lanes[lane];
      }
    }
    int q = 0;
    for (; q + 4 <= num_queries; q += 4)
      score_block<4>(queries + (size_t)q * dim, columns, dim, scratch + (size_t)q * padded + first, padded, scale, cap);
    for (; q < num_queries; q++)
      score_block<1>(queries + (size_t)q * dim, columns, dim, scratch + (size_t)q * padded + first, padded, scale, cap);
  }
}

// Queries [num_queries][dim] of one head over the keys at `slots`, of which a query sees those in its reach only.
// scratch: [num_queries][round_up(num_keys, 16)] floats. `columns`, [dim][16] floats, is given where many queries may come.
template <class T>
inline void attend(const float* queries, int num_queries, const int64_t* slots, int num_keys, Pool<T> keys,
                   Pool<T> values, int head, float scale, float cap, float* scratch, Partial result,
                   Reach reach = {}, float* columns = nullptr) {
  const int padded = round_up(num_keys, 16);
  if (columns)
    score_blocks(queries, num_queries, slots, num_keys, keys, head, scale, cap, scratch, columns);
  else
    score_keys(queries, num_queries, slots, num_keys, keys, head, scale, cap, scratch);
  for (int q = 0; q < num_queries; q++) {
    float* weights = scratch + (size_t)q * padded;
    if (reach.lo) {
      for (int key = 0; key < reach.lo[q]; key++) weights[key] = kNever;
      for (int key = reach.hi[q] + 1; key < num_keys; key++) weights[key] = kNever;
    }
    for (int key = num_keys; key < padded; key++) weights[key] = kNever;
    exponentiate(weights, padded, result.peak + q, result.total + q);
  }
  weigh_values(scratch, padded, num_queries, num_keys, slots, values, head, result.out);
}

#ifdef __AMX_BF16__

// 16 by 16 elements of 32 bits.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}

// Up to 16 query rows of `dim` become tiles of [16 pairs][16 queries][2] for each 32 columns; missing queries are zero.
inline void pack_queries(const bf16* queries, int64_t stride, int count, int dim, bf16* tiles) {
  for (int col = 0; col < dim; col += 32) {
    __m512i rows[16];
    for (int q = 0; q < 16; q++)
      rows[q] = q < count ? _mm512_loadu_si512(queries + q * stride + col) : _mm512_setzero_si512();
    transpose16(rows);
    for (int pair = 0; pair < 16; pair++) _mm512_storeu_si512(tiles + (size_t)col * 16 + pair * 32, rows[pair]);
  }
}

// scores[key][16] = key . query for 16 keys, whose rows lie `stride` elements apart.
inline void score_tile(const bf16* keys, int64_t stride, int dim, const bf16* query_tiles, float* scores) {
  _tile_zero(0);
  for (int col = 0; col < dim; col += 32) {
    _tile_loadd(4, keys + col, stride * 2);
    _tile_loadd(6, query_tiles + (size_t)col * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, scores, 64);
}

inline void score_two_tiles(const bf16* keys, int64_t stride, int dim, const bf16* query_tiles, float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  const bf16* second = keys + 16 * stride;
  for (int col = 0; col < dim; col += 32) {
    _tile_loadd(4, keys + col, stride * 2);
    _tile_loadd(6, query_tiles + (size_t)col * 16, 64);
    _tile_loadd(5, second + col, stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + 256, 64);
}

// The decode unit: up to 16 queries, each over all of the keys. With `in_runs`, every 16 slots lie together (a last run that
// is not full still lies inside its block); else keys are copied together. scratch: [16][padded] + [padded][16] floats.
inline void attend_tiles(const bf16* queries, int64_t query_stride, int num_queries, const int64_t* slots, int num_keys,
                         bool in_runs, Pool<bf16> keys, Pool<bf16> values, int head, float scale, float cap, float* scratch,
                         Partial result) {
  const int padded = round_up(num_keys, 16), dim = keys.dim;
  alignas(64) bf16 tiles[16 * 256];
  float* by_key = scratch + (size_t)16 * padded;
  pack_queries(queries, query_stride, num_queries, dim, tiles);
  alignas(64) bf16 copied[16 * 256];
  for (int key = 0; key < padded; key += 16) {
    if (in_runs) {
      score_tile(keys.row(slots[key], head), keys.slot_stride(), dim, tiles, by_key + key * 16);
      continue;
    }
    for (int i = 0; i < std::min(16, num_keys - key); i++)
      std::memcpy((void*)(copied + i * dim), keys.row(slots[key + i], head), sizeof(bf16) * dim);
    score_tile(copied, dim, dim, tiles, by_key + key * 16);
  }
  for (int key = 0; key < padded; key += 16) {
    __m512i block[16];
    for (int i = 0; i < 16; i++) block[i] = _mm512_loadu_si512(by_key + (key + i) * 16);
    transpose16(block);
    for (int q = 0; q < num_queries; q++)
      store16(scratch + (size_t)q * padded + key, soft_capped((v16)block[q] * scale, cap));
  }
  for (int q = 0; q < num_queries; q++) {
    float* weights = scratch + (size_t)q * padded;
    for (int key = num_keys; key < padded; key++) weights[key] = kNever;
    exponentiate(weights, padded, result.peak + q, result.total + q);
  }
  weigh_values(scratch, padded, num_queries, num_keys, slots, values, head, result.out);
}

// 32 keys' values of one head, rows `stride` apart, become [dim/16][16 columns][32 keys]; missing keys are zero.
inline void pack_values(const bf16* const* rows, int count, int dim, bf16* tiles) {
  for (int col = 0; col < dim; col += 16) {
    __m512i pairs[16];
    for (int pair = 0; pair < 16; pair++) {
      const __m256i zero = _mm256_setzero_si256();
      const __m256i even = 2 * pair < count ? _mm256_loadu_si256((const __m256i*)(rows[2 * pair] + col)) : zero;
      const __m256i odd = 2 * pair + 1 < count ? _mm256_loadu_si256((const __m256i*)(rows[2 * pair + 1] + col)) : zero;
      pairs[pair] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
    }
    transpose16(pairs);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(tiles + (size_t)col * 32 + i * 32, pairs[i]);
  }
}

// out_tiles[dim][16 queries] = sum over keys of value[key][dim] * weight[key][query].
inline void weigh_tiles(const bf16* value_tiles, const bf16* weight_tiles, int num_blocks, int dim, float* out_tiles) {
  const size_t block = (size_t)dim * 32;
  for (int col = 0; col < dim; col += 64) {
    const int tiles = dim - col < 64 ? (dim - col) / 16 : 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16* v = value_tiles + (size_t)col * 32;
    for (int i = 0; i < num_blocks; i++, v += block) {
      _tile_loadd(6, weight_tiles + (size_t)i * 512, 64);
      _tile_loadd(4, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (tiles > 1) {
        _tile_loadd(5, v + 512, 64);
        _tile_dpbf16ps(1, 5, 6);
      }
      if (tiles > 2) {
        _tile_loadd(4, v + 1024, 64);
        _tile_dpbf16ps(2, 4, 6);
      }
      if (tiles > 3) {
        _tile_loadd(5, v + 1536, 64);
        _tile_dpbf16ps(3, 5, 6);
      }
    }
    _tile_stored(0, out_tiles + (size_t)col * 16, 64);
    if (tiles > 1) _tile_stored(1, out_tiles + (size_t)(col + 16) * 16, 64);
    if (tiles > 2) _tile_stored(2, out_tiles + (size_t)(col + 32) * 16, 64);
    if (tiles > 3) _tile_stored(3, out_tiles + (size_t)(col + 48) * 16, 64);
  }
}

// 16 queries over contiguous keys (rows `key_stride` apart, readable up to a multiple of 32 keys) and packed values.
// scratch: [round_up(num_keys, 32)][16] floats; weight_tiles: half as many bytes. emit(query, column, lanes of 16).
template <class Emit>
inline void attend_block(const bf16* queries, int64_t query_stride, int num_queries, const bf16* keys, int64_t key_stride,
                         const bf16* value_tiles, int num_keys, int dim, float scale, float cap, Reach reach,
                         float* scratch, bf16* weight_tiles, Emit emit) {
  alignas(64) bf16 tiles[16 * 256];
  alignas(64) float out_tiles[256 * 16];
  i16x32 lo = {}, hi = {};
  int last = num_keys - 1, first = 0;
  for (int q = 0; q < 16; q++) {
    const int source = std::min(q, num_queries - 1);
    lo[q] = reach.lo ? reach.lo[source] : 0;
    hi[q] = reach.hi ? reach.hi[source] : num_keys - 1;
  }
  if (reach.lo) {
    first = lo[0], last = hi[0];
    for (int q = 1; q < 16; q++) first = std::min(first, lo[q]), last = std::max(last, hi[q]);
    first = first / 32 * 32;
  }
  const int end = round_up(last + 1, 32);
  pack_queries(queries, query_stride, num_queries, dim, tiles);
  for (int key = first; key < end; key += 32)
    score_two_tiles(keys + key * key_stride, key_stride, dim, tiles, scratch + (size_t)(key - first) * 16);

  const bool is_masked = reach.lo || end > num_keys;
  v16 peak = splat(kNever);
  for (int key = first; key < end; key++) {
    v16 score = soft_capped(load16(scratch + (size_t)(key - first) * 16) * scale, cap);
    if (is_masked) score = ((lo <= key) & (hi >= key)) ? score : splat(kNever);
    peak = max16(peak, score);
    if (is_masked || cap > 0) store16(scratch + (size_t)(key - first) * 16, score);
  }
  constexpr float kLog2E = 1.44269504088896341f;
  const float factor = (is_masked || cap > 0 ? 1.0f : scale) * kLog2E;
  const v16 base = peak * kLog2E;
  v16 total = {};
  for (int key = first; key < end; key += 2) {
    const float* at = scratch + (size_t)(key - first) * 16;
    const v16 even = exp2_16(load16(at) * factor - base), odd = exp2_16(load16(at + 16) * factor - base);
    total += even + odd;
    const u16x32 pair = __builtin_convertvector(round16(even), u16x32) | __builtin_convertvector(round16(odd), u16x32) << 16;
    std::memcpy(weight_tiles + (size_t)(key - first) * 16, &pair, sizeof pair);
  }
  weigh_tiles(value_tiles + (size_t)first * dim, weight_tiles, (end - first) / 32, dim, out_tiles);
  const v16 inverse = 1.0f / total;
  for (int col = 0; col < dim; col += 16) {
    __m512i block[16];
    for (int i = 0; i < 16; i++) block[i] = (__m512i)(load16(out_tiles + (size_t)(col + i) * 16) * inverse);
    transpose16(block);
    for (int q = 0; q < num_queries; q++) emit(q, col, (v16)block[q]);
  }
}

#endif

}  // namespace triptych
