// Vectors of 32-bit lanes: one set of operations for AVX-512, AVX2, NEON, SSE2 and plain C++. Which one is chosen by the
// compiler's macros alone. All operations are exact on integers or single IEEE operations on floats, so that every
// variant gives the same bits.
#pragma once
#include <cstddef>

// Vectors are passed between inlined functions alone; and GCC 12 takes the undefined operands of its own intrinsics for
// variables that were forgotten.
#pragma GCC diagnostic ignored "-Wpsabi"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "numerics.h"

#if defined(TQ_GENERIC)
// Plain C++, for tests.
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define TQ_AVX512 1
#elif defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#define TQ_AVX2 1
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define TQ_NEON 1
#elif defined(__SSE2__)
#include <emmintrin.h>
#define TQ_SSE2 1
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define TQ_UNROLL _Pragma("GCC unroll 16")
#else
#define TQ_UNROLL _Pragma("clang loop unroll(full)")
#endif
#define TQ_INLINE inline __attribute__((always_inline))

namespace tq::attention {

#if defined(TQ_AVX512)
constexpr int LANES = 16;
#elif defined(TQ_AVX2)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int VECTORS = TILE / LANES;  // that hold a number per token of a tile

typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef float F __attribute__((vector_size(4 * LANES)));
typedef int16_t H __attribute__((vector_size(4 * LANES)));        // two in each lane
typedef int16_t Narrow __attribute__((vector_size(2 * LANES)));   // one for each lane

template <class T>
TQ_INLINE T load(const void* from) {
  T v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class T>
TQ_INLINE void store(void* to, T v) {
  std::memcpy(to, &v, sizeof v);
}
TQ_INLINE I broadcast(int32_t x) { return I{} + x; }
TQ_INLINE U broadcast(uint32_t x) { return U{} + x; }
TQ_INLINE F broadcast(float x) { return F{} + x; }
TQ_INLINE F to_float(I x) { return __builtin_convertvector(x, F); }

// acc + a.low b.low + a.high b.high, the halves of a lane being int16.
TQ_INLINE I dot(I acc, U a, U b) {
#if defined(TQ_AVX512) && defined(__AVX512VNNI__)
  // Written out because GCC 12 moves the accumulators of the intrinsic through memory.
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
#elif defined(TQ_AVX512)
  return acc + (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(TQ_AVX2)
  return acc + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(TQ_NEON)
  const int16x8_t x = vreinterpretq_s16_u32((uint32x4_t)a), y = vreinterpretq_s16_u32((uint32x4_t)b);
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
  return acc + (I)vpaddq_s32(low, high);
#elif defined(TQ_SSE2)
  return acc + (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const I al = (I)(a << 16) >> 16, bl = (I)(b << 16) >> 16, ah = (I)a >> 16, bh = (I)b >> 16;
  return acc + al * bl + ah * bh;
#endif
}

TQ_INLINE I maximum(I a, I b) { return a > b ? a : b; }
TQ_INLINE I minimum(I a, I b) { return a < b ? a : b; }
TQ_INLINE F maximum(F a, F b) {
#if defined(TQ_AVX512)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(TQ_AVX2)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
TQ_INLINE F minimum(F a, F b) {
#if defined(TQ_AVX512)
  return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(TQ_AVX2)
  return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// rint, as integers; |x| < 2^31.
TQ_INLINE I round_to_int(F x) {
#if defined(TQ_AVX512)
  return (I)_mm512_cvtps_epi32((__m512)x);
#elif defined(TQ_AVX2)
  return (I)_mm256_cvtps_epi32((__m256)x);
#elif defined(TQ_NEON)
  return (I)vcvtnq_s32_f32((float32x4_t)x);
#elif defined(TQ_SSE2)
  return (I)_mm_cvtps_epi32((__m128)x);
#else
  I y;
  for (int i = 0; i < LANES; i++) y[i] = int32_t(std::rint(x[i]));
  return y;
#endif
}

TQ_INLINE int32_t largest(I x) {
#if defined(TQ_AVX512)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t m = x[0];
  for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
  return m;
#endif
}
TQ_INLINE int32_t total(I x) {
#if defined(TQ_AVX512)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
#endif
}
// Of numbers that are not negative: their order is that of their bits.
TQ_INLINE float largest(F x) { return bits<float>(largest((I)x)); }

TQ_INLINE F absolute(F x) { return (F)((I)x & 0x7fffffff); }

// The first `count` words at `from`, zeros behind them; never reads beyond.
TQ_INLINE U load_words(const uint32_t* from, int count) {
  if (count >= LANES) return load<U>(from);
#if defined(TQ_AVX512)
  return (U)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1u), from);
#elif defined(TQ_AVX2)
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return (U)_mm256_maskload_epi32((const int*)from, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
#else
  U v{};
  for (int i = 0; i < count; i++) v[i] = from[i];
  return v;
#endif
}

// Centroids of up to 64 codes, two of 16 bits in a lane. Bits of an index above those of a code are ignored.
class Table {
 public:
  explicit Table(const int16_t* centroids, int bits) {
    for (int i = 0; i < 64; i++) all[i] = centroids[i & ((1 << (bits < 6 ? bits : 6)) - 1)];
    for (int i = 0; i < 64; i++) narrow[i] = int8_t(all[i]);
  }

  // The table in registers.
  struct Loaded {
#if defined(TQ_AVX512)
    __m512i low, high;
#elif defined(TQ_AVX2)
    __m256i part[4];
#elif defined(TQ_NEON)
    int8x16x4_t part;
#else
    const int16_t* all;
#endif

    template <int BITS>
    TQ_INLINE U at(U index) const {
      constexpr uint32_t mask = (1u << BITS) - 1u, both = mask << 16 | mask;
#if defined(TQ_AVX512)
      (void)both;
      return BITS < 6 ? (U)_mm512_permutexvar_epi16((__m512i)index, low)
                      : (U)_mm512_permutex2var_epi16(low, (__m512i)index, high);
#elif defined(TQ_AVX2)
      const __m256i at = (__m256i)(index & both);
      __m256i c = _mm256_shuffle_epi8(part[0], at);
      if (BITS > 4) {
        const __m256i one = _mm256_slli_epi16(at, 3);
        c = _mm256_blendv_epi8(c, _mm256_shuffle_epi8(part[1], at), one);
        if (BITS > 5) {
          const __m256i upper =
              _mm256_blendv_epi8(_mm256_shuffle_epi8(part[2], at), _mm256_shuffle_epi8(part[3], at), one);
          c = _mm256_blendv_epi8(c, upper, _mm256_slli_epi16(at, 2));
        }
      }
      return (U)_mm256_srai_epi16(_mm256_slli_epi16(c, 8), 8);
#elif defined(TQ_NEON)
      const uint8x16_t at = vreinterpretq_u8_u32((uint32x4_t)(index & both));
      int8x16_t c;
      if (BITS <= 4) {
        c = vqtbl1q_s8(part.val[0], at);
      } else if (BITS == 5) {
        c = vqtbl2q_s8(int8x16x2_t{{part.val[0], part.val[1]}}, at);
      } else {
        c = vqtbl4q_s8(part, at);
      }
      return (U)vreinterpretq_u32_s16(vshrq_n_s16(vshlq_n_s16(vreinterpretq_s16_s8(c), 8), 8));
#else
      const U at = index & both;
      U c;
      for (int i = 0; i < LANES; i++) c[i] = uint16_t(all[at[i] & 63]) | uint32_t(uint16_t(all[at[i] >> 16])) << 16;
      return c;
#endif
    }
  };

  TQ_INLINE Loaded loaded() const {
#if defined(TQ_AVX512)
    return {_mm512_load_si512(all), _mm512_load_si512(all + 32)};
#elif defined(TQ_AVX2)
    Loaded out;
    for (int i = 0; i < 4; i++) out.part[i] = _mm256_broadcastsi128_si256(load<__m128i>(narrow + 16 * i));
    return out;
#elif defined(TQ_NEON)
    return {{{vld1q_s8(narrow), vld1q_s8(narrow + 16), vld1q_s8(narrow + 32), vld1q_s8(narrow + 48)}}};
#else
    return {all};
#endif
  }

 private:
  alignas(64) int16_t all[64];
  alignas(64) int8_t narrow[64];
};

// Widening of `count` numbers of a model's dtype: 0 float16, 1 bfloat16, 2 float32.
inline void widen(const void* from, int dtype, int count, float* to) {
  int i = 0;
  if (dtype == 2) {
    std::memcpy(to, from, sizeof(float) * size_t(count));
  } else if (dtype == 1) {
    const uint16_t* x = static_cast<const uint16_t*>(from);
    for (; i < count; i++) to[i] = from_bfloat(x[i]);
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(from);
#if defined(TQ_AVX512)
    // As wide as what reads it: a load across two stores waits for both.
    for (; i + 16 <= count; i += 16) {
      _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(x + i))));
    }
#endif
#if defined(TQ_AVX512) || defined(TQ_AVX2)
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
#endif
    for (; i < count; i++) to[i] = from_half(x[i]);
  }
}

// float32 to float16 bits, nearest even; a NaN becomes 0x7e00.
inline uint16_t to_half(float x) {
  const uint32_t b = bits<uint32_t>(x), sign = b >> 16 & 0x8000u, magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00u;
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00u);
  // Below 2^-14 the unit is 2^-24: a float addition rounds there.
  if (magnitude < 0x38800000u) return uint16_t(sign | (bits<uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}
inline uint16_t to_bfloat(float x) {
  const uint32_t b = bits<uint32_t>(x);
  return is_nan(x) ? 0x7fc0u : uint16_t((b + 0x7fffu + (b >> 16 & 1u)) >> 16);
}

inline void narrow(const float* from, int dtype, int count, void* to) {
  int i = 0;
  if (dtype == 2) {
    std::memcpy(to, from, sizeof(float) * size_t(count));
  } else if (dtype == 1) {
    uint16_t* y = static_cast<uint16_t*>(to);
    for (; i < count; i++) y[i] = to_bfloat(from[i]);
  } else {
    uint16_t* y = static_cast<uint16_t*>(to);
#if defined(TQ_AVX512) || defined(TQ_AVX2)
    for (; i + 8 <= count; i += 8) {
      _mm_storeu_si128((__m128i*)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < count; i++) y[i] = to_half(from[i]);
  }
}

}  // namespace tq::attention
