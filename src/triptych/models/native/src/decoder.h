// One step of a llama-like decoder over a packed batch: all layers in one parallel region, keys and values straight from
// the paged pools. The residual stream stays in float; weights and the pools have the model's type.
//
// A layer is: RMSNorm, QKV, (q/k norm,) rotary, attention, output projection, RMSNorm, gate and up, SiLU, down.
#pragma once

#include <omp.h>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "team.h"

namespace triptych {

constexpr int kTileQueries = 16;  // of one key/value head, taken together in a prefill without tiles
constexpr int kSplit = 512;  // keys of one decode unit: a long context is shared by the team, at fixed cuts

extern "C" {

struct LayerWeights {
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm, k_norm: [head_dim] or null
  const void *qkv, *out, *gate_up, *down;                 // packed
  const float *qkv_bias, *out_bias;                       // or null
  int32_t has_rotary;
  int32_t window;  // keys in reach, 0: all
};

struct DecoderShape {
  int32_t num_layers, hidden, heads, kv_heads, head_dim, inner, activation;
  float eps, scale, softcap;
  const float* final_norm;
  const LayerWeights* layers;
};

struct Part {  // a prefill chunk: rows [row, row + num_new), keys at slots[0, num_keys)
  int32_t row, num_new, num_keys, padding;
  const int64_t* slots;
  const int32_t* lo;  // [2][num_new]: first key in reach, in a layer without and with a window
  const int32_t* hi;  // [num_new]: last key in reach
};

struct StepInput {
  int32_t rows, num_decode, num_parts, threads;
  int64_t decode_width, block_size;
  const int64_t* write_slots;     // [rows]
  const int64_t* decode_slots;    // [num_decode][decode_width]
  const int64_t* decode_lengths;  // [num_decode]
  const Part* parts;
  const void* embeds;  // [rows][hidden], the model's type
  const float* cos;    // [rows][head_dim]
  const float* sin;
  void* out;           // [rows][hidden], the model's type
  void* const* keys;   // [num_layers]
  void* const* values;
};
}

class DecoderBase {
 public:
  virtual ~DecoderBase() = default;
  virtual void step(const StepInput& in) = 0;
};

template <class Kernel>
class Decoder final : public DecoderBase {
  using T = typename Kernel::Store;
  using Act = typename Kernel::Act;
  using Query = typename Kernel::Query;

 public:
  explicit Decoder(const DecoderShape& shape)
      : shape_(shape), layers_(shape.layers, shape.layers + shape.num_layers) {
    group_ = shape.heads / shape.kv_heads;
    q_width_ = shape.heads * shape.head_dim;
    kv_width_ = shape.kv_heads * shape.head_dim;
  }

  void step(const StepInput& in) override {
    reserve(in);
    Team team(in.threads);
#pragma omp parallel num_threads(in.threads)
    run(in, team, omp_get_thread_num());
  }

 private:
  void reserve(const StepInput& in) {
    const int rows = in.rows, threads = in.threads;
    num_splits_ = 1;
    for (int i = 0; i < in.num_decode; i++)
      num_splits_ = std::max(num_splits_, int((in.decode_lengths[i] + kSplit - 1) / kSplit));
    size_t keys = 0, longest = kSplit;
    for (int i = 0; i < in.num_parts; i++) {
      const size_t padded = round_up(in.parts[i].num_keys, 32);
      keys += padded;
      longest = std::max(longest, padded);
    }
    hidden_ = hidden_buffer_.get((size_t)rows * shape_.hidden);
    qkv_ = qkv_buffer_.get((size_t)rows * round_up(q_width_ + 2 * kv_width_, kGroup));
    queries_ = query_buffer_.get((size_t)rows * q_width_ + 64);
    attended_ = attended_buffer_.get((size_t)rows * q_width_);
    inner_ = inner_buffer_.get(Kernel::act_count(rows, shape_.inner));
    const size_t widest = std::max(shape_.hidden, q_width_);
    const int copies = is_few(rows) ? threads : 1;
    act_count_ = Kernel::act_count(rows, widest);
    act_ = act_buffer_.get(act_count_ * copies);
    const size_t units = (size_t)in.num_decode * shape_.heads * num_splits_;
    peaks_ = peak_buffer_.get(units);
    totals_ = total_buffer_.get(units);
    partials_ = partial_buffer_.get(units * shape_.head_dim);
    scratch_count_ = longest * std::max(32, group_ + 1) + (2 * std::max(kTileQueries, group_) + 16) * shape_.head_dim;
    scratch_ = scratch_buffer_.get(scratch_count_ * threads);
    if constexpr (Kernel::kTiles) {
      gathered_ = gathered_buffer_.get(keys * kv_width_);
      value_tiles_ = value_buffer_.get(keys * kv_width_);
    }
  }

