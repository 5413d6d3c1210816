// One layer of a vision tower (SigLIP and CLIP kinds) in one parallel region: LayerNorm, QKV, attention over each picture,
// projection, LayerNorm, two products with an activation between. Needs AMX; input and output are bfloat16.
//
// The stock modules keep the loop over layers, so a tower can still pause at a layer's edge.
#pragma once

#include "decoder.h"

#ifdef __AMX_BF16__

namespace triptych {

extern "C" {

struct EncoderWeights {
  const float *norm1, *norm1_bias, *norm2, *norm2_bias;
  const void *qkv, *out, *fc1, *fc2;  // packed
  const float *qkv_bias, *out_bias, *fc1_bias, *fc2_bias;
};

struct EncoderShape {
  int32_t hidden, heads, head_dim, inner, activation;
  float eps, scale;
};
}

class Encoder {
 public:
  explicit Encoder(const EncoderShape& shape) : shape_(shape) {}

  // x, out: [pictures * tokens][hidden]
  void layer(const EncoderWeights& weights, const bf16* x, bf16* out, int pictures, int tokens, int threads) {
    rows_ = pictures * tokens, tokens_ = tokens, blocks_ = (tokens + 31) / 32;
    const size_t padded = (size_t)blocks_ * 32;
    act_ = act_buffer_.get(Amx::act_count(rows_, shape_.hidden));
    inner_ = inner_buffer_.get(Amx::act_count(rows_, shape_.inner));
    qkv_ = qkv_buffer_.get((size_t)(rows_ + 32) * 3 * shape_.hidden);
    hidden_ = hidden_buffer_.get((size_t)rows_ * shape_.hidden);
    value_tiles_ = value_buffer_.get((size_t)pictures * shape_.heads * padded * shape_.head_dim);
    scratch_count_ = padded * 24;
    scratch_ = scratch_buffer_.get(scratch_count_ * threads);
    Team team(threads);
#pragma omp parallel num_threads(threads)
    run(weights, x, out, pictures, team, omp_get_thread_num());
  }

 private:
  void run(const EncoderWeights& w, const bf16* x, bf16* out, int pictures, Team& team, int member) {
    const int hidden = shape_.hidden;
    Amx::begin(32);
    normalise(x, w.norm1, w.norm1_bias, team, member);
    team.barrier();
    product(act_, hidden, w.qkv, 3 * hidden, team, member, [&](int row, int col, const float* c) {
      bf16* to = qkv_ + (size_t)row * 3 * hidden + col;
      store16(to, load16(c) + load16(w.qkv_bias + col));
      store16(to + 16, load16(c + 16) + load16(w.qkv_bias + col + 16));
    });
    team.barrier();
    pack_all_values(pictures, team, member);
    team.barrier();
    attend_all(pictures, team, member);
    team.barrier();
    product(act_, hidden, w.out, hidden, team, member, [&](int row, int col, const float* c) {
      for (int i = 0; i < kGroup; i += 16)
        store16(hidden_ + (size_t)row * hidden + col + i,
                load16(x + (size_t)row * hidden + col + i) + load16(c + i) + load16(w.out_bias + col + i));
    });
    team.barrier();
    normalise(hidden_, w.norm2, w.norm2_bias, team, member);
    team.barrier();
    product(act_, hidden, w.fc1, shape_.inner, team, member, [&](int row, int col, const float* c) {
      for (int i = 0; i < kGroup; i += 16)
        store16(Amx::act(inner_, shape_.inner, row, col + i),
                activate(load16(c + i) + load16(w.fc1_bias + col + i), shape_.activation));
    });
    team.barrier();
    product(inner_, shape_.inner, w.fc2, hidden, team, member, [&](int row, int col, const float* c) {
      for (int i = 0; i < kGroup; i += 16)
        store16(out + (size_t)row * hidden + col + i,
                load16(hidden_ + (size_t)row * hidden + col + i) + load16(c + i) + load16(w.fc2_bias + col + i));
    });
    Amx::end();
  }

