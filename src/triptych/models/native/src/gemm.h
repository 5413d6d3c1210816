// Products of a few rows of activations with a prepacked weight: C[M, N] = A[M, K] W[N, K]^T, accumulated in float.
//
// A weight is cut into groups of 32 output columns, each one contiguous stream (pack.py):
//   float32   [N/32][K][32]
//   bfloat16  [N/32][K/32][2][16][16][2]: tiles of 16 pairs of inputs by 16 columns, the layout of AMX's second operand
// Every kernel accumulates a row in the same order whatever the number of rows, so a row's result does not depend on who
// shares the batch.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace triptych {

constexpr int kGroup = 32;  // output columns of one group

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

#ifdef __AVX512F__
constexpr int kRows = 12;  // whose sums stay in registers beside 16 columns of a weight
#else
constexpr int kRows = 6;
#endif

// Two neighbours along a sum, the first in the lower half: with AVX512-BF16 one instruction multiplies and adds both.
struct bf16x2 {
  bf16 first, second;
};

inline v16 columns_of(const float* w) { return load16(w); }
inline void multiply_add(v16& sums, const float& a, v16 columns) { sums += a * columns; }
#ifdef __AVX512BF16__
inline u16x32 columns_of(const bf16x2* w) { return load<u16x32>(w); }
inline void multiply_add(v16& sums, const bf16x2& a, u16x32 columns) {
  sums = (v16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(load<int32_t>(&a)), (__m512bh)columns);
}
#endif

// c[R][16] = (adds ? c : 0) + a w, where row r of a has its unit i at a[r * row_step + i * step] and w is [k][16] units:
// single floats or pairs. Inlined by force: with the steps known, and four turns unrolled, GCC 12's loop is a sixth faster.
// With kFetches, `ahead` is fetched from memory meanwhile, that many bytes a turn.
template <int R, bool kFetches = false, class U>
__attribute__((always_inline)) inline void panel_product(const U* a, size_t row_step, size_t step, const U* w, int k,
                                                         float* c, size_t stride, bool adds,
                                                         const char* ahead = nullptr, int ahead_step = 0) {
  v16 acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) acc[r] = adds ? load16(c + r * stride) : v16{};
#pragma GCC unroll 4
  for (int i = 0; i < k; i++, a += step, w += 16) {
    if constexpr (kFetches) __builtin_prefetch(ahead + (size_t)i * ahead_step, 0, 2);
    const auto columns = columns_of(w);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) multiply_add(acc[r], a[r * row_step], columns);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) store16(c + r * stride, acc[r]);
}

// Activations as rows, in a kernel without tiles.
template <class A>
struct Rows {
  using Act = A;
  using Query = float;
  static constexpr bool kTiles = false;

  static size_t act_count(int rows, int k) { return (size_t)rows * k; }
  static A* act(A* base, int k, int row, int col) { return base + (size_t)row * k + col; }
  static void begin(int) {}
  static void end() {}

 protected:
  // call(std::integral_constant<int, rows>): a product is compiled for each number of rows up to R.
  template <int R, class Call>
  __attribute__((always_inline)) static inline void with_rows(int rows, Call call) {
    if (rows == R)
      call(std::integral_constant<int, R>{});
    else if constexpr (R > 1)
      with_rows<R - 1>(rows, call);
  }
};

// Rows of float, for any CPU. `W` is the weight's type, `S` that of embeddings, keys, values and results.
template <class W, class S = W>
struct Portable : Rows<float> {
  using Weight = W;
  using Store = S;

  // Calls emit(first row, rows, first column, float[rows][32]) for each block of the groups [lo, hi).
  template <class Emit>
  static void gemm(const float* a, int rows, int k, const W* weight, int lo, int hi, Emit emit) {
    for (int group = lo; group < hi; group++) {
      const W* w = weight + (size_t)group * k * kGroup;
      for (int row = 0; row < rows; row += kStretchRows)
        many_rows(a, row, std::min(kStretchRows, rows - row), k, w, group, emit);
    }
  }

 private:
  static constexpr int kStretchRows = 96, kStretchDepth = 96;

