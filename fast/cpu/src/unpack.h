// Packed words (section 3.7) of a tile as pairs of int16 centroids, laid out for gemm.h.
//
// Keys: [pair of coordinates][64 tokens]. Values: [pair of tokens][position]; a position is a coordinate in the order
// that unpacking yields, see ValueLayout.
#pragma once
#include "lanes.h"

namespace tq::attention {

constexpr int SLACK = 16;  // words that a row of a layout may run over

inline int groups_of(int dim) { return (dim + 7) / 8; }
inline int words_of(int dim, int bits) {
  const int groups = groups_of(dim);
  if (bits == 8) return (dim + 3) / 4;
  if (bits > 4) return groups + words_of(dim, bits - 4);
  if (bits == 3) return 3 * (groups / 4) + groups % 4;
  return (groups * bits + 3) / 4;
}
inline int up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Four words of LANES vectors that are `stride` words apart: lane i of out[k] is word k of vector i.
TQ_INLINE void four_words(const uint32_t* from, size_t stride, U* out) {
#if defined(TQ_AVX512)
  __m512i v[4];
  TQ_UNROLL
  for (int i = 0; i < 4; i++) {
    const uint32_t* at = from + i * stride;
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)at));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)(at + 4 * stride)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)(at + 8 * stride)), 2);
    v[i] = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)(at + 12 * stride)), 3);
  }
  const auto low = [](__m512i x, __m512i y) {
    return __builtin_shufflevector((U)x, (U)y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  };
  const auto high = [](__m512i x, __m512i y) {
    return __builtin_shufflevector((U)x, (U)y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  };
  const auto even = [](U x, U y) {
    return __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  };
  const auto odd = [](U x, U y) {
    return __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  };
  const U a = low(v[0], v[1]), b = high(v[0], v[1]), c = low(v[2], v[3]), d = high(v[2], v[3]);
  out[0] = even(a, c);
  out[1] = odd(a, c);
  out[2] = even(b, d);
  out[3] = odd(b, d);
#elif defined(TQ_AVX2)
  __m256i v[4];
  TQ_UNROLL
  for (int i = 0; i < 4; i++) {
    const uint32_t* at = from + i * stride;
    const __m256i x = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)at));
    v[i] = _mm256_inserti128_si256(x, _mm_loadu_si128((const __m128i*)(at + 4 * stride)), 1);
  }
  const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
  const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
  out[0] = (U)_mm256_unpacklo_epi64(a, c);
  out[1] = (U)_mm256_unpackhi_epi64(a, c);
  out[2] = (U)_mm256_unpacklo_epi64(b, d);
  out[3] = (U)_mm256_unpackhi_epi64(b, d);
#elif defined(TQ_NEON)
  uint32x4_t v[4];
  for (int i = 0; i < 4; i++) v[i] = vld1q_u32(from + i * stride);
  const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(v[0], v[1]));
  const uint64x2_t b = vreinterpretq_u64_u32(vtrn2q_u32(v[0], v[1]));
  const uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(v[2], v[3]));
  const uint64x2_t d = vreinterpretq_u64_u32(vtrn2q_u32(v[2], v[3]));
  out[0] = (U)vtrn1q_u64(a, c);
  out[1] = (U)vtrn1q_u64(b, d);
  out[2] = (U)vtrn2q_u64(a, c);
  out[3] = (U)vtrn2q_u64(b, d);
#else
  for (int k = 0; k < 4; k++) {
    for (int i = 0; i < LANES; i++) out[k][i] = from[i * stride + k];
  }
#endif
}

// Asks for words that are read soon. Spread over a loop, because only a few lines can be on their way at a time.
TQ_INLINE void fetch(const uint32_t* from) { __builtin_prefetch(from, 0, 3); }

