// Section 3, from vectors to codes: the steps of one tile by a threadgroup, and of one vector by the 32 lanes of a
// simdgroup. Lane l has the coordinates l, l + 32, l + 64, ... in every step.

// What the threads of a threadgroup share.
struct tq_scratch {
  threadgroup float* vectors;     // D for each simdgroup
  threadgroup float* thresholds;  // 64 for each simdgroup
  threadgroup float* magnitudes;  // 32
  threadgroup float* units;       // 64: 2^(13 - e), or 0, of each token
  threadgroup float* aligns;      // 64: 2^(e - E) of each token
  threadgroup int* exponents;     // 64
  threadgroup int* finite;        // 64
  threadgroup int16_t* base;      // D
  threadgroup int8_t* factors;    // D
  threadgroup ulong* parts;       // one for each simdgroup
};

// Where the codes of a row go; pointers to what is absent are never used.
struct tq_coded {
  device uint* words;
  device half* scales;
  device int16_t* base;
  device int16_t* base_exponent;
  device int8_t* factors;
  device uint* sign_words;
  device half* sign_scales;
};

// The sum over a simdgroup of integers below 2^48, the same in all lanes.
inline ulong tq_simd_sum(ulong n) {
  const uint low = simd_sum(uint(n & 0xfffffful));
  const uint high = simd_sum(uint(n >> 24));
  return (ulong(high) << 24) + ulong(low);
}

inline float tq_apply_sign(float x, device const uint* signs, int d) {
  return ((signs[d >> 5] >> (d & 31)) & 1u) != 0u ? -x : x;
}

// The bits of a vector's largest magnitude; 0x7f800000 and above if it holds NaN or infinity.
template <typename T, int D>
inline uint tq_largest_bits(device const T* x, int lane) {
  uint top = 0u;
  for (int d = lane; d < D; d += 32) {
    top = max(top, as_type<uint>(float(x[d])) & 0x7fffffffu);
  }
  return simd_max(top);
}

// Section 3.2: X' of one coordinate.
inline float tq_aligned(float x, float unit, float align) {
  return rint(tq_snap(x, unit) * align);
}