  static bool is_few(int rows) { return rows <= 16; }

  void run(const StepInput& in, Team& team, int member) {
    load_embeds(in, team, member);
    for (int i = 0; i < shape_.num_layers; i++) {
      const LayerWeights& layer = layers_[i];
      Pool<T> keys{(T*)in.keys[i], shape_.kv_heads, shape_.head_dim};
      Pool<T> values{(T*)in.values[i], shape_.kv_heads, shape_.head_dim};
      const Act* normed = normalise(in, team, member, layer.input_norm);
      project_qkv(in, team, member, normed, layer);
      team.barrier();
      place_heads(in, team, member, layer, keys, values);
      team.barrier();
      attend_all(in, team, member, layer, keys, values);
      team.barrier();
      const Act* attended = pack_attended(in, team, member);
      project_residual(in, team, member, attended, q_width_, layer.out, layer.out_bias);
      team.barrier();
      normed = normalise(in, team, member, layer.post_norm);
      project_inner(in, team, member, normed, layer);
      team.barrier();
      project_residual(in, team, member, inner_, shape_.inner, layer.down, nullptr);
      team.barrier();
    }
    store_hidden(in, team, member);
  }

  void load_embeds(const StepInput& in, Team& team, int member) {
    const Range rows = team.share(in.rows, member);
    const T* from = (const T*)in.embeds;
    for (size_t i = (size_t)rows.lo * shape_.hidden; i < (size_t)rows.hi * shape_.hidden; i += 16)
      store16(hidden_ + i, load16(from + i));
    team.barrier();
  }

  float inverse_rms(const float* x, int count) const {
    v16 squares = {};
    for (int i = 0; i < count; i += 16) {
      const v16 v = load16(x + i);
      squares += v * v;
    }
    return 1.0f / std::sqrt(sum(squares) / count + shape_.eps);
  }

  // Few rows: each member makes its own copy, which costs less than a barrier. Many: each makes its share.
  template <class Fill>
  const Act* prepare(const StepInput& in, Team& team, int member, Fill fill) {
    const bool few = is_few(in.rows);
    Act* base = few ? act_ + act_count_ * member : act_;
    const Range rows = few ? Range{0, in.rows} : team.share(in.rows, member);
    for (int row = rows.lo; row < rows.hi; row++) fill(base, row);
    if (!few) team.barrier();
    return base;
  }

  const Act* normalise(const StepInput& in, Team& team, int member, const float* weight) {
    return prepare(in, team, member, [&](Act* base, int row) {
      const float* x = hidden_ + (size_t)row * shape_.hidden;
      const float factor = inverse_rms(x, shape_.hidden);
      for (int i = 0; i < shape_.hidden; i += 16)
        store16(Kernel::act(base, shape_.hidden, row, i), load16(x + i) * factor * load16(weight + i));
    });
  }

  template <class Emit>
  void product(const StepInput& in, Team& team, int member, const Act* a, int k, const void* weight, int columns,
               Emit emit) {
    const Range groups = team.share(round_up(columns, kGroup) / kGroup, member);
    Kernel::begin(in.rows);
    Kernel::gemm(a, in.rows, k, (const typename Kernel::Weight*)weight, groups.lo, groups.hi, emit);
  }

  void project_qkv(const StepInput& in, Team& team, int member, const Act* a, const LayerWeights& layer) {
    const int columns = q_width_ + 2 * kv_width_, width = round_up(columns, kGroup);
    product(in, team, member, a, shape_.hidden, layer.qkv, columns, [&](int row, int count, int col, const float* c) {
      const v16 b0 = layer.qkv_bias ? load16(layer.qkv_bias + col) : v16{};
      const v16 b1 = layer.qkv_bias ? load16(layer.qkv_bias + col + 16) : v16{};
      for (int r = 0; r < count; r++) {
        float* to = qkv_ + (size_t)(row + r) * width + col;
        store16(to, load16(c + r * kGroup) + b0);
        store16(to + 16, load16(c + r * kGroup + 16) + b1);
      }
    });
  }

