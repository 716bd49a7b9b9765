// Vectors of the CPU's own width, and memory for them: what the codec's kernels are written with. They work on LANES
// vectors of a head at a time: coordinate d of all of them is one SIMD vector, so that every sum over coordinates is a
// sum of SIMD vectors.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__F16C__) || defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace tq {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
constexpr int LANES = WIDTH / 4;

typedef int32_t Ints __attribute__((vector_size(WIDTH), may_alias));
typedef uint32_t Words __attribute__((vector_size(WIDTH), may_alias));
typedef float Floats __attribute__((vector_size(WIDTH), may_alias));

inline Ints maximum(Ints a, Ints b) { return a > b ? a : b; }
inline Ints magnitude(Ints a) { return maximum(a, -a); }
inline Floats to_floats(Ints a) { return __builtin_convertvector(a, Floats); }

// Adding 1.5 2^23 leaves the nearest integer, halves to even, in the low bits. Good for magnitudes below 2^22.
constexpr float ROUNDER = 0x1.8p23f;
constexpr int32_t ROUNDER_BITS = 0x4b400000;
inline Ints round_to_ints(Floats x) { return reinterpret_cast<Ints>(x + ROUNDER) - ROUNDER_BITS; }

// table[index] in every lane; the table has 2^BITS entries.
template <int BITS>
inline Ints look_up(const int32_t* table, Ints index) {
#if defined(__AVX512F__)
  const __m512i at = reinterpret_cast<__m512i>(index);
  if constexpr (BITS <= 4) {
    const __mmask16 there = __mmask16((1u << (1 << BITS)) - 1);
    const __m512i entries = _mm512_maskz_loadu_epi32(there, table);
    return reinterpret_cast<Ints>(_mm512_maskz_permutexvar_epi32(0xffff, at, entries));
  } else {
    const auto half = [&](const int32_t* from) {
      return _mm512_permutex2var_epi32(_mm512_loadu_si512(from), at, _mm512_loadu_si512(from + 16));
    };
    if constexpr (BITS == 5) {
      return reinterpret_cast<Ints>(half(table));
    } else {
      const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(32));
      return reinterpret_cast<Ints>(_mm512_mask_mov_epi32(half(table), upper, half(table + 32)));
    }
  }
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_i32gather_epi32(table, reinterpret_cast<__m256i>(index), 4));
#else
  Ints found{};
  for (int lane = 0; lane < LANES; lane++) found[lane] = table[index[lane]];
  return found;
#endif
}

// Memory of a thread, aligned for SIMD vectors, kept for the next call. What it holds is lost when more is asked for.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // Room for `count` SIMD vectors.
  Ints* vectors(std::size_t count) {
    if (count > size_) {
      std::free(memory_);
      memory_ = nullptr;
      size_ = 0;
      if (posix_memalign(&memory_, WIDTH, count * WIDTH) != 0) throw std::bad_alloc();
      size_ = count;
    }
    return static_cast<Ints*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  std::size_t size_ = 0;
};

// Sums that do not fit into 32 bits: the low 16 bits of the terms and the rest apart. Up to 2^15 terms below 2^31.
struct WideSum {
  Ints low{}, high{};
  void add(Ints x) {
    low += x & 0xffff;
    high += x >> 16;
  }
  int64_t lane(int index) const { return int64_t(high[index]) * 65536 + low[index]; }
};

}  // namespace tq
