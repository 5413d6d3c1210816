// A tower's attention with AMX tiles, and where its kernel differs from the decoder's.
#pragma once

#include "attention.h"
#include "buffer.h"

#ifdef __AMX_BF16__

namespace triptych {

struct Tiles : Amx {
  static constexpr int kColumns = kGroup;
  static constexpr size_t kSums = 0;

  static void put(bf16* base, int k, int row, int col, v16 lanes) { store16(act(base, k, row, col), lanes); }

  static int num_units(int, int columns, int) { return columns / kGroup; }

  template <class Emit>
  static void unit(const bf16* a, int rows, int k, const bf16* weight, int, int, int index, float*, Emit emit) {
    Amx::many_rows(a, rows, k, weight, index, index + 1, emit);
  }

  // Attention of each head over each picture: all values are packed, then units of 16 queries are attended.
  class Attention {
   public:
    void reserve(int pictures, int tokens, int heads, int dim) {
      tokens_ = tokens, blocks_ = (tokens + 31) / 32, heads_ = heads, dim_ = dim, lanes_ = pictures * heads;
      values_ = buffer_.get((size_t)lanes_ * blocks_ * 32 * dim);
    }

    size_t scratch_count() const { return (size_t)blocks_ * 32 * 24; }
    int num_packs() const { return lanes_ * blocks_; }
    int num_units() const { return lanes_ * ((tokens_ + 15) / 16); }

    void pack(const bf16* qkv, int index) {
      const int stride = 3 * heads_ * dim_, lane = index / blocks_, first = index % blocks_ * 32;
      const int count = std::min(32, tokens_ - first);
      const bf16* values = qkv + ((size_t)lane / heads_ * tokens_ + first) * stride + (2 * heads_ + lane % heads_) * dim_;
      const bf16* rows[32];
      for (int i = 0; i < count; i++) rows[i] = values + (size_t)i * stride;
      pack_values(rows, count, dim_, values_ + (size_t)index * 32 * dim_);
    }

    template <class Put>
    void attend(const bf16* qkv, int index, float scale, float* scratch, Put put) {
      const int queries = (tokens_ + 15) / 16, stride = 3 * heads_ * dim_;
      const int first = index % queries * 16, lane = index / queries, head = lane % heads_;
      const int base = lane / heads_ * tokens_;
      const bf16* own = qkv + (size_t)base * stride + head * dim_;
      attend_block(own + (size_t)first * stride, stride, std::min(16, tokens_ - first), own + heads_ * dim_, stride,
                   values_ + (size_t)lane * blocks_ * 32 * dim_, tokens_, dim_, scale, 0, Reach{}, scratch,
                   (bf16*)(scratch + (size_t)blocks_ * 32 * 16),
                   [&](int q, int col, v16 lanes) { put(base + first + q, head * dim_ + col, lanes); });
    }

   private:
    int tokens_ = 0, blocks_ = 0, heads_ = 0, dim_ = 0, lanes_ = 0;
    bf16* values_;
    Buffer<bf16> buffer_;
  };
};

}  // namespace triptych

#endif
