// Rows of numbers from and to the dtypes of a model.
#pragma once
#include "codec.h"

namespace tq {

// Whether the compiler has instructions for float16, and not just functions.
#if defined(__F16C__) || (defined(__aarch64__) && defined(__FLT16_MAX__))
#define TQ_HALF_INSTRUCTIONS 1
#else
#define TQ_HALF_INSTRUCTIONS 0
#endif

// float16 to float32, without branches.
inline float widen_half(uint16_t h) {
#if TQ_HALF_INSTRUCTIONS
  return from_half(h);
#else
  const uint32_t size = h & 0x7fffu, sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t normal = (size << 13) + (size >= 0x7c00u ? 0x70000000u : 0x38000000u);
  const uint32_t small = bits<uint32_t>(float(int32_t(size)) * 0x1p-24f);
  return bits<float>((size < 0x400u ? small : normal) | sign);
#endif
}

// float32 to float16 and bfloat16, halves to even; NaN stays NaN.
inline uint16_t to_half(float x) {
#if TQ_HALF_INSTRUCTIONS && defined(__FLT16_MAX__)
  return bits<uint16_t>(_Float16(x));
#else
  const uint32_t word = bits<uint32_t>(x), sign = (word >> 16) & 0x8000u, size = word & 0x7fffffffu;
  if (size > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (size >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  // Below 2^-14 the last bit is worth 2^-24: adding 1/2 lets the addition round there.
  if (size < 0x38800000u) return uint16_t(sign | (bits<uint32_t>(bits<float>(size) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13));
#endif
}
inline uint16_t to_bfloat(float x) {
  const uint32_t word = bits<uint32_t>(x);
  return is_nan(x) ? uint16_t(0x7fc0) : uint16_t((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// x[from .. from + count - 1] as float32. Returns the bits of the largest magnitude: 0x7f800000 and above for a row
// with an infinity or a NaN.
inline int32_t widen(const void* x, int type, int64_t from, int count, float* to) {
  int i = 0;
  if (type == FLOAT32) {
    std::memcpy(to, static_cast<const float*>(x) + from, std::size_t(count) * sizeof(float));
  } else {
    const uint16_t* row = static_cast<const uint16_t*>(x) + from;
    if (type == BFLOAT16) {
      for (; i < count; i++) to[i] = from_bfloat(row[i]);
    } else {
#if defined(__F16C__)
      for (; i + 8 <= count; i += 8) {
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i))));
      }
#endif
      for (; i < count; i++) to[i] = widen_half(row[i]);
    }
  }
  int32_t largest = 0;
  for (i = 0; i < count; i++) {
    const int32_t size = bits<int32_t>(to[i]) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  return largest;
}

// x[from .. from + count - 1] = row, cast.
inline void narrow(const float* row, int count, int type, int64_t from, void* x) {
  if (type == FLOAT32) {
    std::memcpy(static_cast<float*>(x) + from, row, std::size_t(count) * sizeof(float));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(x) + from;
  int i = 0;
  if (type == BFLOAT16) {
    for (; i < count; i++) to[i] = to_bfloat(row[i]);
    return;
  }
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(row + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
#endif
  for (; i < count; i++) to[i] = to_half(row[i]);
}

}  // namespace tq
