// Metal's words in CUDA, for the text of fast/templates. A simdgroup is a warp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef __half half;
typedef __half float16_t;
typedef __nv_bfloat16 bfloat16_t;

namespace turboquant {

#define TQ_CUDA __device__ __forceinline__
#define TQ_ALL_LANES 0xffffffffu

template <class To, class From>
TQ_CUDA To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of equal size");
  To y;
  memcpy(&y, &x, sizeof(To));
  return y;
}

TQ_CUDA float2 tq_float2(float x) { return make_float2(x, x); }
TQ_CUDA float2 tq_float2(float x, float y) { return make_float2(x, y); }
TQ_CUDA uint2 tq_uint2(uint x, uint y) { return make_uint2(x, y); }
TQ_CUDA char2 tq_char2(char x, char y) { return make_char2(x, y); }
TQ_CUDA int clamp(int x, int low, int high) { return min(max(x, low), high); }
TQ_CUDA float clamp(float x, float low, float high) { return fminf(fmaxf(x, low), high); }
TQ_CUDA uint clz(uint x) { return uint(__clz(int(x))); }
TQ_CUDA uint ctz(uint x) { return x != 0u ? uint(__ffs(int(x)) - 1) : 32u; }

#define TQ_REDUCE(name, step)                                 \
  template <class T>                                          \
  TQ_CUDA T name(T x) {                                       \
    for (int offset = 16; offset != 0; offset >>= 1) {        \
      const T y = __shfl_xor_sync(TQ_ALL_LANES, x, offset);   \
      x = step;                                               \
    }                                                         \
    return x;                                                 \
  }
TQ_REDUCE(simd_max, (y > x ? y : x))
TQ_REDUCE(simd_sum, x + y)
TQ_REDUCE(simd_or, (x | y))
TQ_REDUCE(simd_and, (x & y))
TQ_CUDA bool simd_all(bool x) { return __all_sync(TQ_ALL_LANES, x); }
TQ_CUDA bool simd_any(bool x) { return __any_sync(TQ_ALL_LANES, x); }
template <class T>
TQ_CUDA T simd_shuffle(T x, ushort lane) {
  return __shfl_sync(TQ_ALL_LANES, x, lane);
}
template <class T>
TQ_CUDA T simd_shuffle_xor(T x, ushort mask) {
  return __shfl_xor_sync(TQ_ALL_LANES, x, mask);
}

