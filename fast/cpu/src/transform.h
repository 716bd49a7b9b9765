// The rotation of section 3.4 on one vector of floats that hold integers below 2^24: exact in any order.
#pragma once
#include "lanes.h"

namespace tq::attention {

// A rotation. signs: [D] +-1 of streams 0 and 1. paley: [m][D] +-1; row b holds for every coordinate a 2^k + u what it
// takes of block b: P[a, b], or P[b, a] for a rotation back.
struct Rotation {
  int dim, m, block;  // D = m 2^k, block = 2^k
  const float *signs, *signs_two, *paley;
};

typedef float Wide __attribute__((vector_size(64)));
typedef int32_t WideInts __attribute__((vector_size(64)));

// Butterflies of distance 1, 2, 4 and 8 among 16 neighbours, in place.
TQ_INLINE void near_butterflies(float* at) {
  Wide x;
  std::memcpy(&x, at, sizeof x);
  const WideInts minus1 = {0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1};
  const WideInts minus2 = {0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1};
  const WideInts minus4 = {0, 0, 0, 0, -1, -1, -1, -1, 0, 0, 0, 0, -1, -1, -1, -1};
  const WideInts minus8 = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};
  const int32_t sign = int32_t(0x80000000u);
  Wide other = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  x = other + (Wide)((WideInts)x ^ (minus1 & sign));
  other = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  x = other + (Wide)((WideInts)x ^ (minus2 & sign));
  other = __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x = other + (Wide)((WideInts)x ^ (minus4 & sign));
  other = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x = other + (Wide)((WideInts)x ^ (minus8 & sign));
  std::memcpy(at, &x, sizeof x);
}

// S_k on n = 2^k numbers.
inline void sylvester(float* x, int n) {
  int distance = 1;
  if (n >= 16) {
    for (int i = 0; i < n; i += 16) near_butterflies(x + i);
    for (distance = 16; distance < n; distance *= 2) {
      for (int start = 0; start < n; start += 2 * distance) {
        for (int i = start; i < start + distance; i += 16) {
          Wide a, b;
          std::memcpy(&a, x + i, sizeof a);
          std::memcpy(&b, x + i + distance, sizeof b);
          const Wide sum = a + b, difference = a - b;
          std::memcpy(x + i, &sum, sizeof sum);
          std::memcpy(x + i + distance, &difference, sizeof difference);
        }
      }
    }
    return;
  }
  for (; distance < n; distance *= 2) {
    for (int i = 0; i < n; i++) {
      if (i & distance) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
}

// (P (x) S) x in place. scratch: [D].
inline void hadamard(const Rotation& r, float* x, float* scratch) {
  for (int b = 0; b < r.m; b++) sylvester(x + b * r.block, r.block);
  if (r.m == 1) return;
  const int dim = r.dim;
  std::memset(scratch, 0, sizeof(float) * size_t(dim));
  for (int b = 0; b < r.m; b++) {
    const float* of_b = x + b * r.block;
    const float* sign = r.paley + size_t(b) * dim;
    if (r.block >= 16) {
      for (int a = 0; a < dim; a += r.block) {
        const float s = sign[a];
        for (int u = 0; u < r.block; u++) scratch[a + u] += s * of_b[u];
      }
    } else {
      float repeated[16];
      for (int i = 0; i < 16; i++) repeated[i] = of_b[i & (r.block - 1)];
      int a = 0;
      for (; a + 16 <= dim; a += 16) {
        for (int i = 0; i < 16; i++) scratch[a + i] += sign[a + i] * repeated[i];
      }
      for (int i = 0; a + i < dim; i++) scratch[a + i] += sign[a + i] * repeated[i];
    }
  }
  std::memcpy(x, scratch, sizeof(float) * size_t(dim));
}

inline float top(const float* x, int count) {
  uint32_t most = 0;
  for (int i = 0; i < count; i++) {
    const uint32_t magnitude = bits<uint32_t>(x[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  return bits<float>(most);
}

// x into its integers (section 3.1), times a sign if there are signs; the largest magnitude is given.
inline void snap_all(float* x, int count, float largest_of_x, int n, const float* signs) {
  const float unit = vector_unit(largest_of_x, n);
  for (int i = 0; i < count; i++) x[i] = std::rint(x[i] * unit);
  if (signs) {
    for (int i = 0; i < count; i++) x[i] *= signs[i];
  }
}

}  // namespace tq::attention