  // The weight is unpacked, a stretch of its depth at a time, once for all rows, which take it in blocks of nearly the same
  // size; what comes next in memory is fetched meanwhile.
  template <class Emit>
  static void many_rows(const float* a, int row, int count, int k, const W* w, int group, Emit emit) {
    alignas(64) float panels[2][kStretchDepth * 16], sums[kStretchRows * kGroup];
    const int blocks = (count + kRows - 1) / kRows;
    const auto start = [&](int block) { return block * count / blocks; };
    for (int depth = 0; depth < k; depth += kStretchDepth, w += kStretchDepth * kGroup) {
      const int steps = std::min(kStretchDepth, k - depth);
      unpack(w, steps, panels);
      const Ahead ahead{(const char*)(w + (size_t)steps * kGroup), std::max<int>(1, kGroup * sizeof(W) / (2 * blocks))};
      for (int block = 0; block < blocks; block++)
        for (int half = 0; half < 2; half++)
          with_rows<kRows>(start(block + 1) - start(block), [&](auto count) {
            const Ahead next = ahead.of(2 * block + half, steps);
            panel_product<count(), true>(a + (size_t)(row + start(block)) * k + depth, k, 1, (const float*)panels[half],
                                         steps, sums + start(block) * kGroup + 16 * half, kGroup, depth > 0, next.base,
                                         next.step);
          });
    }
    for (int block = 0; block < blocks; block++)
      emit(row + start(block), start(block + 1) - start(block), group * kGroup, sums + start(block) * kGroup);
  }

  // What follows in memory, cut for the products of one stretch: `step` bytes for each turn of a product.
  struct Ahead {
    const char* base;
    int step;
    Ahead of(int product, int turns) const { return {base + (size_t)product * turns * step, step}; }
  };

  static void unpack(const float* w, int steps, float (&panels)[2][kStretchDepth * 16]) {
    for (int i = 0; i < steps; i++)
      for (int half = 0; half < 2; half++) store16(panels[half] + 16 * i, load16(w + (size_t)i * kGroup + 16 * half));
  }

  static void unpack(const bf16* w, int steps, float (&panels)[2][kStretchDepth * 16]) {
    for (int i = 0; i < steps; i += 32)
      for (int half = 0; half < 2; half++, w += 512)
        for (int pair = 0; pair < 16; pair++) {
          const u16x32 both = load<u16x32>(w + pair * 32);
          store16(panels[half] + (i + 2 * pair) * 16, as_floats(both << 16));
          store16(panels[half] + (i + 2 * pair + 1) * 16, as_floats(both & 0xffff0000u));
        }
  }
};

#ifdef __AVX512BF16__

// Rows of bfloat16. The tiles' layout of a weight is also that of pairs: it is used as it comes from memory.
struct Pairs : Rows<bf16> {
  using Weight = bf16;
  using Store = bf16;

  template <class Emit>
  static void gemm(const bf16* a, int rows, int k, const bf16* weight, int lo, int hi, Emit emit) {
    alignas(64) float sums[kRows * kGroup];
    const int blocks = (rows + kRows - 1) / kRows;
    for (int group = lo; group < hi; group++) {
      const bf16* w = weight + (size_t)group * k * kGroup;
      for (int block = 0; block < blocks; block++) {
        const int row = block * rows / blocks, count = (block + 1) * rows / blocks - row;
        with_rows<kRows>(count, [&](auto rows) {
          product<rows()>((const bf16x2*)(a + (size_t)row * k), k / 2, (const bf16x2*)w, sums, Ahead(w, k, block, blocks));
        });
        emit(row, count, group * kGroup, sums);
      }
    }
  }

 private:
  static constexpr int kNear = 8192;  // bytes that a lone block fetches ahead of their use

  // What follows in memory: what a lone block needs next, else a slice of the next group.
  struct Ahead {
    Ahead(const bf16* w, int k, int block, int blocks)
        : lines((32 + blocks - 1) / blocks), base((const char*)w + (blocks == 1 ? kNear : (size_t)k * (kGroup * 2 + 2 * lines * block))) {}
    void fetch(int step) const {
      for (int line = 0; line < lines; line++) __builtin_prefetch(base + (size_t)(step * lines + line) * 64, 0, 2);
    }
    const int lines;  // for each step of 32 elements
    const char* base;
  };

  template <int R>
  static void product(const bf16x2* a, int k, const bf16x2* w, float* c, Ahead ahead) {
    v16 left[R] = {}, right[R] = {};
    for (int i = 0; i < k; i += 16, w += 2 * 256) {
      ahead.fetch(i / 16);
#pragma GCC unroll 4
      for (int pair = 0; pair < 16; pair++) {
        const auto left_columns = columns_of(w + pair * 16), right_columns = columns_of(w + 256 + pair * 16);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          multiply_add(left[r], a[(size_t)r * k + i + pair], left_columns);
          multiply_add(right[r], a[(size_t)r * k + i + pair], right_columns);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store16(c + r * kGroup, left[r]), store16(c + r * kGroup + 16, right[r]);
  }
};

#endif

#ifdef __AMX_BF16__

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// The intrinsic of GCC 12 declares too small an input, so the configuration must be forced into memory first.
inline void configure_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

// `rows` of the first operand and of the results; the second operand always has 16.
inline TileConfig tile_shapes(int rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = tile < 6 ? rows : 16;
  }
  return config;
}

// Activations as tiles of 16 rows by 32 columns of bfloat16, each 1 KiB. Needs AMX, and leave from the kernel.
struct Amx {
  using Weight = bf16;
  using Store = bf16;
  using Act = bf16;
  using Query = bf16;
  static constexpr bool kTiles = true;

