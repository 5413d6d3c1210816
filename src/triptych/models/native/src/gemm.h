// Products of a few rows of activations with a prepacked weight: C[M, N] = A[M, K] W[N, K]^T, accumulated in float.
//
// A weight is cut into groups of 32 output columns, each one contiguous stream (pack.py):
//   float32   [N/32][K][32]
//   bfloat16  [N/32][K/32][2][16][16][2]: tiles of 16 pairs of inputs by 16 columns, the layout of AMX's second operand
// Every kernel accumulates a row in the same order whatever the number of rows, so a row's result does not depend on who
// shares the batch.
#pragma once

#include <algorithm>

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

// c[R][16] = (adds ? c : 0) + a w, where row r of a has its element i at a[r * row_step + i * step] and w is [k][16].
// Inlined by force: with the steps known, and four turns unrolled, GCC 12's loop is a sixth faster.
template <int R>
__attribute__((always_inline)) inline void panel_product(const float* a, size_t row_step, size_t step, const float* w,
                                                         int k, float* c, size_t stride, bool adds) {
  v16 acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) acc[r] = adds ? load16(c + r * stride) : v16{};
#pragma GCC unroll 4
  for (int i = 0; i < k; i++, a += step, w += 16) {
    const v16 lanes = load16(w);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] += a[r * row_step] * lanes;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) store16(c + r * stride, acc[r]);
}

// Activations as rows of float, for any CPU. `W` is the weight's type, `S` that of embeddings, keys, values and results.
template <class W, class S = W>
struct Portable {
  using Weight = W;
  using Store = S;
  using Act = float;
  static constexpr bool kTiles = false;

  static size_t act_count(int rows, int k) { return (size_t)rows * k; }
  static float* act(float* base, int k, int row, int col) { return base + (size_t)row * k + col; }
  static void begin(int) {}
  static void end() {}

  // Calls emit(first row, rows, first column, float[rows][32]) for each block of the groups [lo, hi).
  template <class Emit>
  static void gemm(const float* a, int rows, int k, const W* weight, int lo, int hi, Emit emit) {
    for (int group = lo; group < hi; group++) {
      const W* w = weight + (size_t)group * k * kGroup;
      int row = 0;
      while (rows - row >= kRows) {
        const int count = std::min((rows - row) / kRows * kRows, kStretchRows);
        many_rows(a, row, count, k, w, group, emit);
        row += count;
      }
      for (; row + 2 <= rows; row += 2) block<2>(a, row, k, w, group, emit);
      if (row < rows) block<1>(a, row, k, w, group, emit);
    }
  }

 private:
  static constexpr int kStretchRows = 96, kStretchDepth = 384;

  // `count` rows, a multiple of kRows: sixteen columns of the weight are unpacked once for all of them.
  template <class Emit>
  static void many_rows(const float* a, int row, int count, int k, const W* w, int group, Emit emit) {
    alignas(64) float panel[kStretchDepth * 16], sums[kStretchRows * kGroup];
    for (int half = 0; half < 2; half++)
      for (int depth = 0; depth < k; depth += kStretchDepth) {
        const int steps = std::min(kStretchDepth, k - depth);
        unpack(w + (size_t)depth * kGroup, half, steps, panel);
        for (int r = 0; r < count; r += kRows)
          panel_product<kRows>(a + (size_t)(row + r) * k + depth, k, 1, panel, steps, sums + r * kGroup + 16 * half, kGroup,
                               depth > 0);
      }
    for (int r = 0; r < count; r += kRows) emit(row + r, kRows, group * kGroup, sums + r * kGroup);
  }

  static void unpack(const float* w, int half, int steps, float* panel) {
    for (int i = 0; i < steps; i++) store16(panel + 16 * i, load16(w + (size_t)i * kGroup + 16 * half));
  }

  static void unpack(const bf16* w, int half, int steps, float* panel) {
    w += 512 * half;
    for (int i = 0; i < steps; i += 32, w += 1024)
      for (int pair = 0; pair < 16; pair++) {
        const u16x32 both = load<u16x32>(w + pair * 32);
        store16(panel + (i + 2 * pair) * 16, as_floats(both << 16));
        store16(panel + (i + 2 * pair + 1) * 16, as_floats(both & 0xffff0000u));
      }
  }

  // R rows by the group's 32 columns, straight from the weight: for few rows, which wait for memory.
  template <int R, class Emit>
  static void block(const float* a, int row, int k, const W* w, int group, Emit emit) {
    alignas(64) float out[R][kGroup];
    v16 acc[R][2] = {};
    accumulate(a + (size_t)row * k, k, w, acc);
    for (int r = 0; r < R; r++)
      for (int h = 0; h < 2; h++) store16(out[r] + 16 * h, acc[r][h]);
    emit(row, R, group * kGroup, &out[0][0]);
  }

  template <int R>
  static void accumulate(const float* x, int k, const float* w, v16 (&acc)[R][2]) {
    for (int i = 0; i < k; i++, w += kGroup)
      for (int h = 0; h < 2; h++) {
        const v16 lanes = load16(w + 16 * h);
        for (int r = 0; r < R; r++) acc[r][h] += x[(size_t)r * k + i] * lanes;
      }
  }

  template <int R>
  static void accumulate(const float* x, int k, const bf16* w, v16 (&acc)[R][2]) {
    for (int tile = 0; tile < k; tile += 32, w += 1024)
      for (int pair = 0; pair < 16; pair++)
        for (int h = 0; h < 2; h++) {
          const u16x32 both = load<u16x32>(w + h * 512 + pair * 32);
          const v16 even = as_floats(both << 16), odd = as_floats(both & 0xffff0000u);
          for (int r = 0; r < R; r++) {
            const float* at = x + (size_t)r * k + tile + 2 * pair;
            acc[r][h] += at[0] * even;
            acc[r][h] += at[1] * odd;
          }
        }
  }
};

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
