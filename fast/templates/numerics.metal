// The arithmetic of docs/numerics.md on single numbers. Nothing here depends on an order of summation, on fused
// multiply-add, on subnormals, or on the last bit of a division or a square root.

#define TQ_IDENTITY (-1048576)
#define TQ_NOT_ALLOWED (-2147483647 - 1)
#define TQ_POISON 2147483647
// 2^-80, below which a vector counts as zero, and 2^-64, below which a merged sum does.
#define TQ_TINY as_type<float>(0x17800000)
#define TQ_VANISHING as_type<float>(0x1f800000)
#define TQ_UNROLL _Pragma("clang loop unroll(full)")

// 2^e for e in -126 .. 127, clamped there.
inline float tq_pow2(int e) {
  return as_type<float>((clamp(e, -126, 127) + 127) << 23);
}

// e with 2^(e-1) <= x < 2^e for a positive normal x.
inline int tq_float_exponent(float x) {
  return (as_type<int>(x) >> 23) - 126;
}

// Section 3.1: the exponent of a vector whose largest magnitude is given.
inline int tq_exponent(float largest) {
  return largest < TQ_TINY ? -79 : tq_float_exponent(largest);
}

// The factor that turns a coordinate into its snapped integer; 0 for a vector that counts as zero.
inline float tq_unit(float largest, int bits) {
  return largest < TQ_TINY ? 0.0f : tq_pow2(bits - tq_float_exponent(largest));
}

inline float tq_snap(float x, float unit) {
  return unit == 0.0f ? 0.0f : rint(x * unit);
}

inline bool tq_finite(float x) {
  return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u;
}

inline bool tq_nan(float x) {
  return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u;
}

inline int tq_clamp28(int x) {
  return clamp(x, -268435456, 268435456);
}

inline int tq_fixed(float x) {
  return int(clamp(rint(x), -268435456.0f, 268435456.0f));
}

// Section 4: y 2^k as a logit.
inline int tq_logit(float y, int k) {
  return tq_fixed(y * tq_pow2(clamp(k, -100, 60)));
}

// A natural logit (mask value or sink, not NaN) in units of 2^-12 of a log2.
inline int tq_natural_logit(float v) {
  return tq_fixed(v * as_type<float>(0x3fb8aa3b) * 4096.0f);
}

// 128 high + low with one rounding: section 4, dot14, and section 5, raw values.
inline float tq_join(int high, int low) {
  return 128.0f * float(high) + float(low);
}

// Section 5: the weight 2^13 2^(-distance / 2^12) from the two tables.
inline int tq_weight(int distance, threadgroup const float* high, threadgroup const float* low) {
  const int s = distance >> 12;
  const float product = high[(distance >> 6) & 63] * low[distance & 63];
  return s > 13 ? 0 : int(rint(product * tq_pow2(-11 - s)));
}

inline float tq_shift(float a, int k) {
  const float shifted = a * tq_pow2(max(k, -40));
  return (k < -40 || fabs(shifted) < TQ_VANISHING) ? 0.0f : shifted;
}

// Section 5, merge: (a, x) + (b, y) at the larger exponent, which the caller keeps.
inline float tq_merge(float a, int x, float b, int y) {
  const int m = max(x, y);
  const float sum = tq_shift(a, x - m) + tq_shift(b, y - m);
  return fabs(sum) < TQ_VANISHING ? 0.0f : sum;
}

inline int tq_bit_length(ulong n) {
  const uint high = uint(n >> 32);
  return high != 0u ? 64 - int(clz(high)) : 32 - int(clz(uint(n)));
}

// n / 2^shift, halves to even; sticky: n is the floor of something that is not an integer. 0 <= shift.
inline ulong tq_round_shift(ulong n, int shift, bool sticky) {
  if (shift <= 0) {
    return n;
  }
  if (shift > 62) {
    return 0ul;
  }
  const ulong quotient = n >> shift;
  const ulong rest = n - (quotient << shift);
  const ulong half_way = 1ul << (shift - 1);
  const bool up = rest > half_way || (rest == half_way && (sticky || (quotient & 1ul) != 0ul));
  return quotient + (up ? 1ul : 0ul);
}

// Section 5, output: a / b, correctly rounded, times 2^exponent. b > 0; both normal, or a = 0.
inline float tq_quotient(float a, float b, int exponent) {
  if (a == 0.0f) {
    return 0.0f;
  }
  const uint bits_a = as_type<uint>(a), bits_b = as_type<uint>(b);
  const ulong scaled = ulong((bits_a & 0x7fffffu) | 0x800000u) << 26;
  const ulong divisor = ulong((bits_b & 0x7fffffu) | 0x800000u);
  const ulong quotient = scaled / divisor;
  const int drop = tq_bit_length(quotient) - 24;
  const ulong rounded = tq_round_shift(quotient, drop, quotient * divisor != scaled);
  const int k = drop - 26 + int((bits_a >> 23) & 255u) - int((bits_b >> 23) & 255u) + exponent;
  const int top = tq_bit_length(rounded) + k - 1;
  if (top < -100) {
    return 0.0f;
  }
  const float y = top >= 128 ? as_type<float>(0x7f800000) : float(uint(rounded)) * tq_pow2(k);
  return (bits_a >> 31) != 0u ? -y : y;
}

// Section 3.5: floor of the square root of n < 2^52.
inline ulong tq_isqrt(ulong n) {
  if (n == 0ul) {
    return 0ul;
  }
  ulong x = max(ulong(sqrt(float(n))), 1ul);
  x = (x + n / x) >> 1;
  x = (x + n / x) >> 1;
  x -= x * x > n ? 1ul : 0ul;
  return x + ((x + 1ul) * (x + 1ul) <= n ? 1ul : 0ul);
}

// Section 3.6: the bits of the float16 nearest to numerator / denominator 2^shift; both below 2^49.
inline ushort tq_half_from_ratio(ulong numerator, ulong denominator, int shift) {
  if (numerator == 0ul || denominator == 0ul) {
    return ushort(0);
  }
  const int k = 13 - tq_bit_length(numerator) + tq_bit_length(denominator);
  const ulong scaled = numerator << max(k, 0);
  const ulong divisor = denominator << max(-k, 0);
  const ulong quotient = scaled / divisor;
  const int unit = max(tq_bit_length(quotient) - k + shift - 11, -24);
  if (unit > 5) {
    return ushort(0x7bff);
  }
  const ulong mantissa = tq_round_shift(quotient, unit - shift + k, quotient * divisor != scaled);
  return ushort(min(((ulong(unit + 24)) << 10) + mantissa, 0x7bfful));
}