  template <class T>
  void normalise(const T* x, const float* weight, const float* bias, Team& team, int member) {
    const Range rows = team.share(rows_, member);
    const int hidden = shape_.hidden;
    for (int row = rows.lo; row < rows.hi; row++) {
      const T* from = x + (size_t)row * hidden;
      v16 total = {}, squares = {};
      for (int i = 0; i < hidden; i += 16) total += load16(from + i);
      const float mean = sum(total) / hidden;
      for (int i = 0; i < hidden; i += 16) {
        const v16 centred = load16(from + i) - mean;
        squares += centred * centred;
      }
      const float factor = 1.0f / std::sqrt(sum(squares) / hidden + shape_.eps);
      for (int i = 0; i < hidden; i += 16)
        store16(Amx::act(act_, hidden, row, i), (load16(from + i) - mean) * factor * load16(weight + i) + load16(bias + i));
    }
  }

  template <class Emit>
  void product(const bf16* a, int k, const void* weight, int columns, Team& team, int member, Emit emit) {
    const Range groups = team.share(columns / kGroup, member);
    Amx::many_rows(a, rows_, k, (const bf16*)weight, groups.lo, groups.hi,
                   [&](int row, int count, int col, const float* c) {
                     for (int r = 0; r < count; r++) emit(row + r, col, c + r * kGroup);
                   });
  }

  void pack_all_values(int pictures, Team& team, int member) {
    const int dim = shape_.head_dim, stride = 3 * shape_.hidden;
    const Range items = team.share(pictures * shape_.heads * blocks_, member);
    for (int item = items.lo; item < items.hi; item++) {
      const int block = item % blocks_, head = item / blocks_ % shape_.heads, picture = item / blocks_ / shape_.heads;
      const int first = block * 32, count = std::min(32, tokens_ - first);
      const bf16* values = qkv_ + ((size_t)picture * tokens_ + first) * stride + 2 * shape_.hidden + head * dim;
      const bf16* rows[32];
      for (int i = 0; i < count; i++) rows[i] = values + (size_t)i * stride;
      pack_values(rows, count, dim, value_tiles_ + (size_t)item * 32 * dim);
    }
  }

  void attend_all(int pictures, Team& team, int member) {
    const int dim = shape_.head_dim, stride = 3 * shape_.hidden, queries = (tokens_ + 15) / 16;
    float* scratch = scratch_ + scratch_count_ * member;
    bf16* weights = (bf16*)(scratch + (size_t)blocks_ * 32 * 16);
    const Range units = team.share(pictures * shape_.heads * queries, member);
    for (int unit = units.lo; unit < units.hi; unit++) {
      const int first = unit % queries * 16, lane = unit / queries, head = lane % shape_.heads;
      const int base = lane / shape_.heads * tokens_;
      const bf16* own = qkv_ + (size_t)base * stride + head * dim;
      attend_block(own + (size_t)first * stride, stride, std::min(16, tokens_ - first), own + shape_.hidden, stride,
                   value_tiles_ + (size_t)lane * blocks_ * 32 * dim, tokens_, dim, shape_.scale, 0, Reach{}, scratch,
                   weights, [&](int q, int col, v16 lanes) {
                     store16(Amx::act(act_, shape_.hidden, base + first + q, head * dim + col), lanes);
                   });
    }
  }

  const EncoderShape shape_;
  int rows_ = 0, tokens_ = 0, blocks_ = 0;
  size_t scratch_count_ = 0;
  bf16 *act_, *inner_, *qkv_, *value_tiles_;
  float *hidden_, *scratch_;
  Buffer<bf16> act_buffer_, inner_buffer_, qkv_buffer_, value_buffer_;
  Buffer<float> hidden_buffer_, scratch_buffer_;
};

}  // namespace triptych

#endif
