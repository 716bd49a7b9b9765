// Partial sums and how they merge (section 5). A sum is a vector of floats with one exponent.
//
// A merged sum is canonical: every number is +0 or at least 2^-64 in magnitude. Merging the identity into it changes
// nothing, so identities are skipped.
#pragma once
#include "lanes.h"

namespace tq::attention {

TQ_INLINE F without_vanishing(F x) { return absolute(x) < broadcast(VANISHING) ? F{} : x; }
TQ_INLINE F shifted(F x, F unit) { return without_vanishing(x * unit); }

// (into, x) += (from, y); `from(i)` yields LANES numbers from i on. count: a multiple of 16.
template <class From>
TQ_INLINE void merge_from(float* into, int& x, From from, int y, int count) {
  if (y <= IDENTITY) return;
  if (x <= IDENTITY) {
    for (int i = 0; i < count; i += LANES) store(into + i, from(i));
    x = y;
    return;
  }
  const int m = x > y ? x : y;
  if (x - m < -40) {
    for (int i = 0; i < count; i += LANES) store(into + i, from(i));
  } else if (x < m) {
    const F unit = broadcast(pow2(x - m));
    for (int i = 0; i < count; i += LANES) {
      store(into + i, without_vanishing(shifted(load<F>(into + i), unit) + from(i)));
    }
  } else if (y - m >= -40) {
    const F unit = broadcast(pow2(y - m));
    for (int i = 0; i < count; i += LANES) {
      store(into + i, without_vanishing(load<F>(into + i) + shifted(from(i), unit)));
    }
  }
  x = m;
}

inline void merge_floats(float* into, int& x, const float* from, int y, int count) {
  merge_from(into, x, [=](int i) { return load<F>(from + i); }, y, count);
}

// The same for the fresh sum of a tile, whose numbers are integers. Shifted by at most 40 they stay far above 2^-64;
// and what is left where they cancel a canonical number is zero or a multiple of that number's last bit, 2^-64 or more.
// So only a canonical number that is itself shifted can vanish.
template <class From>
TQ_INLINE void merge_integers(float* into, int& x, From from, int y, int count) {
  if (x > IDENTITY && y <= x && x - y <= 40) {
    const F unit = broadcast(pow2(y - x));
    for (int i = 0; i < count; i += LANES) store(into + i, load<F>(into + i) + from(i) * unit);
  } else if (x > IDENTITY && x < y && y - x <= 40) {
    const F unit = broadcast(pow2(x - y));
    for (int i = 0; i < count; i += LANES) store(into + i, shifted(load<F>(into + i), unit) + from(i));
    x = y;
  } else {
    merge_from(into, x, from, y, count);
  }
}
inline void merge_sums(float* into, int& x, const int32_t* sums, int y, int count) {
  merge_integers(into, x, [=](int i) { return to_float(load<I>(sums + i)); }, y, count);
}
inline void merge_halves(float* into, int& x, const int32_t* high, const int32_t* low, int y, int count) {
  merge_integers(
      into, x, [=](int i) { return to_float(load<I>(high + i)) * 128.0f + to_float(load<I>(low + i)); }, y, count);
}

inline void merge_number(float& a, int& x, float b, int y) {
  a = merge(a, x, b, y);
  x = x > y ? x : y;
}

// The sums of some queries: packed [rows][np], raw [rows][nr], den [rows], and their exponents [rows].
struct Sums {
  float *packed, *raw, *den;
  int *packed_exponent, *raw_exponent, *den_exponent;

  void clear(int from, int to) const {
    for (int r = from; r < to; r++) {
      packed_exponent[r] = raw_exponent[r] = den_exponent[r] = IDENTITY;
      den[r] = 0.0f;
    }
  }

  // Merges one query of another set of sums.
  void merge_row(int r, const Sums& other, int np, int nr) const {
    merge_floats(packed + size_t(r) * np, packed_exponent[r], other.packed + size_t(r) * np, other.packed_exponent[r],
                 np);
    merge_floats(raw + size_t(r) * nr, raw_exponent[r], other.raw + size_t(r) * nr, other.raw_exponent[r], nr);
    merge_number(den[r], den_exponent[r], other.den[r], other.den_exponent[r]);
  }
};

}  // namespace tq::attention
