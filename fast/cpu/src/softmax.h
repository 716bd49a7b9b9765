// Logits and weights of one query over the 64 tokens of a tile (sections 4 and 5).
#pragma once
#include "lanes.h"

namespace tq::attention {

constexpr int32_t HIDDEN = -(1 << 29);  // the logit of a token that is not allowed, below every other

TQ_INLINE I clamp28(I x) { return minimum(maximum(x, broadcast(-LIMIT28)), broadcast(LIMIT28)); }
TQ_INLINE I fixed(F x) {
  return round_to_int(minimum(maximum(x, broadcast(-268435456.0f)), broadcast(268435456.0f)));
}

// logits[64] from the sums I of packed keys, in place. signs: the sums of the sign code of `prod`, or null.
TQ_INLINE void packed_logits(int32_t* logits, const float* scales, int exponent, const int32_t* signs,
                             const float* sign_scales, int sign_exponent, int32_t base) {
  const F unit = broadcast(pow2(clamp(exponent, -100, 60)));
  const F sign_unit = broadcast(signs ? pow2(clamp(sign_exponent, -100, 60)) : 0.0f);
  for (int t = 0; t < TILE; t += LANES) {
    I sum = fixed(to_float(load<I>(logits + t)) * load<F>(scales + t) * unit) + base;
    if (signs) sum += fixed(to_float(load<I>(signs + t)) * load<F>(sign_scales + t) * sign_unit);
    store(logits + t, clamp28(sum));
  }
}
// The same where no number can reach a limit.
TQ_INLINE void packed_logits_within(int32_t* logits, const float* scales, int exponent, int32_t base) {
  const F unit = broadcast(pow2(clamp(exponent, -100, 60)));
  for (int t = 0; t < TILE; t += LANES) {
    store(logits + t, round_to_int(to_float(load<I>(logits + t)) * load<F>(scales + t) * unit) + base);
  }
}

// Logits of `count` raw keys (or bases) from both halves of their sums; the exponent of y is `exponent` plus their own.
inline void raw_logits(int32_t* logits, const int32_t* high, const int32_t* low, const int32_t* exponents, int exponent,
                       int count) {
  for (int t = 0; t < count; t++) {
    const float unit = pow2(clamp(exponent + exponents[t], -100, 60));
    logits[t] = tq::fixed(join(high[t], low[t]) * unit);
  }
}

// Tables A and B of section 5, as integers and as floats.
struct Weights {
  alignas(64) int16_t high[64];
  alignas(64) int16_t low[64];
  alignas(64) float high_float[64];
  alignas(64) float low_float[64];

  explicit Weights(const int16_t* both) {
    for (int i = 0; i < 64; i++) {
      high[i] = both[i];
      low[i] = both[64 + i];
      high_float[i] = high[i];
      low_float[i] = low[i];
    }
  }
};

// rint(A B 2^(-11-s)) from the product A B and the distance, whose bits 12 and up are s.
TQ_INLINE I scaled_weight(F product, I distance) {
  const F scaled = (F)((I)product - ((distance & ~4095) << 11) - (11 << 23));
  return round_to_int(distance < (14 << 12) ? scaled : F{});
}

// P of one query: [64]. Returns false, with nothing written, if no token is allowed.
TQ_INLINE bool weigh(const int32_t* logits, const Weights& tables, int32_t* weights, int& exponent, int& den) {
  I most = load<I>(logits);
  TQ_UNROLL
  for (int v = 1; v < VECTORS; v++) most = maximum(most, load<I>(logits + v * LANES));
  const int32_t of_all = largest(most);
  if (of_all < -LIMIT28) return false;
  exponent = (of_all + 4095) >> 12;
  const I above = broadcast(exponent * 4096);
  I sum{};
#if defined(TQ_AVX512)
  const __m512i a0 = _mm512_load_si512(tables.high), a1 = _mm512_load_si512(tables.high + 32);
  const __m512i b0 = _mm512_load_si512(tables.low), b1 = _mm512_load_si512(tables.low + 32);
  TQ_UNROLL
  for (int t = 0; t < TILE; t += 2 * LANES) {
    // Two tokens share a lane while they look up.
    const I d0 = above - load<I>(logits + t), d1 = above - load<I>(logits + t + LANES);
    const U h = ((U)d0 >> 6 & 63u) | ((U)d1 << 10 & (63u << 16)), l = ((U)d0 & 63u) | ((U)d1 << 16 & (63u << 16));
    const U a = (U)_mm512_permutex2var_epi16(a0, (__m512i)h, a1), b = (U)_mm512_permutex2var_epi16(b0, (__m512i)l, b1);
    const I p0 = (I)_mm512_madd_epi16((__m512i)(a & 0xffffu), (__m512i)b);
    const I p1 = (I)_mm512_madd_epi16((__m512i)(a & 0xffff0000u), (__m512i)b);
    const I w0 = scaled_weight(to_float(p0), d0), w1 = scaled_weight(to_float(p1), d1);
    store(weights + t, w0);
    store(weights + t + LANES, w1);
    sum += w0 + w1;
  }
#else
  for (int t = 0; t < TILE; t += LANES) {
    const I d = above - load<I>(logits + t);
#if defined(TQ_AVX2)
    const __m256i h = (__m256i)(d >> 6 & 63), l = (__m256i)(d & 63);
    const F a = (F)_mm256_i32gather_ps(tables.high_float, h, 4), b = (F)_mm256_i32gather_ps(tables.low_float, l, 4);
#else
    F a, b;
    for (int i = 0; i < LANES; i++) {
      a[i] = tables.high_float[d[i] >> 6 & 63];
      b[i] = tables.low_float[d[i] & 63];
    }
#endif
    const I w = scaled_weight(a * b, d);
    store(weights + t, w);
    sum += w;
  }
#endif
  den = total(sum);
  return true;
}

// U of the tokens read packed, int16 [64]; returns the exponent e, or IDENTITY if all are zero.
TQ_INLINE int packed_shares(const int32_t* weights, const float* scales, int16_t* shares) {
  F u[VECTORS];
  F most{};
  TQ_UNROLL
  for (int v = 0; v < VECTORS; v++) {
    u[v] = to_float(load<I>(weights + v * LANES)) * load<F>(scales + v * LANES);
    most = maximum(most, u[v]);
  }
  const float of_all = largest(most);
  if (of_all == 0.0f) {
    std::memset(shares, 0, sizeof(int16_t) * TILE);
    return IDENTITY;
  }
  const int e = float_exponent(of_all);
  const F unit = broadcast(pow2(13 - e));
  TQ_UNROLL
  for (int v = 0; v < VECTORS; v++) {
    store(shares + v * LANES, __builtin_convertvector(round_to_int(u[v] * unit), Narrow));
  }
  return e;
}

// Both halves of U of `count` tokens read raw, zeros behind them up to a whole pair; returns e or IDENTITY.
inline int raw_shares(const int32_t* weights, const int32_t* exponents, int count, int16_t* high, int16_t* low) {
  int e = IDENTITY;
  for (int t = 0; t < count; t++) {
    if (weights[t] > 0) {
      const int reach = float_exponent(float(weights[t])) + exponents[t];
      e = reach > e ? reach : e;
    }
  }
  for (int t = 0; t < count; t++) {
    const int u = int(std::rint(float(weights[t]) * pow2(clamp(exponents[t] + 13 - e, -40, 13))));
    high[t] = int16_t((u + 64) >> 7);
    low[t] = int16_t(u - 128 * high[t]);
  }
  if (count & 1) high[count] = low[count] = 0;
  return e;
}

}  // namespace tq::attention