  static bool request_permission() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }

  static size_t act_count(int rows, int k) { return (size_t)round_up(rows, 32) * k; }

  static bf16* act(bf16* base, int k, int row, int col) {
    return base + ((size_t)(row / 16) * (k / 32) + col / 32) * 512 + (row % 16) * 32 + col % 32;
  }

  static void begin(int rows) { configure_tiles(tile_shapes(rows < 16 ? rows : 16)); }
  static void end() { _tile_release(); }

  template <class Emit>
  static void gemm(const bf16* a, int rows, int k, const bf16* weight, int lo, int hi, Emit emit) {
    if (rows <= 16)
      few_rows(a, rows, k, weight, lo, hi, emit);
    else
      many_rows(a, rows, k, weight, lo, hi, emit);
  }

 private:
  static constexpr int kCachedBytes = 1 << 20;
  static constexpr int kAhead = 8192;  // bytes the weight's stream is fetched ahead of its use

  template <class Emit>
  static void few_rows(const bf16* a, int rows, int k, const bf16* weight, int lo, int hi, Emit emit) {
    alignas(64) float out[16 * kGroup];
    const int steps = k / 32;
    const bf16* w = weight + (size_t)lo * k * kGroup;
    for (int group = lo; group < hi; group++) {
      _tile_zero(0);
      _tile_zero(1);
      for (int step = 0; step < steps; step++, w += 1024) {
        for (int line = 0; line < 2048; line += 64) _mm_prefetch((const char*)w + kAhead + line, _MM_HINT_T0);
        _tile_loadd(4, a + step * 512, 64);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_stored(0, out, kGroup * 4);
      _tile_stored(1, out + 16, kGroup * 4);
      emit(0, rows, group * kGroup, out);
    }
  }

 public:
  // Rows are cut so that a stretch of activations stays in the second-level cache while the weight passes by; the next
  // group of the weight is fetched, a slice for each block of rows, while this one is used.
  template <class Emit>
  static void many_rows(const bf16* a, int rows, int k, const bf16* weight, int lo, int hi, Emit emit) {
    const int stretch = std::max(32, kCachedBytes / (k * 2) / 32 * 32);
    for (int first = 0; first < rows; first += stretch) {
      const int last = std::min(rows, first + stretch), blocks = (last - first + 31) / 32;
      for (int group = lo; group < hi; group++) {
        const bf16* w = weight + (size_t)group * k * kGroup;
        const int slice = (k / 32 + blocks - 1) / blocks;  // of the next group, in steps
        for (int block = 0; block < blocks; block++) {
          const int row = first + 32 * block, ahead = block * slice;
          tile_block(a + (size_t)row * k, k, w, ahead, std::min(k / 32, ahead + slice), row, rows - row, group, emit);
        }
      }
    }
  }

 private:
  template <class Emit>
  static void tile_block(const bf16* top, int k, const bf16* w, int ahead, int ahead_end, int row, int left, int group,
                         Emit emit) {
    alignas(64) float out[32 * kGroup];
    const bf16* bottom = top + (size_t)16 * k;
    const bf16* next = w + (size_t)k * kGroup;
    const int steps = k / 32;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < steps; step++, w += 1024) {
      if (ahead < ahead_end) {
        for (int line = 0; line < 2048; line += 64)
          _mm_prefetch((const char*)(next + (size_t)ahead * 1024) + line, _MM_HINT_T1);
        ahead++;
      }
      _tile_loadd(4, top + step * 512, 64);
      _tile_loadd(6, w, 64);
      _tile_loadd(7, w + 512, 64);
      _tile_loadd(5, bottom + step * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, kGroup * 4);
    _tile_stored(1, out + 16, kGroup * 4);
    _tile_stored(2, out + 16 * kGroup, kGroup * 4);
    _tile_stored(3, out + 16 * kGroup + 16, kGroup * 4);
    emit(row, std::min(left, 32), group * kGroup, out);
  }
};

#endif

}  // namespace triptych
