// Products of many rows in float, for a CPU without tiles: both operands lie as the innermost loop reads them.
//
//   activations  [rows/R][k][R]: R rows side by side, as many as fit the registers as sums
//   weight       [columns/16][k][16] (pack.py)
//
// Every sum runs over k in order, so a row's result does not depend on the rows beside it.
#pragma once

#include "attention.h"
#include "buffer.h"
#include "team.h"

namespace triptych {

// `S` is the type of what a layer takes and gives.
template <class S>
struct Panels {
  using Store = S;
  using Act = float;
  using Weight = float;
  static constexpr int kColumns = 16;  // of a block of results

  static void begin(int) {}
  static void end() {}

  static size_t act_count(int rows, int k) { return (size_t)round_up(rows, kRows) * k; }

  static void put(float* base, int k, int row, int col, v16 lanes) {
    float* to = base + (size_t)(row / kRows) * kRows * k + (size_t)col * kRows + row % kRows;
    alignas(64) float out[16];
    store16(out, lanes);
    for (int i = 0; i < 16; i++) to[i * kRows] = out[i];
  }

  static constexpr int kStretchRows = 192, kStretchDepth = 768, kStretchPanels = 24;
  static constexpr size_t kSums = (size_t)kStretchRows * kStretchPanels * 16;  // floats of `sums`

  static int num_units(int rows, int columns, int threads) { return Cuts(rows, columns, threads).num_units(); }

  // Calls emit(first row, rows, first column, float[rows][16]) for each block of one unit of the results. A stretch of
  // the weight stays in the first-level cache while the rows of a stretch of activations, in the second, pass by.
  template <class Emit>
  static void unit(const float* a, int rows, int k, const float* weight, int columns, int threads, int index, float* sums,
                   Emit emit) {
    const Cuts cuts(rows, columns, threads);
    const Range own = cuts.rows_of(index), panels = cuts.panels_of(index);
    for (int depth = 0; depth < k; depth += kStretchDepth) {
      const int count = std::min(kStretchDepth, k - depth);
      float* c = sums;
      for (int panel = panels.lo; panel < panels.hi; panel++) {
        const float* w = weight + ((size_t)panel * k + depth) * 16;
        for (int row = own.lo; row < own.hi; row += kRows, c += kRows * 16) {
          const float* x = a + (size_t)row * k + (size_t)depth * kRows;
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
      keys_ = key_buffer_.get((size_t)lanes_ * padded_ * dim);
      values_ = value_buffer_.get((size_t)lanes_ * padded_ * dim);
    }

    size_t scratch_count() const { return (size_t)kQueries * (row_step() + 2 * dim_); }
    int num_packs() const { return lanes_ * padded_ / 16; }
    int num_units() const { return lanes_ * queries_per_lane(); }

    // Sixteen keys of one head become [dim][16], their values a stretch of [dim/16][keys][16]; missing ones are zero.
    void pack(const float* qkv, int index) {
      const int width = heads_ * dim_, blocks = padded_ / 16, lane = index / blocks, first = index % blocks * 16;
      const float* key = qkv + row_of(lane, first) * 3 * width + width + lane % heads_ * dim_;
      float* columns = keys_ + ((size_t)lane * padded_ + first) * dim_;
      for (int i = 0; i < 16; i++, key += 3 * width) {
        const bool is_there = first + i < tokens_;
        for (int d = 0; d < dim_; d++) columns[d * 16 + i] = is_there ? key[d] : 0.0f;
        for (int d = 0; d < dim_; d += 16)
          store16(value_panel(lane, d) + (size_t)(first + i) * 16, is_there ? load16(key + width + d) : v16{});
      }
    }

    // put(row, column, lanes) takes the results.
    template <class Put>
    void attend(const float* qkv, int index, float scale, float* scratch, Put put) {
      const int lane = index / queries_per_lane(), first = index % queries_per_lane() * kQueries;
      const int count = std::min(kQueries, tokens_ - first), width = heads_ * dim_, head = lane % heads_;
      float *queries = scratch, *out = queries + kQueries * dim_, *weights = out + kQueries * dim_;
      const float* query = qkv + row_of(lane, first) * 3 * width + head * dim_;
      for (int q = 0; q < kQueries; q++)
        for (int d = 0; d < dim_; d += 16)
          Panels::put(queries, dim_, q, d, q < count ? load16(query + (size_t)q * 3 * width + d) * scale : v16{});
      score(queries, keys_ + (size_t)lane * padded_ * dim_, weights);
      float totals[kQueries];
      for (int q = 0; q < count; q++) {
        float *row = weights + q * row_step(), peak;
        for (int key = tokens_; key < padded_; key++) row[key] = kNever;
        exponentiate(row, padded_, &peak, totals + q);
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
    float* value_panel(int lane, int d) const { return values_ + ((size_t)lane * dim_ + d) * padded_; }

    void score(const float* queries, const float* keys, float* weights) const {
      for (int key = 0; key < padded_; key += 16)
        for (int q = 0; q < kQueries; q += kRows)
          panel_product<kRows>(queries + q * dim_, 1, kRows, keys + (size_t)key * dim_, dim_,
                               weights + q * row_step() + key, row_step(), false);
    }

    void weigh(const float* weights, int lane, float* out) const {
      for (int key = 0; key < padded_; key += kStretchKeys)
        for (int d = 0; d < dim_; d += 16)
          for (int q = 0; q < kQueries; q += kRows)
            panel_product<kRows>(weights + q * row_step() + key, row_step(), 1,
                                 value_panel(lane, d) + (size_t)key * 16, std::min(kStretchKeys, padded_ - key),
                                 out + q * dim_ + d, dim_, key > 0);
    }

    int tokens_ = 0, padded_ = 0, heads_ = 0, dim_ = 0, lanes_ = 0;
    float *keys_, *values_;
    Buffer<float> key_buffer_, value_buffer_;
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
