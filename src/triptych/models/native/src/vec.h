// Sixteen lanes of float, bfloat16 conversion and the few functions a transformer needs, without a maths library.
// Compiles for any CPU (the compiler splits the vectors); with AVX-512 each operation is one instruction.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace triptych {

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16x32 __attribute__((vector_size(64)));
typedef uint32_t u16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline v16 splat(float value) { return value - v16{}; }

inline v16 load16(const float* p) {
  v16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline v16 load16(const bf16* p) {
  u16x16 half;
  std::memcpy(&half, p, sizeof half);
  return (v16)(__builtin_convertvector(half, u16x32) << 16);
}

inline void store16(float* p, v16 v) { std::memcpy(p, &v, sizeof v); }

inline u16x16 round16(v16 v) {  // to nearest even
#ifdef __AVX512BF16__
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  u16x32 bits = (u16x32)v;
  u16x32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  u16x32 quiet = (bits >> 16) | 0x40u;
  i16x32 is_nan = v != v;
  rounded = is_nan ? quiet : rounded;
  return __builtin_convertvector(rounded, u16x16);
#endif
}

inline void store16(bf16* p, v16 v) {
  u16x16 half = round16(v);
  std::memcpy(p, &half, sizeof half);
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
  uint32_t bits = (uint32_t)value.bits << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline float sum(v16 v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < 16; i++) total += v[i];
  return total;
#endif
}

inline v16 max16(v16 a, v16 b) { return a > b ? a : b; }

// exp within 2 units in the last place for x <= 88; below -87 it is 0.
inline v16 exp16(v16 x) {
  v16 clamped = x < -88.0f ? splat(-88.0f) : x;  // NaN stays NaN
  v16 scaled = clamped * 1.44269504088896341f;
#ifdef __AVX512F__
  v16 whole = (v16)_mm512_roundscale_ps((__m512)scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  v16 whole = (scaled + 12582912.0f) - 12582912.0f;
#endif
  v16 r = clamped - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  v16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
  v16 result = (v16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  i16x32 exponent = (__builtin_convertvector(whole, i16x32) + 127) << 23;
  v16 result = p * (v16)exponent;
#endif
  return x < -87.0f ? v16{} : result;
}

// 2 to the power of x for the weights of a softmax that are rounded to bfloat16: x <= 0, relative error below 1e-5.
inline v16 exp2_16(v16 x) {
#ifdef __AVX512F__
  const __m512 z = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // in this order NaN stays NaN
  const __m512 whole = _mm512_roundscale_ps(z, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const v16 r = (v16)_mm512_sub_ps(z, whole);
  v16 p = splat(9.6181291e-3f);
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return (v16)_mm512_scalef_ps((__m512)p, whole);
#else
  return exp16(x * 0.69314718055994531f);
#endif
}

inline v16 sigmoid16(v16 x) { return 1.0f / (1.0f + exp16(-max16(x, splat(-80.0f)))); }

inline v16 tanh16(v16 x) {
  v16 bounded = x > 15.0f ? splat(15.0f) : x;
  return 1.0f - 2.0f / (exp16(2.0f * bounded) + 1.0f);
}

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kQuickGelu = 2 };

inline v16 activate(v16 x, int32_t kind) {
  // 0.5 (1 + tanh(u)) is sigmoid(2 u)
  if (kind == kGeluTanh) return x * sigmoid16(1.5957691216057308f * (x + 0.044715f * x * x * x));
  if (kind == kQuickGelu) return x * sigmoid16(1.702f * x);
  return x * sigmoid16(x);
}

}  // namespace triptych