// Rows of `count` words, `tokens` of them (a multiple of 16), to columns: out[word][64]. next: as many words that are
// read soon, or null.
inline void transpose(const uint32_t* from, int count, int tokens, const uint32_t* next, uint32_t* out) {
  for (int t = 0; t < tokens; t += LANES) {
    const uint32_t* row = from + size_t(t) * count;
    int w = 0;
    for (; w + 4 <= count; w += 4) {
      if (next) {
        for (int i = 0; i < LANES / 4; i++, next += 16) fetch(next);
      }
      U four[4];
      four_words(row + w, size_t(count), four);
      TQ_UNROLL
      for (int k = 0; k < 4; k++) store(out + (w + k) * TILE + t, four[k]);
    }
    for (; w < count; w++) {
      for (int i = 0; i < LANES; i++) out[w * TILE + t + i] = row[size_t(i) * count + w];
    }
  }
}

// ---- Keys.

// Pairs of coordinates of a key: n and n + 4 of every group of 8; at 8 bits n and n + 2 of every word.
struct KeyLayout {
  int dim, bits;
  int pairs() const { return bits == 8 ? dim / 2 : 4 * groups_of(dim); }
};

// The nibbles of group g from transposed words; only the lowest min(BITS, 4) bits of a nibble count.
template <int BITS>
TQ_INLINE U key_nibbles(const uint32_t* words, int g, int groups) {
  if (BITS == 1) return load<U>(words + g / 4 * TILE) >> (g & 3);
  if (BITS == 2) return load<U>(words + g / 2 * TILE) >> (2 * (g & 1));
  if (BITS == 3) {
    const uint32_t* quad = words + g / 4 * 3 * TILE;
    if ((g & 3) < 3) return load<U>(quad + (g & 3) * TILE);
    (void)groups;
    return (load<U>(quad) >> 3 & 0x11111111u) | (load<U>(quad + TILE) >> 2 & 0x22222222u) |
           (load<U>(quad + 2 * TILE) >> 1 & 0x44444444u);
  }
  return load<U>(words + g * TILE);
}

// words [64][W] to pairs [pairs][64]; scratch: [W][64]. next: the words of the next tile, or null.
template <int BITS>
inline void unpack_keys(const uint32_t* words, int dim, const Table& centroids, const uint32_t* next, uint32_t* scratch,
                        uint32_t* pairs) {
  const Table::Loaded table = centroids.loaded();
  const int count = words_of(dim, BITS), groups = groups_of(dim);
  transpose(words, count, TILE, next, scratch);
  if (BITS == 8) {
    for (int at = 0; at < count * TILE; at += LANES) {
      const U w = load<U>(scratch + at);
      uint32_t* to = pairs + at / TILE * 2 * TILE + at % TILE;
      store(to, (U)((H)(w << 8 & 0xff00ff00u) >> 8));
      store(to + TILE, (U)((H)w >> 8));
    }
    return;
  }
  for (int g = 0; g < groups; g++) {
    for (int t = 0; t < TILE; t += LANES) {
      const U low = key_nibbles<(BITS > 4 ? 4 : BITS)>(scratch + t, g, groups);
      uint32_t* to = pairs + 4 * g * TILE + t;
      if (BITS <= 4) {
        TQ_UNROLL
        for (int n = 0; n < 4; n++) store(to + n * TILE, table.at<BITS>(low >> (4 * n)));
      } else {
        const U high = key_nibbles<(BITS > 4 ? BITS - 4 : 1)>(scratch + groups * TILE + t, g, groups);
        TQ_UNROLL
        for (int n = 0; n < 4; n++) {
          const U lift = n ? high >> (4 * n - 4) : high << 4;
          store(to + n * TILE, table.at<BITS>((low >> (4 * n) & 0x000f000fu) | (lift & 0x00f000f0u)));
        }
      }
    }
  }
}

// ---- Values.

// Two tokens' words are joined to x (the low halves of both) and y (the high halves), the nibbles of a group of eight
// coordinates in a word of their own. A pair of tokens has a row of `stride` such words, first all of x, then all of y;
// each yields a coordinate of both tokens for each of `steps` shifts. At 3 bits the fourth groups come last.
struct ValueLayout {
  int dim, bits, groups, words, quads, half, stride, steps, size;

