// Section 3.7. Eight codes of a group of coordinates, one in each nibble of a word. For widths below 4 bits the upper
// bits of a nibble belong to other groups: look-up tables ignore them. W is the packed vector's own words.
template <int BITS>
inline uint tq_nibbles(device const uint* words, int group) {
  if (BITS == 1) {
    return words[group >> 2] >> (group & 3);
  }
  if (BITS == 2) {
    return words[group >> 1] >> (2 * (group & 1));
  }
  if (BITS == 3) {
    device const uint* quad = words + 3 * (group >> 2);
    const int j = group & 3;
    if (j < 3) {
      return quad[j];
    }
    return ((quad[0] >> 3) & 0x11111111u) | ((quad[1] >> 2) & 0x22222222u) | ((quad[2] >> 1) & 0x44444444u);
  }
  return words[group];
}

// The centroid of a code of up to 6 bits: its top bit is the sign, the rest the rank of the magnitude. `magnitudes` holds one
// per byte, lowest first.
template <int BITS>
inline float tq_centroid(uint code, device const uint* magnitudes) {
  const uint rank = code & ((1u << (BITS - 1)) - 1u);
  const float magnitude = float((magnitudes[rank >> 2] >> (8u * (rank & 3u))) & 255u);
  return ((code >> (BITS - 1)) & 1u) != 0u ? -magnitude : magnitude;
}

// Words of the codes of up to 4 bits of `dim` coordinates.
inline int tq_narrow_width(int bits, int dim) {
  const int groups = (dim + 7) / 8;
  return bits == 3 ? 3 * (groups / 4) + groups % 4 : (groups * bits + 3) / 4;
}

// Words of one vector.
inline int tq_width(int bits, int dim) {
  if (bits == 8) {
    return (dim + 3) / 4;
  }
  return bits > 4 ? tq_narrow_width(4, dim) + tq_narrow_width(bits - 4, dim) : tq_narrow_width(bits, dim);
}

// The code of coordinate d; 8 bits come without their sign extended.
template <int BITS>
inline uint tq_unpack(device const uint* words, int dim, int d) {
  const int group = d >> 3, shift = 4 * (d & 7);
  if (BITS == 8) {
    return (words[d >> 2] >> (8 * (d & 3))) & 255u;
  }
  if (BITS > 4) {
    const uint upper = tq_nibbles<(BITS > 4 && BITS < 8 ? BITS - 4 : 1)>(words + (dim + 7) / 8, group);
    return ((words[group] >> shift) & 15u) | (((upper >> shift) & ((1u << ((BITS - 4) & 3)) - 1u)) << 4);
  }
  return (tq_nibbles<(BITS > 4 ? 4 : BITS)>(words, group) >> shift) & ((1u << (BITS & 7)) - 1u);
}

// Writes the words of 32 coordinates from `start` on for up to 4 bits, a code in each lane, by a whole simdgroup. Lanes
// beyond the last coordinate bring zeros.
template <int BITS>
inline void tq_pack_narrow(uint code, int start, int dim, device uint* words, int lane) {
  const int groups = (dim + 7) / 8, own = lane >> 3;
  const int group = (start >> 3) + own;
  uint word = code << (4 * (lane & 7));
  word |= simd_shuffle_xor(word, 1);
  word |= simd_shuffle_xor(word, 2);
  word |= simd_shuffle_xor(word, 4);
  if (BITS == 4) {
    if ((lane & 7) == 0 && group < groups) {
      words[group] = word;
    }
  } else if (BITS == 3) {
    const uint fourth = simd_shuffle(word, 24);
    word |= ((fourth >> own) & 0x11111111u) << 3;
    if ((lane & 7) == 0 && own < 3 && group < groups) {
      words[3 * (start >> 5) + own] = word;
    }
  } else if (BITS == 2) {
    word |= simd_shuffle_xor(word, 8) << 2;
    if ((lane & 15) == 0 && group < groups) {
      words[group >> 1] = word;
    }
  } else {
    word <<= own;
    word |= simd_shuffle_xor(word, 8);
    word |= simd_shuffle_xor(word, 16);
    if (lane == 0) {
      words[start >> 5] = word;
    }
  }
}

// The same for every width.
template <int BITS>
inline void tq_pack(uint code, int start, int dim, device uint* words, int lane) {
  if (BITS == 8) {
    uint word = code << (8 * (lane & 3));
    word |= simd_shuffle_xor(word, 1);
    word |= simd_shuffle_xor(word, 2);
    if ((lane & 3) == 0 && start + lane < dim) {
      words[(start + lane) >> 2] = word;
    }
  } else if (BITS > 4) {
    tq_pack_narrow<4>(code & 15u, start, dim, words, lane);
    tq_pack_narrow<(BITS > 4 && BITS < 8 ? BITS - 4 : 1)>(code >> 4, start, dim, words + (dim + 7) / 8, lane);
  } else {
    tq_pack_narrow<(BITS > 4 ? 4 : BITS)>(code, start, dim, words, lane);
  }
}
