// Weighted sums of values by tile, and the tree that joins the sums of splits (section 5).

// The shares of one token for all rows; SHARES is ROWS, rounded up to fours above 2.
inline void tq_load_shares(threadgroup const float* from, thread float* u) {
  if (SHARES <= 2) {
    TQ_UNROLL
    for (int r = 0; r < ROWS; r++) {
      u[r] = from[r];
    }
  } else {
    TQ_UNROLL
    for (int r = 0; r < SHARES; r += 4) {
      const float4 four = *(threadgroup const float4*)(from + r);
      u[r] = four.x;
      u[r + (SHARES > 2 ? 1 : 0)] = four.y;
      u[r + (SHARES > 2 ? 2 : 0)] = four.z;
      u[r + (SHARES > 2 ? 3 : 0)] = four.w;
    }
  }
}

// part[2 r], part[2 r + 1]: a pair of coordinates summed over the 64 tokens of a tile; 16 products of 20 bits at a time.
template <int BITS, typename Table>
inline void tq_sum_codes(
    device const uint* words, int pair, Table table, threadgroup const float* share, thread float* part) {
  int total[2 * ROWS];
  TQ_UNROLL
  for (int at = 0; at < 2 * ROWS; at++) {
    total[at] = 0;
  }
  for (int first = 0; first < 64; first += 16) {
    float run[2 * ROWS];
    TQ_UNROLL
    for (int at = 0; at < 2 * ROWS; at++) {
      run[at] = 0.0f;
    }
    for (int t = first; t < first + 16; t++) {
      const float2 c = tq_pair<BITS>(tq_group<BITS, DV>(words + t * WORDS_V, pair >> 2), pair & 3, table);
      float u[SHARES];
      tq_load_shares(share + t * SHARES, u);
      TQ_UNROLL
      for (int r = 0; r < ROWS; r++) {
        run[2 * r] = fma(u[r], c.x, run[2 * r]);
        run[2 * r + 1] = fma(u[r], c.y, run[2 * r + 1]);
      }
    }
    TQ_UNROLL
    for (int at = 0; at < 2 * ROWS; at++) {
      total[at] += int(run[at]);
    }
  }
  TQ_UNROLL
  for (int at = 0; at < 2 * ROWS; at++) {
    part[at] = float(total[at]);
  }
}

// Raw values: `share` holds both halves of U, `unit` the snapping factor of a token, 0 where it adds nothing.
// 32 products of 19 bits at a time.
inline void tq_sum_raw(
    device const VT* recent, device const VT* first_tokens, int recent_from, int token, int count, int pair,
    threadgroup const float* unit, threadgroup const char2* share, thread float* part) {
  int high[2 * ROWS], low[2 * ROWS];
  TQ_UNROLL
  for (int at = 0; at < 2 * ROWS; at++) {
    high[at] = 0;
    low[at] = 0;
  }
  for (int first = 0; first < count; first += 32) {
    float run_high[2 * ROWS], run_low[2 * ROWS];
    TQ_UNROLL
    for (int at = 0; at < 2 * ROWS; at++) {
      run_high[at] = 0.0f;
      run_low[at] = 0.0f;
    }
    for (int t = first; t < min(first + 32, count); t++) {
      if (unit[t] != 0.0f) {
        device const VT* value = token + t >= recent_from ? recent + (token + t - recent_from) * DV
                                                         : first_tokens + (token + t) * DV;
        const float x = rint(float(value[2 * pair]) * unit[t]), y = rint(float(value[2 * pair + 1]) * unit[t]);
        TQ_UNROLL
        for (int r = 0; r < ROWS; r++) {
          const char2 two = share[t * ROWS + r];
          run_high[2 * r] = fma(float(two.x), x, run_high[2 * r]);
          run_high[2 * r + 1] = fma(float(two.x), y, run_high[2 * r + 1]);
          run_low[2 * r] = fma(float(two.y), x, run_low[2 * r]);
          run_low[2 * r + 1] = fma(float(two.y), y, run_low[2 * r + 1]);
        }
      }
    }
    TQ_UNROLL
    for (int at = 0; at < 2 * ROWS; at++) {
      high[at] += int(run_high[at]);
      low[at] += int(run_low[at]);
    }
  }
  TQ_UNROLL
  for (int at = 0; at < 2 * ROWS; at++) {
    part[at] = tq_join(high[at], low[at]);
  }
}

// The four tiles' sums of the row that this lane merges: lanes 8 t .. 8 t + 7 hold tile t, and take row first + t.
inline void tq_gather_tiles(thread const float* part, int first, int lane, thread float2* tile_sums) {
  TQ_UNROLL
  for (int i = 0; i < 4; i++) {
    if (first + i < ROWS) {
      TQ_UNROLL
      for (int t = 0; t < 4; t++) {
        const ushort from = ushort((lane & 7) + 8 * t);
        const float x = simd_shuffle(part[2 * (first + i)], from);
        const float y = simd_shuffle(part[2 * (first + i) + 1], from);
        if ((lane >> 3) == i) {
          tile_sums[t] = float2(x, y);
        }
      }
    }
  }
}

// A split's sums enter the tree of their group like a carry enters a binary counter: a full level is merged from the left.
// stack: [level][row][packed, raw][DV]; exponents: [level][row][3] in threadgroup memory, TQ_IDENTITY where a level holds nothing.
inline void tq_push(
    device float* stack, threadgroup const int* exponents, int depth, int full, int row, int kind, int pair, float2 total,
    int x) {
  for (int level = 0; level < depth; level++) {
    const int y = ((full >> level) & 1) != 0 ? exponents[(level * ROWS + row) * 3 + kind] : TQ_IDENTITY;
    if (y > TQ_IDENTITY) {
      device const float* left = stack + ((level * ROWS + row) * 2 + kind) * DV + 2 * pair;
      total = float2(tq_merge(left[0], y, total.x, x), tq_merge(left[1], y, total.y, x));
      x = max(x, y);
    }
  }
  device float* to = stack + ((depth * ROWS + row) * 2 + kind) * DV + 2 * pair;
  to[0] = total.x;
  to[1] = total.y;
}