  ValueLayout(int d, int b) : dim(d), bits(b), groups(groups_of(d)), words(words_of(d, b)) {
    quads = b == 3 ? groups / 4 : 0;
    half = b == 8 ? words : groups;
    stride = up_to(2 * half, 16);
    steps = b == 8 ? 2 : 4;
    size = steps * stride;
  }

  // The coordinate at a position, or -1.
  int coordinate(int position) const {
    const int lane = position % stride, step = position / stride, at = lane % half, upper = lane / half;
    if (upper > 1) return -1;
    if (bits == 8) return 4 * at + 2 * upper + step;
    const int group = bits != 3 ? at : at < words ? at / 3 * 4 + at % 3 : 4 * (at - words) + 3;
    const int found = 8 * group + 4 * upper + step;
    return found < dim ? found : -1;
  }
};

TQ_INLINE U join_low(U a, U b) { return (a & 0xffffu) | b << 16; }
TQ_INLINE U join_high(U a, U b) { return a >> 16 | (b & 0xffff0000u); }

// x of `count` words to `to`, y to `to + half`; stores may run over, so rows are written in ascending order.
TQ_INLINE void join_words(const uint32_t* a, const uint32_t* b, int count, int half, uint32_t* to) {
  for (int i = 0; i < count; i += LANES) {
    store(to + i, join_low(load_words(a + i, count - i), load_words(b + i, count - i)));
  }
  for (int i = 0; i < count; i += LANES) {
    store(to + half + i, join_high(load_words(a + i, count - i), load_words(b + i, count - i)));
  }
}

// The fourth groups of `quads` quads of three words each.
inline void fourth_groups(const uint32_t* words, int quads, uint32_t* to) {
  typedef uint32_t Four __attribute__((vector_size(16)));
  int q = 0;
  for (; q + 4 <= quads; q += 4, words += 12) {
    const Four a = load<Four>(words), b = load<Four>(words + 4), c = load<Four>(words + 8);
    const Four w0 = __builtin_shufflevector(__builtin_shufflevector(a, b, 0, 3, 6, 0), c, 0, 1, 2, 5);
    const Four w1 = __builtin_shufflevector(__builtin_shufflevector(a, b, 1, 4, 7, 0), c, 0, 1, 2, 6);
    const Four w2 = __builtin_shufflevector(__builtin_shufflevector(a, b, 2, 5, 0, 0), c, 0, 1, 4, 7);
    store(to + q, (w0 >> 3 & 0x11111111u) | (w1 >> 2 & 0x22222222u) | (w2 >> 1 & 0x44444444u));
  }
  for (; q < quads; q++, words += 3) {
    to[q] = (words[0] >> 3 & 0x11111111u) | (words[1] >> 2 & 0x22222222u) | (words[2] >> 1 & 0x44444444u);
  }
}

// One word for each group, from joined words that hold `EACH` groups (2 of 2 bits or 4 of 1 bit) in their nibbles.
template <int EACH>
TQ_INLINE void spread_words(const uint32_t* a, const uint32_t* b, int groups, uint32_t* to) {
  constexpr int BITS = 4 / EACH;
  const int count = (groups + EACH - 1) / EACH;
  for (int half = 0; half < 2; half++, to += groups) {
    for (int w = 0; w < count; w++) {
      const uint32_t x = half ? a[w] >> 16 | (b[w] & 0xffff0000u) : (a[w] & 0xffffu) | b[w] << 16;
      for (int j = 0; j < EACH; j++) to[EACH * w + j] = x >> (BITS * j);
    }
  }
}

