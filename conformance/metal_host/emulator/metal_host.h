// Stands for <metal_stdlib> and for what MLX puts before the text of a custom kernel.
#pragma once
#include "metal_threads.h"

using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;
struct complex64_t { float real, imag; };

#define METAL_FUNC inline __attribute__((always_inline))
#define MLX_MTL_CONST static constant constexpr const
#define device
#define constant
#define threadgroup
#define thread
#define kernel

template <typename U> struct Limits {
  static inline const U max = metal::numeric_limits<U>::max();
  static inline const U min = metal::numeric_limits<U>::min();
};

template <typename T, typename U> inline T ceildiv(T n, U m) { return (n + m - 1) / m; }

template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(IdxT elem, constant const int* shape, constant const int64_t* strides, int ndim) {
  IdxT loc = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    loc += (elem % shape[i]) * IdxT(strides[i]);
    elem /= shape[i];
  }
  return loc;
}

template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(uint3 elem, constant const int* shape, constant const int64_t* strides, int ndim) {
  IdxT loc = elem.x * IdxT(strides[ndim - 1]) + elem.y * IdxT(strides[ndim - 2]);
  for (int d = ndim - 3; d >= 0; --d) {
    loc += (elem.z % shape[d]) * IdxT(strides[d]);
    elem.z /= shape[d];
  }
  return loc;
}

template <typename IdxT = int64_t> METAL_FUNC IdxT elem_to_loc_1(uint elem, constant const int64_t& stride) {
  return elem * IdxT(stride);
}

template <typename IdxT = int64_t> METAL_FUNC IdxT elem_to_loc_2(uint2 elem, constant const int64_t* strides) {
  return elem.x * IdxT(strides[1]) + elem.y * IdxT(strides[0]);
}

template <typename IdxT = int64_t> METAL_FUNC IdxT elem_to_loc_3(uint3 elem, constant const int64_t* strides) {
  return elem.x * IdxT(strides[2]) + elem.y * IdxT(strides[1]) + elem.z * IdxT(strides[0]);
}