// Section 3.2: base M of a tile of 64 tokens at x, and what aligns each of them. Returns E. By the whole threadgroup.
template <typename T, int D>
inline int tq_measure_base(device const T* x, tq_scratch s, int simdgroup, int lane) {
  for (int t = simdgroup; t < 64; t += TQ_SIMDGROUPS) {
    const uint top = tq_largest_bits<T, D>(x + t * D, lane);
    const bool finite = top < 0x7f800000u;
    const float largest = finite ? as_type<float>(top) : 0.0f;
    if (lane == 0) {
      s.units[t] = tq_unit(largest, 13);
      s.exponents[t] = tq_exponent(largest);
      s.finite[t] = finite ? 1 : 0;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int exponent = simd_max(max(s.exponents[lane], s.exponents[lane + 32]));
  const int thread_index = 32 * simdgroup + lane;
  if (thread_index < 64) {
    s.aligns[thread_index] = tq_pow2(max(s.exponents[thread_index] - exponent, -30));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int d = thread_index; d < D; d += 32 * TQ_SIMDGROUPS) {
    int sum = 0;
    for (int t = 0; t < 64; t++) {
      sum += int(tq_aligned(float(x[t * D + d]), s.units[t], s.aligns[t]));
    }
    s.base[d] = int16_t(int(rint(float(sum) * 0.015625f)));
  }
  return exponent;
}

// Section 3.3: the factors that this tile fixes, after its base is known. By the whole threadgroup.
template <typename T, int D>
inline void tq_measure_factors(device const T* x, tq_scratch s, int simdgroup, int lane) {
  const int thread_index = 32 * simdgroup + lane;
  ulong mine = 0ul;
  for (int d = thread_index; d < D; d += 32 * TQ_SIMDGROUPS) {
    ulong energy = 0ul;
    for (int t = 0; t < 64; t++) {
      const int r = int(tq_aligned(float(x[t * D + d]), s.units[t], s.aligns[t])) - int(s.base[d]);
      energy += ulong(r * r);
    }
    mine += energy;
    // Below 2^34, kept as two floats that hold their integers exactly.
    s.vectors[d] = float(uint(energy & 0xffffful));
    s.vectors[D + d] = float(uint(energy >> 20));
  }
  const ulong sum = tq_simd_sum(mine);
  if (lane == 0) {
    s.parts[simdgroup] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong total = 0ul;
  for (int i = 0; i < TQ_SIMDGROUPS; i++) {
    total += s.parts[i];
  }
  for (int d = thread_index; d < D; d += 32 * TQ_SIMDGROUPS) {
    const ulong energy = ulong(uint(s.vectors[d])) + (ulong(uint(s.vectors[D + d])) << 20);
    // At most 2^54.
    const ulong scaled = energy * ulong(D);
    int f = 0;
    for (int shift = 2; shift <= 10; shift += 4) {
      f += ((scaled << shift) < total ? 1 : 0) - (scaled > (total << shift) ? 1 : 0);
    }
    s.factors[d] = int8_t(f);
  }
}

// Section 3.5: the thresholds between the magnitudes, for positive coordinates and, 32 further on, for the others. A
// coordinate has passed a threshold when its magnitude is not below it.
template <int BITS>
inline void tq_set_thresholds(ulong square, uint boundary, threadgroup const float* magnitudes,
                              threadgroup float* thresholds, int lane) {
  const ulong rho = (tq_isqrt(square << 16) * ulong(boundary)) >> 12;
  if (lane < (1 << (BITS - 1)) - 1) {
    const ulong scaled = ulong(uint(magnitudes[lane] + magnitudes[lane + 1])) * rho;
    thresholds[lane] = float(uint(scaled >> 16) + 1u);
    thresholds[lane + 32] = float(uint((scaled + 0xfffful) >> 16));
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Section 3.7: the code of a coordinate, sign and rank, for up to 6 bits.
template <int BITS>
inline uint tq_find_code(float y, threadgroup const float* thresholds) {
  const int count = 1 << (BITS - 1);
  const bool positive = y > 0.0f;
  const int side = positive ? 0 : 32;
  const float size = fabs(y);
  int rank = 0;
  for (int step = count >> 1; step > 0; step >>= 1) {
    rank += size >= thresholds[side + rank + step - 1] ? step : 0;
  }
  return uint(positive ? rank : rank + count);
}

// Section 3.5, 8 bits: |c| of a coordinate when the largest one is given.
inline uint tq_find_byte(float y, uint largest) {
  return largest == 0u ? 0u : (254u * uint(fabs(y)) + largest) / (2u * largest);
}

// Section 3.8: 256 Y - A c of a coordinate.
template <int BITS>
inline long tq_remainder(float y, ulong amount, threadgroup const float* magnitudes,
                         threadgroup const float* thresholds) {
  const uint code = tq_find_code<BITS>(y, thresholds);
  const long part = long(amount) * long(magnitudes[code & ((1u << (BITS - 1)) - 1u)]);
  return 256l * long(y) + ((code >> (BITS - 1)) != 0u ? part : -part);
}

inline half tq_scale(ulong numerator, ulong denominator, int shift, bool finite) {
  return as_type<half>(finite ? tq_half_from_ratio(numerator, denominator, shift) : ushort(0x7e00));
}

// Sections 3.4 to 3.8 for one vector v, to be snapped with `unit` first. `epsilon`: the exponent of the snapped
// integers.
template <int D, int M, int K, int BITS, bool PROD>
inline void tq_encode_vector(threadgroup float* v, float unit, int epsilon, bool finite, ulong vector,
                             device const uint* tables, threadgroup const float* magnitudes,
                             threadgroup float* thresholds, tq_coded out, int lane) {
  const int depth = 32 - int(clz(uint(D - 1)));
  const int kappa = depth + 3;
  uint squares = 0u;
  for (int d = lane; d < D; d += 32) {
    const int z = int(tq_snap(v[d], unit));
    squares += uint(z * z);
    v[d] = tq_apply_sign(float(z), tables + TQ_SIGNS, d);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const ulong square = tq_simd_sum(ulong(squares));
  tq_rotate<M, K>(v, lane, tables + TQ_PALEY);

  uint largest = 0u;
  if (BITS == 8) {
    for (int d = lane; d < D; d += 32) {
      largest = max(largest, uint(fabs(v[d])));
    }
    largest = simd_max(largest);
  } else {
    tq_set_thresholds<BITS == 8 ? 1 : BITS>(square, tables[TQ_BOUNDARY], magnitudes, thresholds, lane);
  }
  device uint* words = out.words + vector * ulong(tq_width(BITS, D));
  ulong products = 0ul;
  for (int start = 0; start < D; start += 32) {
    const int d = start + lane;
    uint code = 0u;
    if (d < D) {
      const float y = v[d];
      uint centroid;
      if (BITS == 8) {
        centroid = tq_find_byte(y, largest);
        code = (y < 0.0f ? 0u - centroid : centroid) & 255u;
      } else {
        code = tq_find_code<BITS == 8 ? 1 : BITS>(y, thresholds);
        centroid = uint(magnitudes[code & ((1u << ((BITS - 1) & 7)) - 1u)]);
      }
      // A centroid has the sign of its coordinate, so every term is at least 0; below 2^30.
      products += ulong(uint(fabs(y)) * centroid);
    }
    tq_pack<BITS>(code, start, D, words, lane);
  }
  const ulong inner = tq_simd_sum(products);
  if (lane == 0) {
    out.scales[vector] = tq_scale(square, inner, epsilon + kappa, finite);
  }
  if (!PROD) {
    // The next vector takes the place of this one.
    return;
  }

  const ulong amount = inner == 0ul ? 0ul : (512ul * ulong(D) * square + inner) / (2ul * inner);
  ulong every = 0ul;
  for (int d = lane; d < D; d += 32) {
    const long r = tq_remainder<BITS == 8 ? 1 : BITS>(v[d], amount, magnitudes, thresholds);
    every |= ulong(r < 0l ? -r : r);
  }
  const int length = simd_max(tq_bit_length(every));
  const int exponent = length == 0 ? -79 : length;
  squares = 0u;
  for (int d = lane; d < D; d += 32) {
    const long r = tq_remainder<BITS == 8 ? 1 : BITS>(v[d], amount, magnitudes, thresholds);
    const ulong size = ulong(r < 0l ? -r : r);
    const uint z = uint(length <= 13 ? size << (13 - length) : tq_round_shift(size, length - 13, false));
    squares += z * z;
    v[d] = tq_apply_sign(r < 0l ? -float(z) : float(z), tables + TQ_SIGN_CODE_SIGNS, d);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const ulong square2 = tq_simd_sum(ulong(squares));
  tq_rotate<M, K>(v, lane, tables + TQ_PALEY);
  device uint* sign_words = out.sign_words + vector * ulong(tq_width(1, D));
  products = 0ul;
  for (int start = 0; start < D; start += 32) {
    const int d = start + lane;
    const float y = d < D ? v[d] : 0.0f;
    products += ulong(uint(fabs(y)) * 127u);
    tq_pack<1>(d < D && !(y > 0.0f) ? 1u : 0u, start, D, sign_words, lane);
  }
  const ulong inner2 = tq_simd_sum(products);
  if (lane == 0) {
    const int kappa2 = kappa + (depth + 1) / 2 + 2;
    out.sign_scales[vector] = tq_scale(square2, inner2 * ulong(D), epsilon + exponent - 21 + kappa2, finite);
  }
}

// A tile, or the last tokens of a row, of one role. x: the row's tokens; tokens: how many of them are coded. FACTORS: 0
// for none, 1 for those in `given`, 2 for those that the first tile fixes. Every tile measures these again: no second
// dispatch has to wait for them.
template <typename T, int D, int M, int K, int BITS, bool PROD, bool BASE, int FACTORS>
inline void tq_encode(device const T* x, int tokens, int row, int tile, device const uint* tables,
                      device const int8_t* given, tq_coded out, tq_scratch s, int simdgroup, int lane) {
  const int thread_index = 32 * simdgroup + lane;
  if (BITS != 8 && thread_index < (1 << ((BITS - 1) & 7))) {
    const uint bytes = tables[TQ_MAGNITUDES + (thread_index >> 2)];
    s.magnitudes[thread_index] = float((bytes >> (8 * (thread_index & 3))) & 255u);
  }
  if (FACTORS == 1) {
    for (int d = thread_index; d < D; d += 32 * TQ_SIMDGROUPS) {
      s.factors[d] = given[ulong(row) * ulong(D) + ulong(d)];
    }
  }
  device const T* mine = x + ulong(64 * tile) * ulong(D);
  int tile_exponent = 0;
  if (FACTORS == 2) {
    tile_exponent = tq_measure_base<T, D>(x, s, simdgroup, lane);
    tq_measure_factors<T, D>(x, s, simdgroup, lane);
  }
  if (BASE) {
    if (FACTORS != 2 || tile != 0) {
      tile_exponent = tq_measure_base<T, D>(mine, s, simdgroup, lane);
    }
    const ulong place = ulong(row) * ulong(tokens / 64) + ulong(tile);
    for (int d = thread_index; d < D; d += 32 * TQ_SIMDGROUPS) {
      out.base[place * ulong(D) + ulong(d)] = s.base[d];
      if (FACTORS == 2 && tile == 0) {
        out.factors[ulong(row) * ulong(D) + ulong(d)] = s.factors[d];
      }
    }
    if (thread_index == 0) {
      out.base_exponent[place] = int16_t(tile_exponent);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  threadgroup float* v = s.vectors + D * simdgroup;
  const int count = min(64, tokens - 64 * tile);
  for (int t = simdgroup; t < count; t += TQ_SIMDGROUPS) {
    device const T* token = mine + t * D;
    float unit, align = 1.0f;
    int exponent = tile_exponent;
    bool finite;
    if (BASE) {
      unit = s.units[t];
      align = s.aligns[t];
      finite = s.finite[t] != 0;
    } else {
      const uint top = tq_largest_bits<T, D>(token, lane);
      finite = top < 0x7f800000u;
      const float largest = finite ? as_type<float>(top) : 0.0f;
      unit = tq_unit(largest, 13);
      exponent = tq_exponent(largest);
    }
    float largest = 0.0f;
    for (int d = lane; d < D; d += 32) {
      float r = tq_aligned(float(token[d]), unit, align);
      if (BASE) {
        r -= float(s.base[d]);
      }
      if (FACTORS != 0) {
        r *= tq_pow2(int(s.factors[d]));
        largest = max(largest, fabs(r));
      }
      v[d] = r;
    }
    float second = 1.0f;
    int epsilon = exponent - 13;
    if (FACTORS != 0) {
      largest = simd_max(largest);
      second = finite ? tq_unit(largest, 13) : 0.0f;
      epsilon = exponent + tq_exponent(largest) - 26;
    }
    const ulong vector = ulong(row) * ulong(tokens) + ulong(64 * tile + t);
    tq_encode_vector<D, M, K, BITS, PROD>(v, second, epsilon, finite, vector, tables, s.magnitudes,
                                          s.thresholds + 64 * simdgroup, out, lane);
  }
}