  void project_residual(const StepInput& in, Team& team, int member, const Act* a, int k, const void* weight,
                        const float* bias) {
    product(in, team, member, a, k, weight, shape_.hidden, [&](int row, int count, int col, const float* c) {
      const int lanes = std::min(kGroup, shape_.hidden - col);
      for (int r = 0; r < count; r++)
        for (int i = 0; i < lanes; i += 16) {
          float* to = hidden_ + (size_t)(row + r) * shape_.hidden + col + i;
          v16 v = load16(to) + load16(c + r * kGroup + i);
          if (bias) v += load16(bias + col + i);
          store16(to, v);
        }
    });
  }

  // A group holds 16 columns of the gate and the same 16 of up.
  void project_inner(const StepInput& in, Team& team, int member, const Act* a, const LayerWeights& layer) {
    product(in, team, member, a, shape_.hidden, layer.gate_up, 2 * shape_.inner,
            [&](int row, int count, int col, const float* c) {
              for (int r = 0; r < count; r++)
                store16(Kernel::act(inner_, shape_.inner, row + r, col / 2),
                        activate(load16(c + r * kGroup), shape_.activation) * load16(c + r * kGroup + 16));
            });
  }

  // Norms and rotary of each new row's heads; queries to their buffer, keys and values to the pools.
  void place_heads(const StepInput& in, Team& team, int member, const LayerWeights& layer, Pool<T> keys,
                   Pool<T> values) {
    const int dim = shape_.head_dim, per_row = shape_.heads + 2 * shape_.kv_heads;
    const int width = round_up(q_width_ + 2 * kv_width_, kGroup);
    const Range items = team.share(in.rows * per_row, member);
    alignas(64) float head[256];
    for (int item = items.lo; item < items.hi; item++) {
      const int row = item / per_row, index = item % per_row;
      const float* x = qkv_ + (size_t)row * width + (size_t)index * dim;
      if (index < shape_.heads) {
        turn(in, row, x, layer.q_norm, layer.has_rotary, head);
        copy_head(head, queries_ + (size_t)row * q_width_ + (size_t)index * dim);
      } else if (index < shape_.heads + shape_.kv_heads) {
        turn(in, row, x, layer.k_norm, layer.has_rotary, head);
        copy_head(head, keys.row(in.write_slots[row], index - shape_.heads));
      } else {
        copy_head(x, values.row(in.write_slots[row], index - shape_.heads - shape_.kv_heads));
      }
    }
  }

  template <class To>
  void copy_head(const float* from, To* to) const {
    for (int i = 0; i < shape_.head_dim; i += 16) store16(to + i, load16(from + i));
  }

  void turn(const StepInput& in, int row, const float* x, const float* norm, bool has_rotary, float* out) const {
    const int dim = shape_.head_dim, half = dim / 2;
    alignas(64) float normed[256];
    if (norm) {
      const float factor = inverse_rms(x, dim);
      for (int i = 0; i < dim; i++) normed[i] = x[i] * factor * norm[i];
      x = normed;
    }
    const float* cos = in.cos + (size_t)row * dim;
    const float* sin = in.sin + (size_t)row * dim;
    for (int i = 0; i < half; i++) {
      out[i] = has_rotary ? x[i] * cos[i] - x[i + half] * sin[i] : x[i];
      out[i + half] = has_rotary ? x[i + half] * cos[i + half] + x[i] * sin[i + half] : x[i + half];
    }
  }

  void attend_all(const StepInput& in, Team& team, int member, const LayerWeights& layer, Pool<T> keys,
                  Pool<T> values) {
    Kernel::begin(16);
    float* scratch = scratch_ + scratch_count_ * member;
    const Range units = team.share(in.num_decode * shape_.kv_heads * num_splits_, member);
    for (int unit = units.lo; unit < units.hi; unit++)
      attend_decode(in, layer, keys, values, unit / (shape_.kv_heads * num_splits_), unit / num_splits_ % shape_.kv_heads,
                    unit % num_splits_, scratch);
    if (in.num_parts == 0) return;
    if constexpr (Kernel::kTiles) {
      gather_parts(in, team, member, keys, values);
      team.barrier();
    }
    attend_parts(in, team, member, layer, keys, values, scratch);
  }

