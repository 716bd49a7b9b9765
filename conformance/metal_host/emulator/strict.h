// Declarations only, for clang's type checker: real address spaces, native vectors, and nothing to run.
//
// bfloat is __fp16 here, which converts from float on its own; the compile for running rejects that already.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define METAL_FUNC inline
#define MLX_MTL_CONST static constant constexpr const

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __fp16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;
struct complex64_t { float real, imag; };

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-7f
#define M_PI_F 3.14159274f
#define M_LN2_F 0.693147182f
#define M_LOG2E_F 1.44269502f
#define M_SQRT2_F 1.41421354f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class T, int N, class... A> vec<T, N> tq_vec(A... a);
template <class T, int N> struct packed_vec {
  T v[N];
  operator vec<T, N>() const;
};

template <class To, class From> To as_type(From);
template <class T> struct identity { typedef T type; };
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;

#define TQ_1(name) template <class T> T name(T);
TQ_1(ceil) TQ_1(floor) TQ_1(rint) TQ_1(round) TQ_1(trunc) TQ_1(fabs) TQ_1(fract) TQ_1(sqrt) TQ_1(rsqrt) TQ_1(exp) TQ_1(exp2)
TQ_1(exp10) TQ_1(log) TQ_1(log2) TQ_1(log10) TQ_1(sin) TQ_1(cos) TQ_1(tan) TQ_1(asin) TQ_1(acos) TQ_1(atan) TQ_1(sinh)
TQ_1(cosh) TQ_1(tanh) TQ_1(saturate) TQ_1(sign) TQ_1(abs) TQ_1(popcount) TQ_1(clz) TQ_1(ctz) TQ_1(reverse_bits)
TQ_1(simd_sum) TQ_1(simd_product) TQ_1(simd_min) TQ_1(simd_max) TQ_1(simd_and) TQ_1(simd_or) TQ_1(simd_xor)
TQ_1(simd_prefix_inclusive_sum) TQ_1(simd_prefix_exclusive_sum) TQ_1(simd_prefix_inclusive_product)
TQ_1(simd_prefix_exclusive_product) TQ_1(simd_broadcast_first)
#define TQ_2(name) template <class T> T name(T, T);
TQ_2(fmin) TQ_2(fmax) TQ_2(fmod) TQ_2(pow) TQ_2(powr) TQ_2(atan2) TQ_2(copysign) TQ_2(step) TQ_2(divide) TQ_2(fdim) TQ_2(min)
TQ_2(max) TQ_2(absdiff) TQ_2(rotate) TQ_2(mulhi) TQ_2(mul24) TQ_2(hadd) TQ_2(rhadd) TQ_2(addsat) TQ_2(subsat)
#define TQ_3(name) template <class T> T name(T, T, T);
TQ_3(fma) TQ_3(mix) TQ_3(clamp) TQ_3(min3) TQ_3(max3) TQ_3(median3) TQ_3(mad24)
#define TQ_MOVE(name) template <class T> T name(T, ushort);
TQ_MOVE(simd_shuffle) TQ_MOVE(simd_broadcast) TQ_MOVE(simd_shuffle_xor) TQ_MOVE(simd_shuffle_down) TQ_MOVE(simd_shuffle_up)
TQ_MOVE(simd_shuffle_rotate_down) TQ_MOVE(simd_shuffle_rotate_up) TQ_MOVE(quad_shuffle) TQ_MOVE(quad_broadcast)
TQ_MOVE(quad_shuffle_xor)
template <class T, class C> T select(T, T, C);
template <class T> T extract_bits(T, uint, uint);
template <class T> T insert_bits(T, T, uint, uint);
template <class T> bool isnan(T);
template <class T> bool isinf(T);
template <class T> bool isfinite(T);
template <class T> bool signbit(T);
template <class T> bool any(T);
template <class T> bool all(T);
template <class T> float dot(T, T);
float ldexp(float, int);
float frexp(float, int&);
int ilogb(float);

struct simd_vote {
  typedef ulong vote_t;
  explicit simd_vote(vote_t);
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T tq_value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
#define TQ_ATOMIC(SPACE) \
  template <class T> T atomic_load_explicit(const volatile SPACE atomic<T>*, memory_order); \
  template <class T> void atomic_store_explicit(volatile SPACE atomic<T>*, typename identity<T>::type, memory_order); \
  template <class T> bool atomic_compare_exchange_weak_explicit( \
      volatile SPACE atomic<T>*, T*, typename identity<T>::type, memory_order, memory_order);
#define TQ_UPDATE(name) \
  template <class T> T name(volatile device atomic<T>*, typename identity<T>::type, memory_order); \
  template <class T> T name(volatile threadgroup atomic<T>*, typename identity<T>::type, memory_order);
TQ_ATOMIC(device) TQ_ATOMIC(threadgroup)
TQ_UPDATE(atomic_exchange_explicit) TQ_UPDATE(atomic_fetch_add_explicit) TQ_UPDATE(atomic_fetch_sub_explicit)
TQ_UPDATE(atomic_fetch_min_explicit) TQ_UPDATE(atomic_fetch_max_explicit) TQ_UPDATE(atomic_fetch_and_explicit)
TQ_UPDATE(atomic_fetch_or_explicit) TQ_UPDATE(atomic_fetch_xor_explicit)

template <class T> struct numeric_limits {
  static constexpr T max();
  static constexpr T min();
  static constexpr T lowest();
  static constexpr T epsilon();
  static constexpr T infinity();
  static constexpr T quiet_NaN();
};

namespace precise { using namespace metal; }
namespace fast { using namespace metal; }

}  // namespace metal

using namespace metal;

#define TQ_TYPEDEFS(T, name) \
  typedef metal::vec<T, 2> name##2; typedef metal::vec<T, 3> name##3; typedef metal::vec<T, 4> name##4; \
  typedef metal::packed_vec<T, 2> packed_##name##2; typedef metal::packed_vec<T, 3> packed_##name##3; \
  typedef metal::packed_vec<T, 4> packed_##name##4;
TQ_TYPEDEFS(char, char) TQ_TYPEDEFS(uchar, uchar) TQ_TYPEDEFS(short, short) TQ_TYPEDEFS(ushort, ushort)
TQ_TYPEDEFS(int, int) TQ_TYPEDEFS(uint, uint) TQ_TYPEDEFS(long, long) TQ_TYPEDEFS(ulong, ulong)
TQ_TYPEDEFS(float, float) TQ_TYPEDEFS(half, half) TQ_TYPEDEFS(bfloat, bfloat)
typedef metal::vec<int, 2> bool2;  // clang 14 has no vectors of bool; comparisons give vectors of int
typedef metal::vec<int, 3> bool3;
typedef metal::vec<int, 4> bool4;

template <typename U> struct Limits { static const U max, min; };
template <typename T, typename U> T ceildiv(T, U);
template <typename IdxT = int64_t> IdxT elem_to_loc(IdxT, constant const int*, constant const int64_t*, int);
template <typename IdxT = int64_t> IdxT elem_to_loc(uint3, constant const int*, constant const int64_t*, int);
template <typename IdxT = int64_t> IdxT elem_to_loc_1(uint, constant const int64_t&);
template <typename IdxT = int64_t> IdxT elem_to_loc_2(uint2, constant const int64_t*);
template <typename IdxT = int64_t> IdxT elem_to_loc_3(uint3, constant const int64_t*);
