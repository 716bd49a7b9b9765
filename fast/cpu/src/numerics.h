// The arithmetic of docs/numerics.md on single numbers, as in fast/templates/numerics.metal. Compile with
// -ffp-contract=off and without -ffast-math: every float operation here is one IEEE operation.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace tq {

constexpr int TILE = 64;
constexpr int FIRST = 4;
constexpr int LAG = 32;
constexpr int SPLIT = 4;  // tiles that are merged one after the other
constexpr int IDENTITY = -(1 << 20);
constexpr int32_t NOT_ALLOWED = INT32_MIN;
constexpr int32_t POISON = INT32_MAX;
constexpr int32_t LIMIT28 = 1 << 28;
constexpr float TINY = 0x1p-80f, VANISHING = 0x1p-64f;

template <class To, class From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "bits needs types of equal size");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// 2^e for e in -126 .. 127, clamped there.
inline float pow2(int e) { return bits<float>((clamp(e, -126, 127) + 127) << 23); }

// e with 2^(e-1) <= x < 2^e for a positive normal x.
inline int float_exponent(float x) { return (bits<int32_t>(x) >> 23) - 126; }

// Section 3.1: the exponent of a vector whose largest magnitude is given, and what turns a coordinate into its integer.
inline int vector_exponent(float largest) { return largest < TINY ? -79 : float_exponent(largest); }
inline float vector_unit(float largest, int n) { return largest < TINY ? 0.0f : pow2(n - float_exponent(largest)); }
inline float snap(float x, float unit) { return unit == 0.0f ? 0.0f : std::rint(x * unit); }

inline bool is_finite(float x) { return (bits<uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }
inline bool is_nan(float x) { return (bits<uint32_t>(x) & 0x7fffffffu) > 0x7f800000u; }

inline int32_t clamp28(int32_t x) { return clamp(x, -LIMIT28, LIMIT28); }
inline int32_t fixed(float x) {
  const float r = std::rint(x);
  return int32_t(r < -268435456.0f ? -268435456.0f : r > 268435456.0f ? 268435456.0f : r);
}
// Section 4: y 2^k as a logit.
inline int32_t logit(float y, int k) { return fixed(y * pow2(clamp(k, -100, 60))); }
// A natural logit (mask value or sink, not NaN) in units of 2^-12 of a log2.
inline int32_t natural_logit(float v) { return fixed(v * bits<float>(0x3fb8aa3b) * 4096.0f); }
// 128 high + low with one rounding.
inline float join(int32_t high, int32_t low) { return 128.0f * float(high) + float(low); }

// Section 5, merge.
inline float shift(float a, int k) {
  const float shifted = a * pow2(k < -40 ? -40 : k);
  return (k < -40 || std::fabs(shifted) < VANISHING) ? 0.0f : shifted;
}
inline float merge(float a, int x, float b, int y) {
  const int m = x > y ? x : y;
  const float sum = shift(a, x - m) + shift(b, y - m);
  return std::fabs(sum) < VANISHING ? 0.0f : sum;
}

inline int bit_length(uint64_t n) { return n ? 64 - __builtin_clzll(n) : 0; }

// n / 2^k, halves to even; sticky: n is the floor of something that is not an integer.
inline uint64_t round_shift(uint64_t n, int k, bool sticky) {
  if (k <= 0) return n;
  if (k > 62) return 0;
  const uint64_t quotient = n >> k, rest = n - (quotient << k), half = uint64_t(1) << (k - 1);
  return quotient + (rest > half || (rest == half && (sticky || (quotient & 1))));
}

// Section 5, output: a / b, correctly rounded, times 2^exponent. b > 0.
inline float quotient(float a, float b, int exponent) {
  if (a == 0.0f) return 0.0f;
  // IEEE division is correctly rounded and neither operand is subnormal; both are brought to exponent 0 first, so that
  // the quotient is normal too.
  const int32_t ia = bits<int32_t>(a), ib = bits<int32_t>(b);
  const float fa = bits<float>((ia & int32_t(0x807fffff)) | 0x3f800000), fb = bits<float>((ib & 0x7fffff) | 0x3f800000);
  const float q = fa / fb;
  const int k = ((ia >> 23) & 255) - ((ib >> 23) & 255) + exponent;
  // q is in (1/2, 2): its own exponent decides the range of the result.
  const int top = float_exponent(std::fabs(q)) - 1 + k;
  if (top < -100) return 0.0f;
  if (top >= 128) return q < 0.0f ? -INFINITY : INFINITY;
  // 2^k may exceed float's range although the result does not.
  return k > 127 ? q * pow2(127) * pow2(k - 127) : q * pow2(k);
}

// Section 3.5: floor of the square root of n < 2^52.
inline uint64_t isqrt(uint64_t n) {
  uint64_t x = uint64_t(std::sqrt(double(n)));
  while (x * x > n) x--;
  while ((x + 1) * (x + 1) <= n) x++;
  return x;
}

// Section 3.6: the bits of the float16 nearest to numerator / denominator 2^k; both below 2^49.
inline uint16_t half_from_ratio(uint64_t numerator, uint64_t denominator, int k) {
  if (!numerator || !denominator) return 0;
  const int n = 13 - bit_length(numerator) + bit_length(denominator);
  const uint64_t scaled = numerator << (n > 0 ? n : 0), divisor = denominator << (n < 0 ? -n : 0);
  const uint64_t q = scaled / divisor;
  int unit = bit_length(q) - n + k - 11;
  if (unit < -24) unit = -24;
  if (unit > 5) return 0x7bff;
  const uint64_t word = (uint64_t(unit + 24) << 10) + round_shift(q, unit - k + n, q * divisor != scaled);
  return uint16_t(word > 0x7bff ? 0x7bff : word);
}

inline int packed_tiles(int64_t tokens) { return tokens < LAG ? 0 : int((tokens - LAG) / TILE); }

// Widening of the dtypes of a model: 0 float16, 1 bfloat16, 2 float32.
inline float from_half(uint16_t h) {
#if defined(__FLT16_MAX__)
  return float(bits<_Float16>(h));
#else
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  const float value = magnitude >= 0x400u ? bits<float>((magnitude << 13) + 0x38000000u) : float(magnitude) * 0x1p-24f;
  return bits<float>(bits<uint32_t>(value) | sign);
#endif
}
inline float from_bfloat(uint16_t b) { return bits<float>(uint32_t(b) << 16); }

}  // namespace tq
