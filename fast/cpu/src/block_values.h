// Weighted sums of values, their tree, and the output (section 5).
#pragma once
#include "block.h"

namespace tq::attention {

// Sums of the packed values of tile t for rows from .. to - 1, whose shares are known.
inline void Block::packed_values(int t, int from, int to) {
  const size_t at = size_t(kv * a.value_tiles + t) * TILE;
  const uint32_t* words = a.value_words + at * p.values.words;
  const uint32_t* next = t + 1 < a.value_tiles ? words + TILE * p.values.words : nullptr;
  __builtin_prefetch(a.value_scales + at + TILE);
  __builtin_prefetch(a.value_scales + at + TILE + TILE / 2);
#define TQ_VALUES(BITS) unpack_values<BITS>(words, p.values, p.value_table, next, joined, value_pairs)
  TQ_FOR_BITS(p.values.bits, TQ_VALUES)
#undef TQ_VALUES
  const int np = p.np;
  // Few rows at a time, so that their sums stay in the first cache until they are merged.
  for (int first = from; first < to; first += FEW) {
    const int last = std::min(first + FEW, to);
    gemm(last - first, np, TILE / 2, reinterpret_cast<const uint32_t*>(shares + first * TILE), TILE / 2, value_pairs,
         size_t(np), sums, size_t(np));
    for (int r = first; r < last; r++) {
      merge_sums(current.packed + size_t(r) * np, current.packed_exponent[r], sums + size_t(r - first) * np,
                 packed_e[r], np);
    }
  }
}

// The same of the first `count` values of a tile, raw; they are in `snapped`.
inline void Block::raw_values(int from, int to, int count) {
  const int dv = p.dv, nr = p.nr, pairs = (count + 1) / 2;
  if (count & 1) std::memset(snapped + size_t(count) * dv, 0, sizeof(int16_t) * size_t(dv));
  for (int i = 0; i < pairs; i++) {
    const int16_t *one = snapped + size_t(2 * i) * dv, *two = one + dv;
    uint32_t* pair = value_pairs + size_t(i) * nr;
    for (int d = 0; d < dv; d++) pair[d] = uint32_t(uint16_t(one[d])) | uint32_t(uint16_t(two[d])) << 16;
    for (int d = dv; d < nr; d++) pair[d] = 0;
  }
  gemm(2 * (to - from), nr, pairs, reinterpret_cast<const uint32_t*>(raw_shares_of + 2 * from * TILE), TILE / 2,
       value_pairs, size_t(nr), sums, size_t(nr));
  for (int r = from; r < to; r++) {
    const int32_t* high = sums + size_t(r - from) * 2 * nr;
    merge_halves(current.raw + size_t(r) * nr, current.raw_exponent[r], high, high + nr, raw_e[r], nr);
  }
}

inline void Block::tile(int t) {
  const int64_t j0 = int64_t(t) * TILE;
  int from = 0, to = rows;
  // Positions do not decrease, so the rows that see something of the tile are neighbours.
  while (from < to && (position[from] < 0 || (a.causal && position[from] < j0))) from++;
  if (a.window) {
    while (from < to && position[to - 1] - (j0 + TILE - 1) >= a.window) to--;
  }
  if (from == to) return;
  int packed_from = from;
  while (packed_from < to && limit[packed_from] <= t) packed_from++;
  const int count = int(std::min<int64_t>(TILE, length - j0));
  const bool some_packed = packed_from < to, some_raw = from < packed_from;
  // In tile 0 all rows read the first tokens raw.
  const int raw_to = t == 0 ? to : packed_from, raw_count = some_raw ? count : std::min(FIRST, count);
  packed_poison = raw_poison = 0;
  if (some_packed) packed_keys(t, packed_from, to);
  if (from < raw_to) {
    // Rows that read all of the tile raw need all tokens; the others overwrite only their first ones.
    if (some_raw) raw_keys(t, from, packed_from, count);
    if (t == 0 && some_packed) raw_keys(t, packed_from, to, FIRST);
    if (some_raw && t == 0 && some_packed) raw_poison = snap_tokens(raw_key, t, count, 14, key_exponent);
  }
  if (!p.scores) {
    if (some_packed) {
      const size_t at = size_t(kv * a.value_tiles + t) * TILE;
      packed_poison |= scales_of(a.value_scales + at, value_scale);
      if (t == 0) {
        for (int i = 0; i < FIRST; i++) value_scale[i] = 0.0f;
      }
    }
    if (from < raw_to) raw_poison |= snap_tokens(raw_value, t, raw_count, 13, value_exponent);
  }
  constexpr uint64_t first_tokens = (uint64_t(1) << FIRST) - 1;
  for (int r = from; r < to; r++) {
    int32_t* row = logits + r * TILE;
    const bool packed = r >= packed_from;
    uint64_t poison = packed ? packed_poison : raw_poison;
    if (packed && t == 0) poison = (packed_poison & ~first_tokens) | (raw_poison & first_tokens);
    if (bad[r]) poison = ~uint64_t(0);
    if (a.mask || count < TILE || (a.causal && position[r] < j0 + TILE - 1) ||
        (a.window && position[r] - j0 >= a.window)) {
      poison |= apply_mask(r, t, row);
    }
    if (p.scores) {
      write_logits(r, t, row, poison);
      continue;
    }
    alignas(64) int32_t weight[TILE];
    int e = IDENTITY, den = 0;
    packed_e[r] = raw_e[r] = IDENTITY;
    if (!weigh(row, p.weights, weight, e, den)) {
      std::memset(shares + r * TILE, 0, sizeof(int16_t) * TILE);
      std::memset(raw_shares_of + 2 * r * TILE, 0, sizeof(int16_t) * 2 * TILE);
      continue;
    }
    met[r] |= MET_ALLOWED;
    if (poison) {
      uint64_t allowed = 0;
      for (int j = 0; j < TILE; j++) allowed |= uint64_t(row[j] != HIDDEN) << j;
      if (allowed & poison) met[r] |= MET_POISON;
    }
    merge_number(current.den[r], current.den_exponent[r], float(den), e);
    if (packed) {
      const int of_packed = packed_shares(weight, value_scale, shares + r * TILE);
      packed_e[r] = of_packed > IDENTITY ? e + of_packed : IDENTITY;
    }
    if (!packed || t == 0) {
      int16_t* high = raw_shares_of + 2 * r * TILE;
      const int of_raw = raw_shares(weight, value_exponent, packed ? FIRST : count, high, high + TILE);
      raw_e[r] = of_raw > IDENTITY ? e + of_raw : IDENTITY;
    }
  }
  if (p.scores) return;
  // Raw first: their integers are still in `snapped`.
  if (some_raw) raw_values(from, packed_from, count);
  if (t == 0 && some_packed) raw_values(packed_from, to, FIRST);
  if (some_packed) packed_values(t, packed_from, to);
}

// The sums of a split enter the tree of their group like a carry enters a binary counter.
inline void Block::push(int split) {
  int depth = 0;
  for (; split >> depth & 1; depth++) {
    if (full >> depth & 1) {
      for (int r = 0; r < rows; r++) current.merge_row(r, level[depth], p.np, p.nr);
    }
  }
  full = (full & ~((1 << depth) - 1)) | 1 << depth;
  std::swap(current, level[depth]);
}

inline void Block::run(int item, int group, const Sums* into, int* met_into) {
  locate(item);
  const int newest = position[rows - 1], first_split = group * p.splits;
  full = 0;
  base_from = base_to = 0;
  int begin = first_split, end = first_split;
  if (newest >= 0) {
    prepare();
    int64_t oldest = 0;
    for (int r = rows - 1; r >= 0 && position[r] >= 0; r--) oldest = position[r];
    if (a.window) begin = std::max<int>(begin, int(std::max<int64_t>(oldest - a.window + 1, 0) / (SPLIT * TILE)));
    const int64_t reach = a.causal ? std::min<int64_t>(newest + 1, length) : length;
    end = std::min<int>(first_split + p.splits, int((reach + SPLIT * TILE - 1) / (SPLIT * TILE)));
  }
  for (int split = begin; split < end; split++) {
    if (!p.scores) current.clear(0, rows);
    const int last = int(std::min<int64_t>(SPLIT * (split + 1), (length + TILE - 1) / TILE));
    for (int t = SPLIT * split; t < last; t++) tile(t);
    if (!p.scores) push(split - first_split);
  }
  if (p.scores) return;
  const Sums total = into ? *into : current;
  total.clear(0, rows);
  for (int depth = 0; full >> depth; depth++) {
    if (!(full >> depth & 1)) continue;
    for (int r = 0; r < rows; r++) total.merge_row(r, level[depth], p.np, p.nr);
  }
  if (met_into) std::memcpy(met_into, met, sizeof(int) * size_t(rows));
}

// y = RN32(a / b) 2^exponent with the limits of section 5; b > 0.
inline void quotients(float* numbers, int count, float b, int exponent) {
  const int32_t ib = bits<int32_t>(b);
  const float fb = bits<float>((ib & 0x7fffff) | 0x3f800000);
  const int32_t shift = exponent - (ib >> 23 & 255);
  for (int i = 0; i < count; i++) {
    const int32_t ia = bits<int32_t>(numbers[i]);
    const int32_t q = bits<int32_t>(bits<float>((ia & int32_t(0x807fffff)) | 0x3f800000) / fb);
    const int32_t k = (ia >> 23 & 255) + shift, top_bit = (q >> 23 & 255) - 127 + k;
    int32_t y = int32_t(uint32_t(q) + (uint32_t(k) << 23));
    y = top_bit >= 128 ? (q & int32_t(0x80000000u)) | 0x7f800000 : y;
    y = top_bit < -100 || numbers[i] == 0.0f ? 0 : y;
    numbers[i] = bits<float>(y);
  }
}

inline void Block::finish(int item, const Sums& total, const int* what_met) {
  locate(item);
  const int dv = p.dv;
  const size_t bytes = a.q_type == 2 ? 4 : 2;
  for (int r = 0; r < rows; r++) {
    char* out = static_cast<char*>(a.out) + out_row(r) * size_t(dv) * bytes;
    float den = total.den[r];
    int den_exponent = total.den_exponent[r], what = position[r] < 0 ? 0 : what_met[r];
    if (a.sinks && what) {
      const float sink = a.sinks[head * a.group + (m0 + r) % a.group];
      if (is_nan(sink)) {
        what |= MET_POISON;
      } else if (bits<uint32_t>(sink) != 0xff800000u) {
        const int32_t logit = tq::natural_logit(sink), e = (logit + 4095) >> 12;
        const int distance = e * 4096 - logit;  // below 2^12, so s is 0
        const float product =
            p.weights.high_float[distance >> 6] * p.weights.low_float[distance & 63] * 0x1p-11f;
        merge_number(den, den_exponent, std::rint(product), e);
      }
    }
    if (!what || what & MET_POISON) {
      const float same = what ? bits<float>(0x7fc00000) : 0.0f;
      for (int d = 0; d < dv; d++) x[d] = same;
      narrow(x, int(a.q_type), dv, out);
      continue;
    }
    int packed = IDENTITY, raw = total.raw_exponent[r];
    if (total.packed_exponent[r] > IDENTITY) {
      const float* from = total.packed + size_t(r) * p.np;
      for (int d = 0; d < dv; d++) x[d] = from[p.position_of[size_t(d)]];
      const float most = top(x, dv);
      if (most >= TINY) packed = total.packed_exponent[r] + vector_exponent(most) - 26 - int(a.value_shift);
      snap_all(x, dv, most, 13, nullptr);
      hadamard(p.value_rotation, x, spare);
      for (int d = 0; d < dv; d++) x[d] *= p.value_rotation.signs[d];
    } else {
      std::memset(x, 0, sizeof(float) * size_t(dv));
    }
    if (raw > IDENTITY) {
      std::memcpy(y, total.raw + size_t(r) * p.nr, sizeof(float) * size_t(dv));
      raw -= 26;
    } else {
      std::memset(y, 0, sizeof(float) * size_t(dv));
    }
    const int m = std::max(packed, raw);
    const float of_x = packed - m < -40 ? 0.0f : pow2(packed - m), of_y = raw - m < -40 ? 0.0f : pow2(raw - m);
    for (int d = 0; d < dv; d++) {
      float one = x[d] * of_x, two = y[d] * of_y;
      one = std::fabs(one) < VANISHING ? 0.0f : one;
      two = std::fabs(two) < VANISHING ? 0.0f : two;
      const float sum = one + two;
      x[d] = std::fabs(sum) < VANISHING ? 0.0f : sum;
    }
    quotients(x, dv, std::max(den, 1.0f), m - den_exponent);
    narrow(x, int(a.q_type), dv, out);
  }
}

}  // namespace tq::attention