// The centroids of LANES joined words: `steps` vectors, `stride` apart.
template <int BITS>
TQ_INLINE void expand(U low, U high, const Table::Loaded& table, int stride, uint32_t* to) {
  if (BITS == 8) {
    store(to, (U)((H)(low << 8 & 0xff00ff00u) >> 8));
    store(to + stride, (U)((H)low >> 8));
  } else if (BITS <= 4) {
    TQ_UNROLL
    for (int n = 0; n < 4; n++) store(to + n * stride, table.at<BITS>(low >> (4 * n)));
  } else {
    TQ_UNROLL
    for (int n = 0; n < 4; n++) {
      const U lift = n ? high >> (4 * n - 4) : high << 4;
      store(to + n * stride, table.at<BITS>((low >> (4 * n) & 0x000f000fu) | (lift & 0x00f000f0u)));
    }
  }
}

#if defined(TQ_AVX512)
// Up to 128 coordinates: the rows of a pair of tokens stay in two registers, or in one.
enum class Fill { ONE, EVEN, UNEVEN };
template <int BITS, Fill FILL>
inline void unpack_short_values(const uint32_t* words, const ValueLayout& layout, const Table& centroids,
                                const uint32_t* next, uint32_t* pairs) {
  const Table::Loaded table = centroids.loaded();
  const int count = layout.words, half = layout.half;
  constexpr int stride = FILL == Fill::ONE ? 16 : 32, size = stride * (BITS == 8 ? 2 : 4);
  alignas(64) uint32_t of_x[16], of_y[16], quad[16], both[16];
  for (uint32_t i = 0; i < 16; i++) {
    quad[i] = i < 8 ? 3 * i : 16 + 3 * (i - 8);
    of_x[i] = int(i) < count ? i : 16 + (i - uint32_t(count));
    of_y[i] = int(i) < count ? i : 24 + (i - uint32_t(count));
    both[i] = int(i) < half ? i : 16 + (i - uint32_t(half));
  }
  const __m512i to_x = _mm512_load_si512(of_x), to_y = _mm512_load_si512(of_y), join = _mm512_load_si512(both);
  const __m512i w0 = _mm512_load_si512(quad), w1 = _mm512_add_epi32(w0, _mm512_set1_epi32(1)),
                w2 = _mm512_add_epi32(w0, _mm512_set1_epi32(2));
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  constexpr int NARROW = BITS > 4 ? BITS - 4 : BITS;  // bits of words that hold several groups
  const __m512i from = _mm512_srli_epi32(lane, NARROW == 1 ? 2 : 1);
  const __m512i shift = NARROW == 1 ? _mm512_and_si512(lane, _mm512_set1_epi32(3))
                                    : _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(1)), 1);
  const auto spread = [&](U v) { return (U)_mm512_srlv_epi32(_mm512_permutexvar_epi32(from, (__m512i)v), shift); };
  const auto fused = [&](U x, U y) { return (U)_mm512_permutex2var_epi32((__m512i)x, join, (__m512i)y); };
  const int first = BITS == 5 || BITS == 6 ? layout.groups : count, rest = count - first;
  for (int p = 0; p < TILE / 2; p++, pairs += size) {
    const uint32_t *a = words + 2 * p * count, *b = a + count;
    if (next) {
      fetch(next + 2 * p * count);
      fetch(next + (2 * p + 1) * count);
    }
    const U u = load_words(a, first), v = load_words(b, first);
    U x = join_low(u, v), y = join_high(u, v), high_x{}, high_y{};
    if (BITS <= 2) {
      x = spread(x);
      y = spread(y);
    } else if (BITS == 3) {
      const U q0 = (U)_mm512_permutex2var_epi32((__m512i)x, w0, (__m512i)y);
      const U q1 = (U)_mm512_permutex2var_epi32((__m512i)x, w1, (__m512i)y);
      const U q2 = (U)_mm512_permutex2var_epi32((__m512i)x, w2, (__m512i)y);
      const U fourth = (q0 >> 3 & 0x11111111u) | (q1 >> 2 & 0x22222222u) | (q2 >> 1 & 0x44444444u);
      x = (U)_mm512_permutex2var_epi32((__m512i)x, to_x, (__m512i)fourth);
      y = (U)_mm512_permutex2var_epi32((__m512i)y, to_y, (__m512i)fourth);
    } else if (BITS == 5 || BITS == 6) {
      const U s = load_words(a + first, rest), t = load_words(b + first, rest);
      high_x = spread(join_low(s, t));
      high_y = spread(join_high(s, t));
    }
    if (FILL == Fill::ONE) {
      expand<BITS>(fused(x, y), fused(high_x, high_y), table, stride, pairs);
    } else if (FILL == Fill::EVEN) {
      expand<BITS>(x, high_x, table, stride, pairs);
      expand<BITS>(y, high_y, table, stride, pairs + 16);
    } else {
      // Lanes from `half` on continue with y.
      const __m512i more = _mm512_add_epi32(lane, _mm512_set1_epi32(16 - half));
      expand<BITS>(fused(x, y), fused(high_x, high_y), table, stride, pairs);
      expand<BITS>((U)_mm512_permutexvar_epi32(more, (__m512i)y), (U)_mm512_permutexvar_epi32(more, (__m512i)high_y),
                   table, stride, pairs + 16);
    }
  }
}
#endif

