// Products of many rows for a CPU without tiles: both operands lie as the innermost loop reads them, in units of one float,
// or of two bfloat16 where the CPU multiplies these (AVX512-BF16). u: the units of a row.
//
//   activations  [rows/R][u][R]: R rows side by side, as many as fit the registers as sums
//   weight       [columns/16][u][16] (pack.py)
//
// Every sum runs over k in order, so a row's result does not depend on the rows beside it.
#pragma once

#include <type_traits>

#include "attention.h"
#include "buffer.h"
#include "team.h"

namespace triptych {

inline void store_unit(float* to, const v16 (&elements)[1]) { store16(to, elements[0]); }
inline void store_unit(bf16x2* to, const v16 (&elements)[2]) {  // of numbers that fit bfloat16
  store(to, (as_bits(elements[0]) >> 16) | (as_bits(elements[1]) & 0xffff0000u));
}

// `S` is the type of what a layer takes and gives, `U` that of a unit.
template <class S, class U = float>
struct Panels {
  using Store = S;
  using Act = std::conditional_t<std::is_same_v<U, float>, float, bf16>;
  using Weight = U;
  static constexpr int kColumns = 16;  // of a block of results
  static constexpr int kUnit = sizeof(U) / sizeof(Act);  // elements of a unit

  static void begin(int) {}
  static void end() {}

  static size_t act_count(int rows, int k) { return (size_t)round_up(rows, kRows) * k; }

  static void put(Act* base, int k, int row, int col, v16 lanes) {
    U* to = (U*)base + (size_t)(row / kRows) * kRows * (k / kUnit) + (size_t)(col / kUnit) * kRows + row % kRows;
    alignas(64) U out[16 / kUnit];
    store16((Act*)out, lanes);
    for (int i = 0; i < 16 / kUnit; i++) to[i * kRows] = out[i];
  }

  static constexpr int kStretchRows = 192, kStretchDepth = 768, kStretchPanels = 24;
  static constexpr size_t kSums = (size_t)kStretchRows * kStretchPanels * 16;  // floats of `sums`

  static int num_units(int rows, int columns, int threads) { return Cuts(rows, columns, threads).num_units(); }

  // Calls emit(first row, rows, first column, float[rows][16]) for each block of one unit of the results. A stretch of
  // the weight stays in the first-level cache while the rows of a stretch of activations, in the second, pass by.
  template <class Emit>
  static void unit(const Act* a, int rows, int elements, const U* weight, int columns, int threads, int index, float* sums,
                   Emit emit) {
    const int k = elements / kUnit;
    const Cuts cuts(rows, columns, threads);
    const Range own = cuts.rows_of(index), panels = cuts.panels_of(index);
    for (int depth = 0; depth < k; depth += kStretchDepth) {
      const int count = std::min(kStretchDepth, k - depth);
      float* c = sums;
      for (int panel = panels.lo; panel < panels.hi; panel++) {
        const U* w = weight + ((size_t)panel * k + depth) * 16;
        for (int row = own.lo; row < own.hi; row += kRows, c += kRows * 16) {
          const U* x = (const U*)a + (size_t)row * k + (size_t)depth * kRows;
          panel_product<kRows>(x, 1, kRows, w, count, c, 16, depth > 0);
          if (depth + count == k) emit(row, std::min(kRows, own.hi - row), panel * 16, c);
        }
      }
    }
  }

  // Attention of each head over each picture: all keys and values are packed, then units of some queries are attended.
  class Attention {
   public:
    void reserve(int pictures, int tokens, int heads, int dim) {
      tokens_ = tokens, padded_ = round_up(tokens, 16), heads_ = heads, dim_ = dim, lanes_ = pictures * heads;
      keys_ = key_buffer_.get((size_t)lanes_ * padded_ * dim / kUnit);
      values_ = value_buffer_.get((size_t)lanes_ * padded_ * dim / kUnit);
    }

    size_t scratch_count() const { return (size_t)kQueries * (row_step() + 2 * dim_); }
    int num_packs() const { return lanes_ * padded_ / 16; }
    int num_units() const { return lanes_ * queries_per_lane(); }

    // Sixteen keys of one head become [dim][16], their values a stretch of [dim/16][keys][16], a unit along what is
    // summed; missing ones are zero.
    void pack(const Act* qkv, int index) {
      const int width = heads_ * dim_, blocks = padded_ / 16, lane = index / blocks, first = index % blocks * 16;
      const Act* keys = qkv + row_of(lane, first) * 3 * width + width + lane % heads_ * dim_;
      U* columns = keys_ + ((size_t)lane * padded_ + first) * (dim_ / kUnit);
      const auto key = [&](int i) { return first + i < tokens_ ? keys + (size_t)i * 3 * width : nullptr; };
      for (int i = 0; i < 16; i++)
        for (int d = 0; d < dim_ / kUnit; d++) columns[d * 16 + i] = key(i) ? ((const U*)key(i))[d] : U{};
      for (int i = 0; i < 16; i += kUnit)
        for (int d = 0; d < dim_; d += 16) {
          v16 values[kUnit];
          for (int n = 0; n < kUnit; n++) values[n] = key(i + n) ? load16(key(i + n) + width + d) : v16{};
          store_unit(value_panel(lane, d) + (size_t)(first + i) / kUnit * 16, values);
        }
    }