  void attend_decode(const StepInput& in, const LayerWeights& layer, Pool<T> keys, Pool<T> values, int row, int head,
                     int split, float* scratch) {
    const int64_t length = in.decode_lengths[row];
    const int64_t first = layer.window ? std::max<int64_t>(0, length - layer.window) : 0;
    const int64_t lo = std::max<int64_t>(first, (int64_t)split * kSplit);
    const int64_t hi = std::min<int64_t>(length, (int64_t)(split + 1) * kSplit);
    for (int start = 0; start < group_; start += kMaxGroup) {
      const int count = std::min(kMaxGroup, group_ - start), q = head * group_ + start;
      const size_t at = ((size_t)row * num_splits_ + split) * shape_.heads + q;
      Partial result{peaks_ + at, totals_ + at, partials_ + at * shape_.head_dim};
      if (lo >= hi) {
        std::fill(result.peak, result.peak + count, kNever);
        continue;
      }
      const int64_t* slots = in.decode_slots + row * in.decode_width + lo;
      const Query* queries = queries_ + (size_t)row * q_width_ + (size_t)q * shape_.head_dim;
      if constexpr (Kernel::kTiles) {
        attend_tiles(queries, shape_.head_dim, count, slots, int(hi - lo), lo % 16 == 0 && in.block_size % 16 == 0, keys,
                     values, head, shape_.scale, shape_.softcap, scratch, result);
      } else {
        attend(queries, count, slots, int(hi - lo), keys, values, head, shape_.scale, shape_.softcap, scratch, result);
      }
    }
  }

  // Each prefill chunk's context, one stretch of memory a head: keys as rows, values as tiles.
  void gather_parts(const StepInput& in, Team& team, int member, Pool<T> keys, Pool<T> values) {
    size_t start = 0;
    for (int i = 0; i < in.num_parts; i++) {
      const Part& part = in.parts[i];
      const int padded = round_up(part.num_keys, 32), blocks = padded / 32;
      const Range items = team.share(blocks * shape_.kv_heads, member);
      for (int item = items.lo; item < items.hi; item++) {
        const int head = item / blocks, key = item % blocks * 32, count = std::min(32, part.num_keys - key);
        const size_t at = start * kv_width_ + ((size_t)head * padded + key) * shape_.head_dim;
        const T* rows[32];
        for (int k = 0; k < count; k++) {
          const int64_t slot = part.slots[key + k];
          std::memcpy((void*)(gathered_ + at + (size_t)k * shape_.head_dim), keys.row(slot, head), sizeof(T) * shape_.head_dim);
          rows[k] = values.row(slot, head);
        }
        if constexpr (Kernel::kTiles) pack_values(rows, count, shape_.head_dim, value_tiles_ + at);
      }
      start += padded;
    }
  }

  void attend_parts(const StepInput& in, Team& team, int member, const LayerWeights& layer, Pool<T> keys,
                    Pool<T> values, float* scratch) {
    size_t start = 0;
    int turn = 0;
    for (int i = 0; i < in.num_parts; i++) {
      const Part& part = in.parts[i];
      const int step = Kernel::kTiles ? 16 : std::max(1, kTileQueries / group_);
      // later queries see more keys: deal the blocks out one by one, last ones first
      for (int first = (part.num_new - 1) / step * step; first >= 0; first -= step)
        for (int head = 0; head < (Kernel::kTiles ? shape_.heads : shape_.kv_heads); head++)
          if (turn++ % team.size == member) attend_part(part, layer, keys, values, start, first, head, scratch);
      start += round_up(part.num_keys, 32);
    }
  }

  void attend_part(const Part& part, const LayerWeights& layer, Pool<T> keys, Pool<T> values, size_t start, int first,
                   int head, float* scratch) {
    const int dim = shape_.head_dim;
    const Reach reach{(layer.window ? part.lo + part.num_new : part.lo) + first, part.hi + first};
    if constexpr (Kernel::kTiles) {
      const int count = std::min(16, part.num_new - first), kv = head / group_, padded = round_up(part.num_keys, 32);
      const size_t at = start * kv_width_ + (size_t)kv * padded * dim;
      attend_block(queries_ + (size_t)(part.row + first) * q_width_ + (size_t)head * dim, q_width_, count, gathered_ + at,
                   dim, value_tiles_ + at, part.num_keys, dim, shape_.scale, shape_.softcap, reach, scratch,
                   (bf16*)(scratch + (size_t)padded * 16), [&](int q, int col, v16 lanes) {
                     store16(attended_ + (size_t)(part.row + first + q) * q_width_ + (size_t)head * dim + col, lanes);
                   });
    } else {
      const int count = std::min(std::max(1, kTileQueries / group_), part.num_new - first);
      attend_rows(part, part.row + first, count, keys, values, reach, head, scratch);
    }
  }