// words [64][W] to pairs [32][layout.size]; scratch: 2 [32][layout.stride] + SLACK. next: as above.
template <int BITS>
inline void unpack_values(const uint32_t* words, const ValueLayout& layout, const Table& centroids,
                          const uint32_t* next, uint32_t* scratch, uint32_t* pairs) {
  const Table::Loaded table = centroids.loaded();
  const int count = layout.words, half = layout.half, stride = layout.stride;
#if defined(TQ_AVX512)
  if (half <= 8) return unpack_short_values<BITS, Fill::ONE>(words, layout, centroids, next, pairs);
  if (half == 16) return unpack_short_values<BITS, Fill::EVEN>(words, layout, centroids, next, pairs);
  if (half < 16) return unpack_short_values<BITS, Fill::UNEVEN>(words, layout, centroids, next, pairs);
#endif
  uint32_t* upper = scratch + TILE / 2 * stride + SLACK;
  for (int p = 0; p < TILE / 2; p++) {
    const uint32_t *a = words + 2 * p * count, *b = a + count;
    uint32_t *row = scratch + p * stride, *high = upper + p * stride;
    for (int w = 0; next && w < 2 * count; w += 16) fetch(next + 2 * p * count + w);
    if (BITS == 1) spread_words<4>(a, b, half, row);
    if (BITS == 2) spread_words<2>(a, b, half, row);
    if (BITS == 3 || BITS == 8) join_words(a, b, count, half, row);
    if (BITS == 4 || BITS == 5 || BITS == 6) join_words(a, b, half, half, row);
    if (BITS == 5) spread_words<4>(a + half, b + half, half, high);
    if (BITS == 6) spread_words<2>(a + half, b + half, half, high);
  }
  for (int p = 0; BITS == 3 && p < TILE / 2; p++) {
    uint32_t* row = scratch + p * stride;
    fourth_groups(row, layout.quads, row + count);
    fourth_groups(row + half, layout.quads, row + half + count);
  }
  for (int p = 0; p < TILE / 2; p++) {
    for (int l = 0; l < stride; l += LANES) {
      const U high = BITS == 5 || BITS == 6 ? load<U>(upper + p * stride + l) : U{};
      expand<BITS>(load<U>(scratch + p * stride + l), high, table, stride, pairs + p * layout.size + l);
    }
  }
}

#define TQ_FOR_BITS(bits, CALL) \
  switch (bits) {               \
    case 1: CALL(1); break;     \
    case 2: CALL(2); break;     \
    case 3: CALL(3); break;     \
    case 4: CALL(4); break;     \
    case 5: CALL(5); break;     \
    case 6: CALL(6); break;     \
    default: CALL(8); break;    \
  }

}  // namespace tq::attention