    // put(row, column, lanes) takes the results.
    template <class Put>
    void attend(const Act* qkv, int index, float scale, float* scratch, Put put) {
      const int lane = index / queries_per_lane(), first = index % queries_per_lane() * kQueries;
      const int count = std::min(kQueries, tokens_ - first), width = heads_ * dim_, head = lane % heads_;
      float *queries = scratch, *out = queries + kQueries * dim_, *weights = out + kQueries * dim_;
      const Act* query = qkv + row_of(lane, first) * 3 * width + head * dim_;
      for (int q = 0; q < kQueries; q++)
        for (int d = 0; d < dim_; d += 16)
          Panels::put((Act*)queries, dim_, q, d, q < count ? load16(query + (size_t)q * 3 * width + d) * scale : v16{});
      score((const U*)queries, keys_ + (size_t)lane * padded_ * (dim_ / kUnit), weights);
      float totals[kQueries];
      for (int q = 0; q < count; q++) {
        float *row = weights + q * row_step(), peak;
        for (int key = tokens_; key < padded_; key++) row[key] = kNever;
        exponentiate(row, padded_, &peak, totals + q);
        if constexpr (kUnit > 1)  // where they are: a load is never behind a store
          for (int key = 0; key < padded_; key += 16) store16((Act*)row + key, load16(row + key));
      }
      weigh(weights, lane, out);
      for (int q = 0; q < count; q++)
        for (int d = 0; d < dim_; d += 16)
          put((int)row_of(lane, first) + q, head * dim_ + d, load16(out + q * dim_ + d) * (1.0f / totals[q]));
    }

   private:
    static constexpr int kQueries = 24;  // of a unit: so often a key or value is used while it is at hand
    static constexpr int kStretchKeys = 256;

    int queries_per_lane() const { return (tokens_ + kQueries - 1) / kQueries; }
    size_t row_step() const { return padded_ + 16; }  // rows of weights must not all fall on one line of the cache
    size_t row_of(int lane, int token) const { return (size_t)(lane / heads_) * tokens_ + token; }
    U* value_panel(int lane, int d) const { return values_ + ((size_t)lane * dim_ + d) * (padded_ / kUnit); }

    void score(const U* queries, const U* keys, float* weights) const {
      const int k = dim_ / kUnit;
      for (int key = 0; key < padded_; key += 16)
        for (int q = 0; q < kQueries; q += kRows)
          panel_product<kRows>(queries + q * k, 1, kRows, keys + (size_t)key * k, k, weights + q * row_step() + key,
                               row_step(), false);
    }

    void weigh(const float* weights, int lane, float* out) const {
      for (int key = 0; key < padded_; key += kStretchKeys)
        for (int d = 0; d < dim_; d += 16)
          for (int q = 0; q < kQueries; q += kRows)
            panel_product<kRows>((const U*)(weights + q * row_step()) + key / kUnit, row_step(), 1,
                                 value_panel(lane, d) + (size_t)key / kUnit * 16,
                                 std::min(kStretchKeys, padded_ - key) / kUnit, out + q * dim_ + d, dim_, key > 0);
    }

    int tokens_ = 0, padded_ = 0, heads_ = 0, dim_ = 0, lanes_ = 0;
    U *keys_, *values_;
    Buffer<U> key_buffer_, value_buffer_;
  };

 private:
  // Results in units of nearly the same size, a stretch of rows by one of panels: some for each thread.
  struct Cuts {
    Cuts(int rows, int columns, int threads)
        : rows(rows), panels(columns / 16), blocks(parts(rows, kRows)), down(parts(rows, kStretchRows)),
          across(std::min(panels, std::max(parts(panels, kStretchPanels), parts(4 * threads, down)))) {}

    static int parts(int count, int most) { return (count + most - 1) / most; }
    int num_units() const { return across * down; }
    Range panels_of(int index) const { return {index % across * panels / across, (index % across + 1) * panels / across}; }
    Range rows_of(int index) const {
      const int at = index / across;
      return {at * blocks / down * kRows, std::min(rows, (at + 1) * blocks / down * kRows)};
    }

    const int rows, panels, blocks, down, across;
  };
};

}  // namespace triptych
