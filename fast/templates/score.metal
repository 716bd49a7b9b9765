// Codes to centroids, and dot products of one key with ROWS queries. Sums of products of integers stay below 2^24 in a
// float before they move to an int, so they are exact in any order, fused or not.

// Look-up tables in threadgroup memory. Up to 4 bits: a byte of two nibbles gives two centroids. 5 and 6 bits: one code, one
// centroid. 8 bits need none.
template <int BITS>
inline void tq_fill_table(threadgroup float2* table, device const uint* tables, int tid, int threads) {
  for (int byte = tid; byte < 256; byte += threads) {
    const uint mask = (1u << BITS) - 1u;
    table[byte] = float2(tq_centroid<BITS>(uint(byte) & mask, tables + TQ_MAGNITUDES),
                         tq_centroid<BITS>((uint(byte) >> 4) & mask, tables + TQ_MAGNITUDES));
  }
}

template <int BITS>
inline void tq_fill_table(threadgroup float* table, device const uint* tables, int tid, int threads) {
  if (BITS < 8) {
    for (int code = tid; code < (1 << BITS); code += threads) {
      table[code] = tq_centroid<BITS>(uint(code), tables + TQ_MAGNITUDES);
    }
  }
}

// The words of a group of eight coordinates, and centroids of its pair 0 .. 3.
template <int BITS, int SIZE>
inline uint2 tq_group(device const uint* words, int group) {
  if (BITS == 8) {
    return uint2(words[2 * group], 2 * group + 1 < (SIZE + 3) / 4 ? words[2 * group + 1] : 0u);
  }
  return uint2(tq_nibbles<BITS>(words, group),
               BITS > 4 ? tq_nibbles<(BITS > 4 ? BITS - 4 : 1)>(words + (SIZE + 7) / 8, group) : 0u);
}

template <int BITS>
inline float2 tq_pair(uint2 codes, int pair, threadgroup const float2* table) {
  return table[(codes.x >> (8 * pair)) & 255u];
}

template <int BITS>
inline float2 tq_pair(uint2 codes, int pair, threadgroup const float* table) {
  if (BITS == 8) {
    const uint both = (pair < 2 ? codes.x : codes.y) >> (16 * (pair & 1));
    return float2(float(as_type<char>(uchar(both & 255u))), float(as_type<char>(uchar((both >> 8) & 255u))));
  }
  const uint upper = (1u << (BITS > 4 ? BITS - 4 : 1)) - 1u;
  const uint low = codes.x >> (8 * pair), high = codes.y >> (8 * pair);
  return float2(table[(low & 15u) | ((high & upper) << 4)], table[((low >> 4) & 15u) | (((high >> 4) & upper) << 4)]);
}

// total[r] = sum over d of query[r][d] c_d; query numbers have at most 12 bits and a sign, centroids 7.
template <int BITS, typename Table>
inline void tq_score(device const uint* words, Table table, threadgroup const float4* query, thread int* total) {
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    total[r] = 0;
  }
  for (int first = 0; first < (DK + 7) / 8; first += 4) {
    float run[ROWS];
    TQ_UNROLL
    for (int r = 0; r < ROWS; r++) {
      run[r] = 0.0f;
    }
    TQ_UNROLL
    for (int i = 0; i < 4; i++) {
      if (first + i < (DK + 7) / 8) {
        const uint2 codes = tq_group<BITS, DK>(words, first + i);
        const float2 a = tq_pair<BITS>(codes, 0, table), b = tq_pair<BITS>(codes, 1, table);
        const float2 c = tq_pair<BITS>(codes, 2, table), d = tq_pair<BITS>(codes, 3, table);
        TQ_UNROLL
        for (int r = 0; r < ROWS; r++) {
          threadgroup const float4* at = query + (r * VECTOR >> 2) + 2 * (first + i);
          const float4 low = at[0], high = at[1];
          run[r] = fma(a.y, low.y, fma(a.x, low.x, run[r]));
          run[r] = fma(b.y, low.w, fma(b.x, low.z, run[r]));
          run[r] = fma(c.y, high.y, fma(c.x, high.x, run[r]));
          run[r] = fma(d.y, high.w, fma(d.x, high.z, run[r]));
        }
      }
    }
    TQ_UNROLL
    for (int r = 0; r < ROWS; r++) {
      total[r] += int(run[r]);
    }
  }
}

// The same for the sign code of `prod`: centroids are 127 and -127, and the sum of queries fits a float.
inline void tq_score_signs(device const uint* words, threadgroup const float* query, thread int* total) {
  float sum[ROWS];
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    sum[r] = 0.0f;
  }
  for (int group = 0; group < (DK + 7) / 8; group++) {
    const uint signs = tq_nibbles<1>(words, group);
    TQ_UNROLL
    for (int n = 0; n < 8; n++) {
      const float sign = ((signs >> (4 * n)) & 1u) != 0u ? -1.0f : 1.0f;
      TQ_UNROLL
      for (int r = 0; r < ROWS; r++) {
        sum[r] = fma(sign, query[r * VECTOR + 8 * group + n], sum[r]);
      }
    }
  }
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    total[r] = 127 * int(sum[r]);
  }
}

// A raw key with both halves of every query: 16 products of 20 bits make at most 2^24.
inline void tq_score_raw(
    device const KT* key, float unit, threadgroup const char2* query, thread int* high, thread int* low) {
  TQ_UNROLL
  for (int r = 0; r < ROWS; r++) {
    high[r] = 0;
    low[r] = 0;
  }
  for (int first = 0; first < DK; first += 16) {
    float run_high[ROWS], run_low[ROWS];
    TQ_UNROLL
    for (int r = 0; r < ROWS; r++) {
      run_high[r] = 0.0f;
      run_low[r] = 0.0f;
    }
    for (int d = first; d < min(first + 16, DK); d++) {
      const float x = tq_snap(float(key[d]), unit);
      TQ_UNROLL
      for (int r = 0; r < ROWS; r++) {
        const char2 two = query[r * DK + d];
        run_high[r] = fma(float(two.x), x, run_high[r]);
        run_low[r] = fma(float(two.y), x, run_low[r]);
      }
    }
    TQ_UNROLL
    for (int r = 0; r < ROWS; r++) {
      high[r] += int(run_high[r]);
      low[r] += int(run_low[r]);
    }
  }
}

// s U of section 4 in place: v holds Q 2^-f, whose largest magnitude is given.
inline void tq_snap_signed(threadgroup float* v, int size, float largest, device const uint* signs, int lane) {
  const float unit = tq_unit(largest, 13);
  for (int d = lane; d < size; d += 32) {
    const float x = tq_snap(v[d], unit);
    v[d] = ((signs[d >> 5] >> (d & 31)) & 1u) != 0u ? -x : x;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// W of section 4 in place, zeros behind it: codes beyond the head size meet zeros.
inline void tq_snap_padded(threadgroup float* v, int size, int padded, float largest, int lane) {
  const float unit = tq_unit(largest, 12);
  for (int d = lane; d < padded; d += 32) {
    v[d] = d < size ? tq_snap(v[d], unit) : 0.0f;
  }
}
