// Queries and their logits (section 4).
#pragma once
#include "block.h"

namespace tq::attention {

inline void Block::locate(int item) {
  kv = item / p.blocks;
  b = kv / a.kv_heads;
  head = kv % a.kv_heads;
  m0 = int64_t(item % p.blocks) * p.rows;
  rows = int(std::min<int64_t>(p.rows, a.group * a.queries - m0));
  const int64_t* row = a.rows + 4 * b;
  length = row[0];
  padding = row[3];
  const auto at = [this](const void* from, int64_t count, int dim, int64_t type) {
    return static_cast<const char*>(from) + size_t(kv * count * dim) * (type == 2 ? 4 : 2);
  };
  raw_key = {at(a.key_first, a.key_first_count, p.dk, a.key_type),
             at(a.key_recent, a.key_recent_count, p.dk, a.key_type), int(a.key_type), p.dk, int(row[1]),
             int(a.key_recent_count), length};
  raw_value = {at(a.value_first, a.value_first_count, p.dv, a.value_type),
               at(a.value_recent, a.value_recent_count, p.dv, a.value_type), int(a.value_type), p.dv, int(row[2]),
               int(a.value_recent_count), length};
  for (int r = 0; r < rows; r++) {
    const int64_t i = length - a.queries + (m0 + r) / a.group;
    position[r] = i < 0 ? -1 : int(i);
    limit[r] = i < 0 ? 0 : packed_tiles(i + 1);
    met[r] = 0;
  }
}

inline void Block::prepare() {
  const int dk = p.dk;
  const bool packed = position[rows - 1] >= 0 && limit[rows - 1] > 0;
  // The integers v as int16 pairs in the order of the unpacked keys, zeros beyond D.
  const auto pairs_of = [dk](const float* v, const KeyLayout& layout, uint32_t* to) {
    alignas(64) uint32_t low[1024 + 8];
    for (int d = 0; d < dk; d++) low[d] = uint32_t(int32_t(v[d])) & 0xffffu;
    for (int d = dk; d < up_to(dk, 8); d++) low[d] = 0;
    const int near = layout.bits == 8 ? 2 : 4;  // pairs that a word or a group yields
    for (int at = 0, i = 0; i < layout.pairs(); at += 2 * near, i += near) {
      for (int n = 0; n < near; n++) to[i + n] = low[at + n] | low[at + near + n] << 16;
    }
  };
  for (int r = 0; r < rows; r++) {
    if (position[r] < 0) continue;
    const size_t element = out_row(r) * size_t(dk) * (a.q_type == 2 ? 4 : 2);
    widen(static_cast<const char*>(a.q) + element, int(a.q_type), dk, x);
    const float factor = float(a.factor);
    for (int d = 0; d < dk; d++) x[d] *= factor;
    float most = top(x, dk);
    bad[r] = !is_finite(most);
    if (bad[r]) {
      std::memset(x, 0, sizeof(float) * size_t(dk));
      most = 0.0f;
    }
    exponent[r] = vector_exponent(most);
    snap_all(x, dk, most, 13, nullptr);
    int16_t* high = reinterpret_cast<int16_t*>(raw_query) + size_t(r) * 2 * dk;
    for (int d = 0; d < dk; d++) {
      const int q = int(x[d]), h = (q + 64) >> 7;
      high[d] = int16_t(h);
      high[dk + d] = int16_t(q - 128 * h);
    }
    if (!packed) continue;
    if (a.factors) {
      const int8_t* f = a.factors + kv * dk;
      for (int d = 0; d < dk; d++) x[d] *= pow2(-f[d]);
    }
    const float divided = top(x, dk);
    snap_all(x, dk, divided, 13, p.key_rotation.signs);
    hadamard(p.key_rotation, x, spare);
    const float turned = top(x, dk);
    const int g = vector_exponent(divided);
    if (p.prod) {
      std::memcpy(y, x, sizeof(float) * size_t(dk));
      snap_all(y, dk, turned, 13, p.key_rotation.signs_two);
      hadamard(p.key_rotation, y, spare);
      const float again = top(y, dk);
      snap_all(y, dk, again, 12, nullptr);
      pairs_of(y, p.signs, twice + size_t(r) * p.signs.pairs());
      twice_exponent[r] =
          exponent[r] + g + vector_exponent(turned) + vector_exponent(again) - 39 - int(a.sign_shift);
    }
    snap_all(x, dk, turned, 12, nullptr);
    pairs_of(x, p.keys, query + size_t(r) * p.keys.pairs());
    rotated[r] = exponent[r] + g + vector_exponent(turned) - 26 - int(a.key_shift);
  }
}

// float32 scales of a tile, 0 for NaN; returns which are NaN.
inline uint64_t Block::scales_of(const uint16_t* from, float* to) const {
  widen(from, 0, TILE, to);
  I any{};
  for (int i = 0; i < TILE; i += LANES) any |= load<F>(to + i) != load<F>(to + i);
  uint64_t nan = 0;
  if (largest(any & 1) == 0) return nan;
  for (int i = 0; i < TILE; i++) {
    nan |= uint64_t(is_nan(to[i])) << i;
    to[i] = is_nan(to[i]) ? 0.0f : to[i];
  }
  return nan;
}

// F_base of up to 64 tiles from t on: the bases are the tokens of one tile.
inline void Block::base_logits(int t) {
  base_from = t;
  base_to = std::min(t + TILE, limit[rows - 1]);
  const int count = base_to - t, columns_here = up_to(count, 16), half = p.dk / 2;
  const size_t first = size_t(kv * a.key_tiles + t);
  std::memcpy(snapped, a.base + first * p.dk, sizeof(int16_t) * size_t(count) * p.dk);
  std::memset(snapped + size_t(count) * p.dk, 0, sizeof(int16_t) * size_t(columns_here - count) * p.dk);
  transpose(reinterpret_cast<const uint32_t*>(snapped), half, columns_here, nullptr, key_pairs);
  gemm(2 * rows, columns_here, half, raw_query, size_t(half), key_pairs, TILE, raw_dots, TILE);
  int e[TILE];
  for (int i = 0; i < count; i++) e[i] = a.base_exponent[first + i];
  for (int r = 0; r < rows; r++) {
    if (position[r] < 0) continue;
    raw_logits(bases + r * TILE, raw_dots + 2 * r * TILE, raw_dots + (2 * r + 1) * TILE, e, exponent[r] - 14, count);
  }
}

// Logits of the packed keys of tile t for rows from .. to - 1.
inline void Block::packed_keys(int t, int from, int to) {
  if (t < base_from || t >= base_to) base_logits(t);
  const size_t at = size_t(kv * a.key_tiles + t) * TILE;
  const uint32_t* words = a.key_words + at * words_of(p.dk, p.keys.bits);
  const int depth = p.keys.pairs();
  const uint32_t* next = t + 1 < a.key_tiles ? words + TILE * words_of(p.dk, p.keys.bits) : nullptr;
  __builtin_prefetch(a.key_scales + at + TILE);
  __builtin_prefetch(a.key_scales + at + TILE + TILE / 2);
#define TQ_KEYS(BITS) unpack_keys<BITS>(words, p.dk, p.key_table, next, columns, key_pairs)
  TQ_FOR_BITS(p.keys.bits, TQ_KEYS)
#undef TQ_KEYS
  gemm(to - from, TILE, depth, query + size_t(from) * depth, size_t(depth), key_pairs, TILE, logits + from * TILE,
       TILE);
  packed_poison = scales_of(a.key_scales + at, key_scale);
  if (p.prod) {
    const int sign_depth = p.signs.pairs();
    unpack_keys<1>(a.sign_words + at * words_of(p.dk, 1), p.dk, p.sign_table, nullptr, columns, key_pairs);
    gemm(to - from, TILE, sign_depth, twice + size_t(from) * sign_depth, size_t(sign_depth), key_pairs, TILE,
         sign_sums + from * TILE, TILE);
    scales_of(a.sign_scales + at, sign_scale);
    for (int i = 0; i < TILE; i++) sign_scale[i] = packed_poison >> i & 1 ? 0.0f : sign_scale[i];
  }
  // |I| is at most 2^12 127 D: a bound for the tile shows that the limits of section 4 are far.
  const float most = 0x1p19f * float(p.dk) * top(key_scale, TILE);
  for (int r = from; r < to; r++) {
    const int32_t base = bases[r * TILE + t - base_from];
    const float reach = most * pow2(clamp(rotated[r], -100, 60));
    if (!p.prod && reach < 0x1p26f && base < (1 << 26) && base > -(1 << 26)) {
      packed_logits_within(logits + r * TILE, key_scale, rotated[r], base);
    } else if (p.prod) {
      packed_logits(logits + r * TILE, key_scale, rotated[r], sign_sums + r * TILE, sign_scale, twice_exponent[r],
                    base);
    } else {
      packed_logits(logits + r * TILE, key_scale, rotated[r], nullptr, nullptr, 0, base);
    }
  }
}

// `count` raw tokens of tile t as integers in `snapped`; returns which are not finite.
inline uint64_t Block::snap_tokens(const RawSource& source, int t, int count, int bits, int* exponents) {
  uint64_t poison = 0;
  const int dim = source.dim;
  for (int i = 0; i < count; i++) {
    widen(source.token(int64_t(t) * TILE + i), source.type, dim, x);
    float most = top(x, dim);
    int16_t* to = snapped + size_t(i) * dim;
    if (!is_finite(most)) {
      poison |= uint64_t(1) << i;
      most = 0.0f;
      std::memset(x, 0, sizeof(float) * size_t(dim));
    }
    exponents[i] = vector_exponent(most);
    const float unit = vector_unit(most, bits);
    for (int d = 0; d < dim; d++) to[d] = int16_t(int(std::rint(x[d] * unit)));
  }
  return poison;
}

// Logits of the first `count` tokens of tile t, raw, for rows from .. to - 1.
inline void Block::raw_keys(int t, int from, int to, int count) {
  raw_poison = snap_tokens(raw_key, t, count, 14, key_exponent);
  const int half = p.dk / 2, columns_here = up_to(count, 16);
  std::memset(snapped + size_t(count) * p.dk, 0, sizeof(int16_t) * size_t(columns_here - count) * p.dk);
  transpose(reinterpret_cast<const uint32_t*>(snapped), half, columns_here, nullptr, key_pairs);
  gemm(2 * (to - from), columns_here, half, raw_query + size_t(2 * from) * half, size_t(half), key_pairs, TILE,
       raw_dots + 2 * from * TILE, TILE);
  for (int r = from; r < to; r++) {
    raw_logits(logits + r * TILE, raw_dots + 2 * r * TILE, raw_dots + (2 * r + 1) * TILE, key_exponent,
               exponent[r] - 15, count);
  }
}

// Hides what row r may not look at in tile t and adds its mask; returns where the mask is NaN.
inline uint64_t Block::apply_mask(int r, int t, int32_t* row) const {
  const int64_t i = position[r], j0 = int64_t(t) * TILE;
  int from = 0, to = int(std::min<int64_t>(TILE, length - j0));
  if (a.causal) to = int(std::min<int64_t>(to, i - j0 + 1));
  if (a.window) from = int(std::max<int64_t>(0, i - a.window + 1 - j0));
  from = std::min(from, TILE);
  for (int j = 0; j < from; j++) row[j] = HIDDEN;
  for (int j = std::max(to, 0); j < TILE; j++) row[j] = HIDDEN;
  uint64_t nan = 0;
  if (!a.mask || from >= to) return nan;
  const int64_t m = m0 + r, step = a.mask_strides[3];
  const int64_t at = b * a.mask_strides[0] + (head * a.group + m % a.group) * a.mask_strides[1] +
                     m / a.group * a.mask_strides[2] + (j0 + padding) * step;
  if (a.mask_type < 0) {
    const uint8_t* kept = static_cast<const uint8_t*>(a.mask) + at;
    if (step == 1) {
      for (int j = from; j < to; j++) row[j] = kept[j] ? row[j] : HIDDEN;
    } else {
      for (int j = from; j < to; j++) row[j] = kept[j * step] ? row[j] : HIDDEN;
    }
    return nan;
  }
  float v[TILE];
  const size_t bytes = a.mask_type == 2 ? 4 : 2;
  const char* numbers = static_cast<const char*>(a.mask) + size_t(at) * bytes;
  if (step == 1) {
    widen(numbers + size_t(from) * bytes, int(a.mask_type), to - from, v + from);
  } else {
    widen(numbers, int(a.mask_type), 1, v);
    const float same = v[0];
    for (int j = from; j < to; j++) v[j] = same;
  }
  for (int j = from; j < to; j++) {
    const bool unknown = is_nan(v[j]);
    nan |= uint64_t(unknown) << j;
    const float known = unknown ? 0.0f : v[j];
    const int32_t sum = tq::clamp28(row[j] + tq::natural_logit(known));
    row[j] = bits<uint32_t>(v[j]) == 0xff800000u ? HIDDEN : sum;
  }
  return nan;
}

// Section 4, `scores`.
inline void Block::write_logits(int r, int t, const int32_t* row, uint64_t poison) const {
  int32_t* to = a.logits + out_row(r) * size_t(a.columns) + size_t(t) * TILE;
  const int count = int(std::min<int64_t>(TILE, length - int64_t(t) * TILE));
  for (int j = 0; j < count; j++) to[j] = row[j] == HIDDEN ? NOT_ALLOWED : poison >> j & 1 ? POISON : row[j];
}

}  // namespace tq::attention
