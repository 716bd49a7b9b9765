// What the kernels of a codec share: its tables, the rotation (section 3.4) and the packing (section 3.7).
#pragma once
#include <cstring>

#include "numerics.h"
#include "simd.h"

namespace tq {

constexpr int MAX_DIM = 1024;
constexpr int MAX_PALEY = 100;
constexpr int SIGN_CENTROID = 127;

enum Type : int32_t { FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2 };

// The tables of a codec; the Python side has the same structure.
struct Codec {
  int32_t dim, bits, prod;                    // bits: of the Lloyd-Max part
  int32_t paley, blocks;                      // D = m 2^k: m, 2^k
  int32_t words, sign_words;                  // words of a vector
  int32_t scale_shift, sign_scale_shift;      // κ, κ2
  int32_t boundary;                           // K of section 3.5
  const int32_t *signs, *sign_signs;          // [D] 0 for +1 and -1 for -1; streams 0 and 1
  const uint8_t *rows, *columns;              // [m, m] where the rows and columns of P_m hold +1, then anything
  const int32_t *row_counts, *column_counts;  // [m] how many that are
  const int32_t* ascending;                   // [2^b] centroids
  const int32_t* by_code;                     // [2^b] centroids by packed code
};

// S_n y for n = 2^k SIMD vectors, in place.
inline void sylvester(Ints* y, int n) {
  int h = 1;
  if (__builtin_ctz(unsigned(n)) & 1) {
    for (int i = 0; i < n; i += 2) {
      const Ints a = y[i], b = y[i + 1];
      y[i] = a + b;
      y[i + 1] = a - b;
    }
    h = 2;
  }
  for (; h < n; h *= 4) {
    for (int start = 0; start < n; start += 4 * h) {
      for (int i = start; i < start + h; i++) {
        const Ints a = y[i], b = y[i + h], c = y[i + 2 * h], d = y[i + 3 * h];
        const Ints ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
        y[i] = ab + cd;
        y[i + h] = a_b + c_d;
        y[i + 2 * h] = ab - cd;
        y[i + 3 * h] = a_b - c_d;
      }
    }
  }
}

// (P (x) S) y in place, P given by where its rows hold +1.
inline void hadamard(const Codec& codec, const uint8_t* plus, const int32_t* counts, Ints* y) {
  const int m = codec.paley, n = codec.blocks;
  for (int block = 0; block < m; block++) sylvester(y + block * n, n);
  if (m == 1) return;
  Ints column[MAX_PALEY];
  for (int u = 0; u < n; u++) {
    Ints total{};
    for (int b = 0; b < m; b++) {
      column[b] = y[b * n + u];
      total += column[b];
    }
    for (int a = 0; a < m; a++) {
      // What is not added is subtracted.
      const uint8_t* row = plus + a * m;
      Ints sum{};
      for (int j = 0; j < counts[a]; j++) sum += column[row[j]];
      y[a * n + u] = sum + sum - total;
    }
  }
}

// x or -x; a sign is 0 or -1, one for all lanes or one each.
inline Ints with_sign(Ints x, int32_t sign) { return (x ^ sign) - sign; }
inline Ints with_sign(Ints x, Ints sign) { return (x ^ sign) - sign; }

// H y and H^T y; signs are applied by the caller.
inline void rotate(const Codec& codec, Ints* y) { hadamard(codec, codec.rows, codec.row_counts, y); }
inline void rotate_back(const Codec& codec, Ints* y) { hadamard(codec, codec.columns, codec.column_counts, y); }

// SIMD vectors that hold D coordinates and zeros up to whole groups of 8.
inline int padded(int dim) { return (dim + 7) & ~7; }

// Bits shift .. shift + 3 of the codes of one group, in the nibbles of a word.
inline Words group_nibbles(const Ints* codes, int shift, int mask) {
  Words word{};
  for (int n = 0; n < 8; n++) word |= reinterpret_cast<Words>((codes[n] >> shift) & mask) << (4 * n);
  return word;
}

// `bits` bits of each code, from bit `shift` on, as words; codes are padded with zeros. bits: 1 to 4.
inline Words* pack_nibbles(const Ints* codes, int dim, int bits, int shift, Words* words) {
  const int groups = (dim + 7) / 8, mask = (1 << bits) - 1;
  if (bits == 3) {
    for (int quad = 0; quad < groups; quad += 4, words += 3) {
      const int here = groups - quad;
      for (int j = 0; j < here && j < 3; j++) words[j] = group_nibbles(codes + 8 * (quad + j), shift, mask);
      if (here < 4) return words + here;
      const Words fourth = group_nibbles(codes + 8 * (quad + 3), shift, mask);
      for (int j = 0; j < 3; j++) words[j] |= ((fourth >> j) & 0x11111111u) << 3;
    }
    return words;
  }
  const int each = 4 / bits;
  for (int group = 0; group < groups; group += each) {
    Words word{};
    for (int j = 0; j < each && group + j < groups; j++) {
      word |= group_nibbles(codes + 8 * (group + j), shift, mask) << (bits * j);
    }
    *words++ = word;
  }
  return words;
}

// Codes [padded D] to words, LANES vectors at a time. For 8 bits the codes are the centroids.
inline void pack(const Ints* codes, int dim, int bits, Words* words) {
  if (bits == 8) {
    for (int d = 0; d < dim; d += 4) {
      Words word{};
      for (int k = 0; k < 4; k++) word |= reinterpret_cast<Words>(codes[d + k] & 255) << (8 * k);
      *words++ = word;
    }
    return;
  }
  Words* rest = pack_nibbles(codes, dim, bits < 4 ? bits : 4, 0, words);
  if (bits > 4) pack_nibbles(codes, dim, bits - 4, 4, rest);
}

// The inverse of pack_nibbles: adds its bits, moved up by `shift`, to codes [padded D].
inline const Words* unpack_nibbles(const Words* words, int dim, int bits, int shift, Ints* codes) {
  const int groups = (dim + 7) / 8, mask = (1 << bits) - 1;
  const auto nibble = [](Words word, int n, int keep) { return reinterpret_cast<Ints>(word >> (4 * n)) & keep; };
  if (bits == 3) {
    for (int quad = 0; quad < groups; quad += 4, words += 3) {
      const int here = groups - quad;
      for (int j = 0; j < here && j < 3; j++) {
        for (int n = 0; n < 8; n++) codes[8 * (quad + j) + n] |= nibble(words[j], n, mask) << shift;
      }
      if (here < 4) return words + here;
      Words fourth{};
      for (int j = 0; j < 3; j++) fourth |= ((words[j] >> 3) & 0x11111111u) << j;
      for (int n = 0; n < 8; n++) codes[8 * (quad + 3) + n] |= nibble(fourth, n, mask) << shift;
    }
    return words;
  }
  const int each = 4 / bits;
  for (int group = 0; group < groups; group += each, words++) {
    for (int j = 0; j < each && group + j < groups; j++) {
      for (int n = 0; n < 8; n++) {
        codes[8 * (group + j) + n] |= nibble(*words >> (bits * j), n, mask) << shift;
      }
    }
  }
  return words;
}

// The inverse of pack: codes [padded D], signed for 8 bits.
inline void unpack(const Words* words, int dim, int bits, Ints* codes) {
  if (bits == 8) {
    for (int d = 0; d < dim; d += 4) {
      const Ints word = reinterpret_cast<Ints>(*words++);
      for (int k = 0; k < 4; k++) codes[d + k] = (word << (24 - 8 * k)) >> 24;
    }
    return;
  }
  std::memset(codes, 0, std::size_t(padded(dim)) * sizeof(Ints));
  const Words* rest = unpack_nibbles(words, dim, bits < 4 ? bits : 4, 0, codes);
  if (bits > 4) unpack_nibbles(rest, dim, bits - 4, 4, codes);
}

// LANES words apart in memory, and together. `there` of the lanes exist; the others read as zeros.
inline void gather_words(const uint32_t* from, int width, int there, Words* to) {
  for (int w = 0; w < width; w++) {
    Words word{};
    for (int lane = 0; lane < there; lane++) word[lane] = from[std::size_t(lane) * width + w];
    to[w] = word;
  }
}
inline void scatter_words(const Words* from, int width, int there, uint32_t* to) {
  const uint32_t* flat = reinterpret_cast<const uint32_t*>(from);
  for (int lane = 0; lane < there; lane++) {
    for (int w = 0; w < width; w++) to[std::size_t(lane) * width + w] = flat[w * LANES + lane];
  }
}

}  // namespace tq
