// From codes to vectors: docs/numerics.md, section 6. 64 vectors are one piece of work.
#include "codec.h"
#include "convert.h"
#include "pool.h"

namespace tq {

// What to restore; the Python side has the same structure.
struct DequantizeJob {
  const Codec* codec;
  int64_t vectors, shared;  // shared: so many vectors, in order, have the same factors
  const uint32_t* words;
  const uint16_t* scales;
  const uint32_t* sign_words;  // or null, like all that follow but the last
  const uint16_t* sign_scales;
  const int8_t* factors;  // [vectors / shared, D]
  const int16_t* base;    // [vectors / 64, D]
  const int16_t* base_exponent;
  void* out;  // [vectors, D]
  int64_t type;
};

namespace {

template <int BITS>
void look_up_all(const int32_t* by_code, Ints* codes, int dim) {
  for (int d = 0; d < dim; d++) codes[d] = look_up<BITS>(by_code, codes[d]);
}

void centroids(const Codec& codec, const Words* words, Ints* c) {
  unpack(words, codec.dim, codec.bits, c);
  switch (codec.bits) {
    case 1: return look_up_all<1>(codec.by_code, c, codec.dim);
    case 2: return look_up_all<2>(codec.by_code, c, codec.dim);
    case 3: return look_up_all<3>(codec.by_code, c, codec.dim);
    case 4: return look_up_all<4>(codec.by_code, c, codec.dim);
    case 5: return look_up_all<5>(codec.by_code, c, codec.dim);
    case 6: return look_up_all<6>(codec.by_code, c, codec.dim);
    default: return;
  }
}

Floats lane_scales(const uint16_t* scales, int there) {
  Floats found{};
  for (int lane = 0; lane < there; lane++) found[lane] = from_half(scales[lane]);
  return found;
}

// y = s * (H^T y)
void rotate_back_signed(const Codec& codec, const int32_t* signs, Ints* y) {
  rotate_back(codec, y);
  for (int d = 0; d < codec.dim; d++) y[d] = with_sign(y[d], signs[d]);
}

// x of LANES vectors before factors and base.
void restore_block(const DequantizeJob& job, int64_t first, int there, Words* words, Ints* c, Floats* x) {
  const Codec& codec = *job.codec;
  gather_words(job.words + first * codec.words, codec.words, there, words);
  centroids(codec, words, c);
  rotate_back_signed(codec, codec.signs, c);
  const Floats scale = lane_scales(job.scales + first, there);
  const float unit = pow2(-codec.scale_shift);
  for (int d = 0; d < codec.dim; d++) x[d] = to_floats(c[d]) * scale * unit;
  if (job.sign_words == nullptr) return;
  gather_words(job.sign_words + first * codec.sign_words, codec.sign_words, there, words);
  unpack(words, codec.dim, 1, c);
  for (int d = 0; d < codec.dim; d++) c[d] = SIGN_CENTROID - 2 * SIGN_CENTROID * c[d];
  rotate_back_signed(codec, codec.sign_signs, c);
  rotate_back_signed(codec, codec.signs, c);
  const Floats sign_scale = lane_scales(job.sign_scales + first, there);
  const float sign_unit = pow2(-codec.sign_scale_shift);
  for (int d = 0; d < codec.dim; d++) x[d] += to_floats(c[d]) * sign_scale * sign_unit;
}

void restore_group(const DequantizeJob& job, int64_t group) {
  static thread_local Scratch scratch;
  const int dim = job.codec->dim;
  const std::size_t size = std::size_t(padded(dim));
  Ints* c = scratch.vectors(2 * size + size / 4 + 8);
  Floats* x = reinterpret_cast<Floats*>(c + size);
  Words* words = reinterpret_cast<Words*>(c + 2 * size);
  const int64_t end = job.vectors < (group + 1) * TILE ? job.vectors : (group + 1) * TILE;
  for (int64_t first = group * TILE; first < end; first += LANES) {
    const int there = int(end - first < LANES ? end - first : LANES);
    restore_block(job, first, there, words, c, x);
    for (int lane = 0; lane < there; lane++) {
      const int64_t vector = first + lane;
      const float* from = reinterpret_cast<const float*>(x) + lane;
      float row[MAX_DIM];
      for (int d = 0; d < dim; d++) row[d] = from[d * LANES];
      if (job.factors != nullptr) {
        const int8_t* f = job.factors + (vector / job.shared) * dim;
        for (int d = 0; d < dim; d++) row[d] *= pow2(-f[d]);
      }
      if (job.base != nullptr) {
        const int16_t* base = job.base + group * dim;
        const float unit = pow2(job.base_exponent[group] - 13);
        for (int d = 0; d < dim; d++) row[d] += float(base[d]) * unit;
      }
      narrow(row, dim, int(job.type), vector * dim, job.out);
    }
  }
}

}  // namespace
}  // namespace tq

extern "C" __attribute__((visibility("default"))) void tq_dequantize(const tq::DequantizeJob* job, int threads) {
  const int groups = int((job->vectors + tq::TILE - 1) / tq::TILE);
  tq::parallel_for(groups, threads, [&](int group) { tq::restore_group(*job, group); });
}