  // `count` rows with all their query heads of one key/value head. Keys begin at a multiple of 16, so that lanes, and
  // with them a row's bits, do not depend on the rows beside it.
  void attend_rows(const Part& part, int row, int count, Pool<T> keys, Pool<T> values, Reach reach, int head,
                   float* scratch) {
    const int dim = shape_.head_dim, width = group_ * dim, queries = count * group_;
    const int first = *std::min_element(reach.lo, reach.lo + count) / 16 * 16;
    const int num_keys = *std::max_element(reach.hi, reach.hi + count) + 1 - first;
    float* packed = scratch + (size_t)queries * round_up(num_keys, 16);
    float* out = packed + (size_t)queries * dim;
    float* columns = out + (size_t)queries * dim;
    std::vector<float> peaks(2 * queries);
    std::vector<int32_t> lo(queries), hi(queries);
    for (int r = 0; r < count; r++) {
      std::memcpy(packed + (size_t)r * width, queries_ + (size_t)(row + r) * q_width_ + (size_t)head * width,
                  sizeof(float) * width);
      std::fill_n(lo.begin() + r * group_, group_, reach.lo[r] - first);
      std::fill_n(hi.begin() + r * group_, group_, reach.hi[r] - first);
    }
    attend((const float*)packed, queries, part.slots + first, num_keys, keys, values, head, shape_.scale, shape_.softcap,
           scratch, Partial{peaks.data(), peaks.data() + queries, out}, Reach{lo.data(), hi.data()}, columns);
    for (int q = 0; q < queries; q++) {
      float* to = attended_ + (size_t)(row + q / group_) * q_width_ + (size_t)head * width + (q % group_) * dim;
      for (int d = 0; d < dim; d += 16) store16(to + d, load16(out + (size_t)q * dim + d) / peaks[queries + q]);
    }
  }

  const Act* pack_attended(const StepInput& in, Team& team, int member) {
    return prepare(in, team, member, [&](Act* base, int row) {
      for (int head = 0; head < shape_.heads; head++) {
        const int col = head * shape_.head_dim;
        if (row < in.num_decode) {
          merge_splits(base, row, head);
        } else {
          for (int d = 0; d < shape_.head_dim; d += 16)
            store16(Kernel::act(base, q_width_, row, col + d), load16(attended_ + (size_t)row * q_width_ + col + d));
        }
      }
    });
  }

  void merge_splits(Act* base, int row, int head) {
    float peak = kNever, total = 0;
    for (int split = 0; split < num_splits_; split++) peak = std::max(peak, peaks_[unit_at(row, split, head)]);
    alignas(64) float sums[256] = {};
    for (int split = 0; split < num_splits_; split++) {
      const size_t at = unit_at(row, split, head);
      if (peaks_[at] == kNever) continue;
      const float factor = std::exp(peaks_[at] - peak);
      total += factor * totals_[at];
      for (int d = 0; d < shape_.head_dim; d += 16)
        store16(sums + d, load16(sums + d) + factor * load16(partials_ + at * shape_.head_dim + d));
    }
    for (int d = 0; d < shape_.head_dim; d += 16)
      store16(Kernel::act(base, q_width_, row, head * shape_.head_dim + d), load16(sums + d) / total);
  }

  size_t unit_at(int row, int split, int head) const { return ((size_t)row * num_splits_ + split) * shape_.heads + head; }

  void store_hidden(const StepInput& in, Team& team, int member) {
    const Range rows = team.share(in.rows, member);
    for (int row = rows.lo; row < rows.hi; row++) {
      const float* x = hidden_ + (size_t)row * shape_.hidden;
      const float factor = inverse_rms(x, shape_.hidden);
      for (int i = 0; i < shape_.hidden; i += 16)
        store16((T*)in.out + (size_t)row * shape_.hidden + i, load16(x + i) * factor * load16(shape_.final_norm + i));
    }
    Kernel::end();
  }

  const DecoderShape shape_;
  const std::vector<LayerWeights> layers_;
  int group_, q_width_, kv_width_, num_splits_ = 1;
  size_t act_count_ = 0, scratch_count_ = 0;
  float *hidden_, *qkv_, *attended_, *peaks_, *totals_, *partials_, *scratch_;
  Query* queries_;
  Act *inner_, *act_;
  T *gathered_ = nullptr, *value_tiles_ = nullptr;
  Buffer<float> hidden_buffer_, qkv_buffer_, attended_buffer_, peak_buffer_, total_buffer_, partial_buffer_,
      scratch_buffer_;
  Buffer<Query> query_buffer_;
  Buffer<Act> inner_buffer_, act_buffer_;
  Buffer<T> gathered_buffer_, value_buffer_;
};

}  // namespace triptych
