// Sixteen lanes of float, bfloat16 conversion and the few functions a transformer needs, without a maths library.
// With AVX-512 a v16 is one register; elsewhere it is two halves of eight lanes, because GCC lowers a vector that is wider
// than the machine's through memory, at a thirtieth of the speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace triptych {

#ifdef __AVX512F__
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16x32 __attribute__((vector_size(64)));
typedef uint32_t u16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

inline v16 select(i16x32 mask, v16 a, v16 b) { return mask ? a : b; }
inline u16x32 select(i16x32 mask, u16x32 a, u16x32 b) { return mask ? a : b; }
inline u16x32 as_bits(v16 v) { return (u16x32)v; }
inline v16 as_floats(u16x32 v) { return (v16)v; }
inline u16x32 widen(u16x16 v) { return __builtin_convertvector(v, u16x32); }
inline u16x16 narrow(u16x32 v) { return __builtin_convertvector(v, u16x16); }
inline i16x32 to_ints(v16 v) { return __builtin_convertvector(v, i16x32); }
inline u16x32 as_unsigned(i16x32 v) { return (u16x32)v; }

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
#else
template <class T>
struct Pair {
  using Half = T;
  Half lo, hi;
};

template <class Half, class Scalar>
struct Lanes : Pair<Half> {
  Lanes() : Pair<Half>{Half{}, Half{}} {}
  Lanes(Half lo, Half hi) : Pair<Half>{lo, hi} {}
  Scalar operator[](int i) const { return i < 8 ? this->lo[i] : this->hi[i - 8]; }
  void operator+=(Lanes b) { this->lo += b.lo, this->hi += b.hi; }

#define TRIPTYCH_OPERATOR(op)                                                                          \
  friend Lanes operator op(Lanes a, Lanes b) { return {Half(a.lo op b.lo), Half(a.hi op b.hi)}; }      \
  friend Lanes operator op(Lanes a, Scalar b) { return {Half(a.lo op b), Half(a.hi op b)}; }           \
  friend Lanes operator op(Scalar a, Lanes b) { return {Half(a op b.lo), Half(a op b.hi)}; }
  TRIPTYCH_OPERATOR(+)
  TRIPTYCH_OPERATOR(-)
  TRIPTYCH_OPERATOR(*)
  TRIPTYCH_OPERATOR(/)
  TRIPTYCH_OPERATOR(&)
  TRIPTYCH_OPERATOR(|)
  TRIPTYCH_OPERATOR(<<)
  TRIPTYCH_OPERATOR(>>)
#undef TRIPTYCH_OPERATOR
};

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8x32 __attribute__((vector_size(32)));
typedef uint32_t u8x32 __attribute__((vector_size(32)));
typedef uint16_t u8x16 __attribute__((vector_size(16)));
using v16 = Lanes<v8, float>;
using i16x32 = Lanes<i8x32, int32_t>;
using u16x32 = Lanes<u8x32, uint32_t>;
using u16x16 = Pair<u8x16>;

#define TRIPTYCH_COMPARISON(op)                                                                    \
  inline i16x32 operator op(v16 a, v16 b) { return {i8x32(a.lo op b.lo), i8x32(a.hi op b.hi)}; }   \
  inline i16x32 operator op(v16 a, float b) { return {i8x32(a.lo op b), i8x32(a.hi op b)}; }
TRIPTYCH_COMPARISON(<)
TRIPTYCH_COMPARISON(>)
TRIPTYCH_COMPARISON(!=)
#undef TRIPTYCH_COMPARISON

template <class Half, class Scalar>
inline Lanes<Half, Scalar> select(i16x32 mask, Lanes<Half, Scalar> a, Lanes<Half, Scalar> b) {
  return {Half(mask.lo ? a.lo : b.lo), Half(mask.hi ? a.hi : b.hi)};
}
inline u16x32 as_bits(v16 v) { return {(u8x32)v.lo, (u8x32)v.hi}; }
inline v16 as_floats(u16x32 v) { return {(v8)v.lo, (v8)v.hi}; }
inline u16x32 widen(u16x16 v) { return {__builtin_convertvector(v.lo, u8x32), __builtin_convertvector(v.hi, u8x32)}; }
inline u16x16 narrow(u16x32 v) { return {__builtin_convertvector(v.lo, u8x16), __builtin_convertvector(v.hi, u8x16)}; }
inline i16x32 to_ints(v16 v) { return {__builtin_convertvector(v.lo, i8x32), __builtin_convertvector(v.hi, i8x32)}; }
inline u16x32 as_unsigned(i16x32 v) { return {(u8x32)v.lo, (u8x32)v.hi}; }

// Half by half: a copy of both at once goes through the stack.
template <class V>
inline V load(const void* p) {
  typename V::Half lo, hi;
  std::memcpy(&lo, p, sizeof lo);
  std::memcpy(&hi, (const char*)p + sizeof lo, sizeof hi);
  return {lo, hi};
}
template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v.lo, sizeof v.lo);
  std::memcpy((char*)p + sizeof v.lo, &v.hi, sizeof v.hi);
}
#endif

struct bf16 {
  uint16_t bits;
};

inline v16 splat(float value) { return value - v16{}; }

inline v16 load16(const float* p) { return load<v16>(p); }

inline v16 load16(const bf16* p) { return as_floats(widen(load<u16x16>(p)) << 16); }

inline void store16(float* p, v16 v) { store(p, v); }

inline u16x16 round16(v16 v) {  // to nearest even
#ifdef __AVX512BF16__
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  const u16x32 bits = as_bits(v);
  const u16x32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return narrow(select(v != v, (bits >> 16) | 0x40u, rounded));
#endif
}

inline void store16(bf16* p, v16 v) {
  store(p, round16(v));
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
  v8 halves = v.lo + v.hi;
  halves += __builtin_shuffle(halves, i8x32{4, 5, 6, 7, 0, 1, 2, 3});
  halves += __builtin_shuffle(halves, i8x32{2, 3, 0, 1, 6, 7, 4, 5});
  return halves[0] + halves[1];
#endif
}

inline v16 max16(v16 a, v16 b) { return select(a > b, a, b); }

// exp within 2 units in the last place for x <= 88; below -87 it is 0.
inline v16 exp16(v16 x) {
  v16 clamped = select(x < -88.0f, splat(-88.0f), x);  // NaN stays NaN
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
  const v16 result = p * as_floats(as_unsigned((to_ints(whole) + 127) << 23));
#endif
  return select(x < -87.0f, v16{}, result);
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

inline v16 sigmoid16(v16 x) { return 1.0f / (1.0f + exp16(0.0f - max16(x, splat(-80.0f)))); }

inline v16 tanh16(v16 x) {
  v16 bounded = select(x > 15.0f, splat(15.0f), x);
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
