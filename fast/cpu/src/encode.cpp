// From vectors to codes: docs/numerics.md, section 3. A tile of 64 vectors is one piece of work.
#include "codec.h"
#include "convert.h"
#include "pool.h"

namespace tq {
namespace {

constexpr int BLOCKS = TILE / LANES;
enum Origin : int32_t { NO_FACTORS = 0, GIVEN = 1, MEASURED = 2 };

}  // namespace

// What one store codes: `tokens` tokens, from column `start` on, of x [rows, columns, D]. The Python side has the same
// structure.
struct EncodeJob {
  const Codec* codec;
  const void* x;
  int64_t columns, start, rows, tokens;
  int32_t type, base, origin, unused;
  const int8_t* given;  // [rows, D]
  uint32_t* words;      // [rows, tokens, W]
  uint16_t* scales;     // [rows, tokens]
  int16_t* base_to;     // [rows, tiles, D]
  int16_t* exponent_to;
  int8_t* factors_to;  // [rows, D]
  uint32_t* sign_words;
  uint16_t* sign_scales;

  int64_t tiles() const { return (tokens + TILE - 1) / TILE; }
};

namespace {

// One tile while it is coded.
struct Tile {
  Ints* x;         // [BLOCKS, D] the integers of section 3.1, then the residuals
  int32_t* mean;   // [D] the base
  float* enlarge;  // [D] 2^f
  Ints *y, *codes, *centroids;
  Words* words;
  int32_t exponent[TILE];
  bool finite[TILE];
  int count;
};

// Section 3.1 for the vectors of a tile; lanes without a vector hold zeros.
void snap_tile(const EncodeJob& job, int64_t row, int64_t tile, Tile& t) {
  const int dim = job.codec->dim;
  t.count = int(job.tokens - tile * TILE < TILE ? job.tokens - tile * TILE : TILE);
  const int64_t first = row * job.columns + job.start + tile * TILE;
  float values[MAX_DIM];
  int32_t snapped[MAX_DIM];
  for (int token = 0; token < TILE; token++) {
    int32_t* to = reinterpret_cast<int32_t*>(t.x + (token / LANES) * dim) + token % LANES;
    if (token >= t.count) {
      t.exponent[token] = -79;
      t.finite[token] = true;
      for (int d = 0; d < dim; d++) to[d * LANES] = 0;
      continue;
    }
    const int32_t largest = widen(job.x, job.type, (first + token) * dim, dim, values);
    t.finite[token] = largest < 0x7f800000;
    const float top = t.finite[token] ? bits<float>(largest) : 0.0f;
    const float unit = vector_unit(top, 13);
    t.exponent[token] = vector_exponent(top);
    if (unit == 0.0f) {  // zero, or the values are not numbers
      for (int d = 0; d < dim; d++) to[d * LANES] = 0;
      continue;
    }
    for (int d = 0; d < dim; d++) snapped[d] = bits<int32_t>(values[d] * unit + ROUNDER) - ROUNDER_BITS;
    for (int d = 0; d < dim; d++) to[d * LANES] = snapped[d];
  }
}

// Section 3.2: x becomes the residuals and every exponent that of the tile, which is returned.
int subtract_base(int dim, Tile& t) {
  int top = t.exponent[0];
  for (int token = 1; token < TILE; token++) top = t.exponent[token] > top ? t.exponent[token] : top;
  Floats align[BLOCKS];
  bool aligned = true;
  for (int token = 0; token < TILE; token++) {
    const int below = t.exponent[token] - top;
    align[token / LANES][token % LANES] = pow2(below < -30 ? -30 : below);
    aligned = aligned && below == 0;
    t.exponent[token] = top;
  }
  for (int d = 0; d < dim; d++) {
    Ints here[BLOCKS], sum{};
    for (int block = 0; block < BLOCKS; block++) {
      here[block] = t.x[block * dim + d];
      if (!aligned) here[block] = round_to_ints(to_floats(here[block]) * align[block]);
      sum += here[block];
    }
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    // A sum of 64 numbers of at most 2^13 is exact in a float, and so is its 64th part.
    t.mean[d] = bits<int32_t>(float(total) * 0x1p-6f + ROUNDER) - ROUNDER_BITS;
    for (int block = 0; block < BLOCKS; block++) t.x[block * dim + d] = here[block] - t.mean[d];
  }
  return top;
}

// Section 3.3: the factors that these residuals fix.
void measure_factors(int dim, const Tile& t, int8_t* factors) {
  int64_t energy[MAX_DIM], total = 0;
  for (int d = 0; d < dim; d++) {
    energy[d] = 0;
    for (int start = 0; start < BLOCKS; start += 4) {
      Words squares{};  // four squares of at most 2^28
      for (int block = start; block < start + 4; block++) {
        const Ints r = t.x[block * dim + d];
        squares += reinterpret_cast<Words>(r * r);
      }
      for (int lane = 0; lane < LANES; lane++) energy[d] += squares[lane];
    }
    total += energy[d];
  }
  for (int d = 0; d < dim; d++) {
    const int64_t scaled = energy[d] * dim;
    int f = 0;
    for (int64_t threshold = 4; threshold <= 1024; threshold *= 16) {
      f += (threshold * scaled < total) - (scaled > threshold * total);
    }
    factors[d] = int8_t(f);
  }
}

// What a block of LANES vectors is coded with, by lane.
struct Lanes {
  int64_t square[LANES];  // S
  int64_t inner[LANES];   // N
  int exponent[LANES];    // ε
  bool finite[LANES];
};

// y = s * Z and S = sum Z^2, after section 3.3.
void enlarge_block(const EncodeJob& job, Tile& t, int block, Lanes& lanes) {
  const Codec& codec = *job.codec;
  const int dim = codec.dim;
  const Ints* x = t.x + block * dim;
  const bool keys = job.base || job.origin != NO_FACTORS;
  Floats unit{};
  for (int lane = 0; lane < LANES; lane++) {
    const int token = block * LANES + lane;
    lanes.exponent[lane] = t.exponent[token] - 13;
    lanes.finite[lane] = t.finite[token];
  }
  if (keys) {
    Ints top{};
    for (int d = 0; d < dim; d++) {
      const Floats r = to_floats(x[d]) * t.enlarge[d];
      top = maximum(top, reinterpret_cast<Ints>(r) & 0x7fffffff);
    }
    for (int lane = 0; lane < LANES; lane++) {
      const float largest = is_finite(bits<float>(top[lane])) ? bits<float>(int32_t(top[lane])) : 0.0f;
      unit[lane] = lanes.finite[lane] ? vector_unit(largest, 13) : 0.0f;
      lanes.exponent[lane] += vector_exponent(largest) - 13;
    }
  }
  WideSum square;
  for (int start = 0; start < dim; start += 16) {
    const int end = start + 16 < dim ? start + 16 : dim;
    Ints sum{};  // 16 squares of at most 2^26
    for (int d = start; d < end; d++) {
      Ints z = x[d];
      if (keys) z = round_to_ints(to_floats(z) * t.enlarge[d] * unit);
      sum += z * z;
      t.y[d] = with_sign(z, codec.signs[d]);
    }
    square.add(sum);
  }
  for (int lane = 0; lane < LANES; lane++) lanes.square[lane] = square.lane(lane);
}

// Section 3.5 for 1 to 6 bits: codes, centroids and N of y.
template <int BITS>
void code_block(const Codec& codec, Tile& t, Lanes& lanes) {
  constexpr int LEVELS = 1 << BITS, HALF = LEVELS / 2;
  Ints threshold[LEVELS - 1];
  int64_t rho[LANES];
  for (int lane = 0; lane < LANES; lane++) {
    rho[lane] = int64_t(isqrt(uint64_t(lanes.square[lane]) << 16) * uint64_t(codec.boundary) >> 12);
  }
  for (int j = 0; j < LEVELS - 1; j++) {
    const int64_t between = codec.ascending[j] + codec.ascending[j + 1];
    int32_t row[LANES];
    for (int lane = 0; lane < LANES; lane++) row[lane] = int32_t((between * rho[lane]) >> 16);
    std::memcpy(&threshold[j], row, sizeof row);
  }
  WideSum inner;
  for (int d = 0; d < codec.dim; d++) {
    const Ints y = t.y[d];
    Ints index{};
    for (int j = 0; j < LEVELS - 1; j++) index -= (y > threshold[j]);
    const Ints centroid = look_up<BITS>(codec.ascending, index);
    t.centroids[d] = centroid;
    // Sign and magnitude: below the middle the rank counts downwards.
    const Ints above = index - HALF, below = above >> 31;
    t.codes[d] = (above ^ below) | (below & HALF);
    inner.add(y * centroid);
  }
  for (int lane = 0; lane < LANES; lane++) lanes.inner[lane] = inner.lane(lane);
}

// Section 3.5 for 8 bits.
template <>
void code_block<8>(const Codec& codec, Tile& t, Lanes& lanes) {
  Ints largest{};
  for (int d = 0; d < codec.dim; d++) largest = maximum(largest, magnitude(t.y[d]));
  double inverse[LANES];
  for (int lane = 0; lane < LANES; lane++) inverse[lane] = largest[lane] ? 0.5 / largest[lane] : 0.0;
  WideSum inner;
  for (int d = 0; d < codec.dim; d++) {
    const Ints y = t.y[d], dividend = 254 * magnitude(y) + largest;
    int32_t from[LANES], to[LANES];
    std::memcpy(from, &dividend, sizeof from);
    // A quotient that is no integer is at least 2^-24 below the next one; 2^-26 covers the error of the product.
    for (int lane = 0; lane < LANES; lane++) to[lane] = int32_t(from[lane] * inverse[lane] + 0x1p-26);
    Ints centroid;
    std::memcpy(&centroid, to, sizeof to);
    centroid = with_sign(centroid, y >> 31);
    t.centroids[d] = t.codes[d] = centroid;
    inner.add(y * centroid);
  }
  for (int lane = 0; lane < LANES; lane++) lanes.inner[lane] = inner.lane(lane);
}

void code(const Codec& codec, Tile& t, Lanes& lanes) {
  switch (codec.bits) {
    case 1: return code_block<1>(codec, t, lanes);
    case 2: return code_block<2>(codec, t, lanes);
    case 3: return code_block<3>(codec, t, lanes);
    case 4: return code_block<4>(codec, t, lanes);
    case 5: return code_block<5>(codec, t, lanes);
    case 6: return code_block<6>(codec, t, lanes);
    default: return code_block<8>(codec, t, lanes);
  }
}

// Section 3.8: sign codes of the remainder, and their scales. y holds Y; afterwards it is lost.
void code_remainder(const Codec& codec, Tile& t, const Lanes& lanes, uint16_t* scales) {
  const int dim = codec.dim;
  // |R| is at most 2^40: exact in a double, and so is each product.
  double amount[LANES], largest[LANES] = {}, unit[LANES];
  int g2[LANES];
  for (int lane = 0; lane < LANES; lane++) {
    const int64_t n = lanes.inner[lane];
    amount[lane] = n ? double((512 * int64_t(dim) * lanes.square[lane] + n) / (2 * n)) : 0.0;
  }
  const auto remainder = [&](int d, double* to) {
    int32_t y[LANES], c[LANES];
    std::memcpy(y, &t.y[d], sizeof y);
    std::memcpy(c, &t.centroids[d], sizeof c);
    for (int lane = 0; lane < LANES; lane++) to[lane] = 256.0 * y[lane] - amount[lane] * c[lane];
  };
  double r[LANES];
  for (int d = 0; d < dim; d++) {
    remainder(d, r);
    for (int lane = 0; lane < LANES; lane++) {
      const double size = std::fabs(r[lane]);
      largest[lane] = size > largest[lane] ? size : largest[lane];
    }
  }
  for (int lane = 0; lane < LANES; lane++) {
    g2[lane] = largest[lane] == 0.0 ? -79 : bit_length(uint64_t(largest[lane]));
    unit[lane] = largest[lane] == 0.0 ? 0.0 : bits<double>(int64_t(13 - g2[lane] + 1023) << 52);
  }
  WideSum square, inner;
  for (int d = 0; d < dim; d++) {
    remainder(d, r);
    int32_t rounded[LANES];
    // Adding 1.5 2^52 rounds to the nearest integer, halves to even.
    for (int lane = 0; lane < LANES; lane++) {
      rounded[lane] = int32_t((r[lane] * unit[lane] + 0x1.8p52) - 0x1.8p52);
    }
    Ints z;
    std::memcpy(&z, rounded, sizeof z);
    square.add(z * z);
    t.y[d] = with_sign(z, codec.sign_signs[d]);
  }
  rotate(codec, t.y);
  for (int d = 0; d < dim; d++) {
    t.codes[d] = (t.y[d] > 0) + 1;
    inner.add(magnitude(t.y[d]));
  }
  for (int lane = 0; lane < LANES; lane++) {
    const uint64_t n2 = uint64_t(SIGN_CENTROID * inner.lane(lane));
    const int shift = lanes.exponent[lane] + g2[lane] - 21 + codec.sign_scale_shift;
    const uint16_t scale = half_from_ratio(uint64_t(square.lane(lane)), uint64_t(dim) * n2, shift);
    scales[lane] = lanes.finite[lane] ? scale : 0x7e00;
  }
}

void zero_padding(const Codec& codec, Tile& t) {
  for (int d = codec.dim; d < padded(codec.dim); d++) t.codes[d] = Ints{};
}

Tile tile_memory(int dim) {
  static thread_local Scratch scratch;
  const std::size_t size = std::size_t(padded(dim)), words = size / 4 + 8, row = size / LANES + 1;
  Ints* next = scratch.vectors(BLOCKS * size + 3 * size + words + 2 * row);
  const auto part = [&](std::size_t count) {
    Ints* here = next;
    next += count;
    return here;
  };
  Tile t;
  t.x = part(BLOCKS * size);
  t.y = part(size);
  t.codes = part(size);
  t.centroids = part(size);
  t.words = reinterpret_cast<Words*>(part(words));
  t.mean = reinterpret_cast<int32_t*>(part(row));
  t.enlarge = reinterpret_cast<float*>(part(row));
  return t;
}

// The factors of a row, from its first tile.
void measure_row(const EncodeJob& job, int64_t row) {
  Tile t = tile_memory(job.codec->dim);
  snap_tile(job, row, 0, t);
  subtract_base(job.codec->dim, t);
  measure_factors(job.codec->dim, t, job.factors_to + row * job.codec->dim);
}

void encode_tile(const EncodeJob& job, int64_t row, int64_t tile) {
  const Codec& codec = *job.codec;
  const int dim = codec.dim;
  Tile t = tile_memory(dim);
  snap_tile(job, row, tile, t);
  if (job.base) {
    const int top = subtract_base(dim, t);
    const int64_t at = row * job.tiles() + tile;
    job.exponent_to[at] = int16_t(top);
    for (int d = 0; d < dim; d++) job.base_to[at * dim + d] = int16_t(t.mean[d]);
  }
  const int8_t* factors = job.origin == GIVEN ? job.given : job.origin == MEASURED ? job.factors_to : nullptr;
  for (int d = 0; d < dim; d++) t.enlarge[d] = factors ? pow2(factors[row * dim + d]) : 1.0f;
  for (int block = 0; block * LANES < t.count; block++) {
    const int there = t.count - block * LANES < LANES ? t.count - block * LANES : LANES;
    const int64_t token = row * job.tokens + tile * TILE + block * LANES;
    Lanes lanes;
    enlarge_block(job, t, block, lanes);
    rotate(codec, t.y);
    zero_padding(codec, t);
    code(codec, t, lanes);
    pack(t.codes, dim, codec.bits, t.words);
    scatter_words(t.words, codec.words, there, job.words + token * codec.words);
    for (int lane = 0; lane < there; lane++) {
      const int shift = lanes.exponent[lane] + codec.scale_shift;
      const uint16_t scale = half_from_ratio(uint64_t(lanes.square[lane]), uint64_t(lanes.inner[lane]), shift);
      job.scales[token + lane] = lanes.finite[lane] ? scale : 0x7e00;
    }
    if (codec.prod) {
      uint16_t scales[LANES];
      code_remainder(codec, t, lanes, scales);
      pack(t.codes, dim, 1, t.words);
      scatter_words(t.words, codec.sign_words, there, job.sign_words + token * codec.sign_words);
      std::memcpy(job.sign_scales + token, scales, std::size_t(there) * sizeof(uint16_t));
    }
  }
}

}  // namespace
}  // namespace tq

extern "C" __attribute__((visibility("default"))) void tq_encode(const tq::EncodeJob* jobs, int count, int threads) {
  using namespace tq;
  // A tile can be coded once its row's factors are known.
  int rows = 0, tiles = 0;
  for (int i = 0; i < count; i++) {
    rows += jobs[i].origin == MEASURED ? int(jobs[i].rows) : 0;
    tiles += int(jobs[i].rows * jobs[i].tiles());
  }
  parallel_for(rows, threads, [&](int index) {
    const EncodeJob* job = jobs;
    for (;; job++) {
      const int here = job->origin == MEASURED ? int(job->rows) : 0;
      if (index < here) break;
      index -= here;
    }
    measure_row(*job, index);
  });
  parallel_for(tiles, threads, [&](int index) {
    const EncodeJob* job = jobs;
    for (; index >= job->rows * job->tiles(); job++) index -= int(job->rows * job->tiles());
    encode_tile(*job, index / job->tiles(), index % job->tiles());
  });
}
