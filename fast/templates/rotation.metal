// Section 3.4 for one vector of m 2^k numbers in threadgroup memory, by the 32 lanes of one simdgroup. Integers below
// 2^24 are exact as floats. Signs are applied by the caller. `paley` holds the rows of P_m as bits (1 for -1), or the
// columns for the way back; S_k is its own transpose.
template <int M, int K>
inline void tq_rotate(threadgroup float* v, int lane, device const uint* paley) {
  const int half_size = (M << K) >> 1;
  for (int h = 1; h < (1 << K); h <<= 1) {
    for (int p = lane; p < half_size; p += 32) {
      const int i = ((p & ~(h - 1)) << 1) | (p & (h - 1));
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (M == 1) {
    return;
  }
  const int words = (M + 31) / 32;
  for (int u = 0; u < (1 << K); u++) {
    float row[(M + 31) / 32];
    TQ_UNROLL
    for (int j = 0; j < words; j++) {
      const int a = lane + 32 * j;
      float sum = 0.0f;
      if (a < M) {
        for (int w = 0; w < words; w++) {
          uint bits = paley[a * words + w];
          for (int b = 32 * w; b < min(32 * w + 32, M); b++) {
            const float x = v[(b << K) + u];
            sum += (bits & 1u) != 0u ? -x : x;
            bits >>= 1;
          }
        }
      }
      row[j] = sum;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    TQ_UNROLL
    for (int j = 0; j < words; j++) {
      if (lane + 32 * j < M) {
        v[((lane + 32 * j) << K) + u] = row[j];
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}
