// One layer of a vision tower (SigLIP and CLIP kinds) in one parallel region: LayerNorm, QKV, attention over each picture,
// projection, LayerNorm, two products with an activation between.
//
// The stock modules keep the loop over layers, so a tower can still pause at a layer's edge.
#pragma once

#include <omp.h>

#include "panels.h"
#include "team.h"
#include "tiles.h"

namespace triptych {

extern "C" {

struct EncoderWeights {
  const float *norm1, *norm1_bias, *norm2, *norm2_bias;
  const void *qkv, *out, *fc1, *fc2;  // packed
  const float *qkv_bias, *out_bias, *fc1_bias, *fc2_bias;
};

struct EncoderShape {  // head_dim and inner as packed: filled up with zeros to what the kernel takes
  int32_t hidden, heads, head_dim, inner, activation;
  float eps, scale;
};
}

class EncoderBase {
 public:
  virtual ~EncoderBase() = default;

  // x, out: [pictures * tokens][hidden], of the model's type
  virtual void layer(const EncoderWeights& weights, const void* x, void* out, int pictures, int tokens, int threads) = 0;
};

template <class Kernel>
class Encoder final : public EncoderBase {
  using T = typename Kernel::Store;
  using Act = typename Kernel::Act;

 public:
  explicit Encoder(const EncoderShape& shape) : shape_(shape), width_(shape.heads * shape.head_dim) {}

  void layer(const EncoderWeights& weights, const void* x, void* out, int pictures, int tokens, int threads) override {
    rows_ = pictures * tokens;
    attention_.reserve(pictures, tokens, shape_.heads, shape_.head_dim);
    act_ = act_buffer_.get(Kernel::act_count(rows_, std::max(shape_.hidden, width_)));
    inner_ = inner_buffer_.get(Kernel::act_count(rows_, shape_.inner));
    qkv_ = qkv_buffer_.get((size_t)(rows_ + 32) * 3 * width_);
    hidden_ = hidden_buffer_.get((size_t)rows_ * shape_.hidden);
    scratch_count_ = std::max(Kernel::kSums, attention_.scratch_count());
    scratch_ = scratch_buffer_.get(scratch_count_ * threads);
    Team team(threads);
#pragma omp parallel num_threads(threads)
    run(weights, (const T*)x, (T*)out, team, omp_get_thread_num());
  }

 private:
  void run(const EncoderWeights& w, const T* x, T* out, Team& team, int member) {
    const int hidden = shape_.hidden;
    Kernel::begin(32);
    normalise(x, w.norm1, w.norm1_bias, team, member);
    team.barrier();
    product(act_, hidden, w.qkv, w.qkv_bias, 3 * width_, team, member,
            [&](int row, int col, v16 lanes) { store16(qkv_ + (size_t)row * 3 * width_ + col, lanes); });
    team.barrier();
    attend_all(team, member);
    team.barrier();
    product(act_, width_, w.out, w.out_bias, hidden, team, member, [&](int row, int col, v16 lanes) {
      const size_t at = (size_t)row * hidden + col;
      store16(hidden_ + at, load16(x + at) + lanes);
    });
    team.barrier();
    normalise(hidden_, w.norm2, w.norm2_bias, team, member);
    team.barrier();
    product(act_, hidden, w.fc1, w.fc1_bias, shape_.inner, team, member, [&](int row, int col, v16 lanes) {
      Kernel::put(inner_, shape_.inner, row, col, activate(lanes, shape_.activation));
    });
    team.barrier();
    product(inner_, shape_.inner, w.fc2, w.fc2_bias, hidden, team, member, [&](int row, int col, v16 lanes) {
      const size_t at = (size_t)row * hidden + col;
      store16(out + at, load16(hidden_ + at) + lanes);
    });
    Kernel::end();
  }

  template <class X>
  void normalise(const X* x, const float* weight, const float* bias, Team& team, int member) {
    const Range rows = team.share(rows_, member);
    const int hidden = shape_.hidden;
    for (int row = rows.lo; row < rows.hi; row++) {
      const X* from = x + (size_t)row * hidden;
      v16 total = {}, squares = {};
      for (int i = 0; i < hidden; i += 16) total += load16(from + i);
      const float mean = sum(total) / hidden;
      for (int i = 0; i < hidden; i += 16) {
        const v16 centred = load16(from + i) - mean;
        squares += centred * centred;
      }
      const float factor = 1.0f / std::sqrt(sum(squares) / hidden + shape_.eps);
      for (int i = 0; i < hidden; i += 16)
        Kernel::put(act_, hidden, row, i, (load16(from + i) - mean) * factor * load16(weight + i) + load16(bias + i));
    }
  }

  // emit(row, column, 16 lanes) takes the results.
  template <class Emit>
  void product(const Act* a, int k, const void* weight, const float* bias, int columns, Team& team, int member,
               Emit emit) {
    const auto block = [&](int row, int count, int col, const float* c) {
      for (int r = 0; r < count; r++)
        for (int i = 0; i < Kernel::kColumns; i += 16)
          emit(row + r, col + i, load16(c + r * Kernel::kColumns + i) + load16(bias + col + i));
    };
    float* scratch = scratch_ + scratch_count_ * member;
    team.take_turns(Kernel::num_units(rows_, columns, team.size), [&](int index) {
      Kernel::unit(a, rows_, k, (const typename Kernel::Weight*)weight, columns, team.size, index, scratch, block);
    });
  }

  void attend_all(Team& team, int member) {
    const Range packs = team.share(attention_.num_packs(), member);
    for (int index = packs.lo; index < packs.hi; index++) attention_.pack(qkv_, index);
    team.barrier();
    float* scratch = scratch_ + scratch_count_ * member;
    team.take_turns(attention_.num_units(), [&](int index) {
      attention_.attend(qkv_, index, shape_.scale, scratch,
                        [&](int row, int col, v16 lanes) { Kernel::put(act_, width_, row, col, lanes); });
    });
  }

  const EncoderShape shape_;
  const int width_;  // of all heads together
  typename Kernel::Attention attention_;
  int rows_ = 0;
  size_t scratch_count_ = 0;
  Act *act_, *inner_, *qkv_;
  float *hidden_, *scratch_;
  Buffer<Act> act_buffer_, inner_buffer_, qkv_buffer_;
  Buffer<float> hidden_buffer_, scratch_buffer_;
};

}  // namespace triptych
