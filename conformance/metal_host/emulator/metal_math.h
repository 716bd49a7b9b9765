// The functions of the Metal standard library on scalars and vectors, and its numeric limits.
#pragma once
#include "metal_types.h"

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-7f
#define M_PI_F 3.14159274f
#define M_PI_2_F 1.57079637f
#define M_1_PI_F 0.318309873f
#define M_E_F 2.71828175f
#define M_LN2_F 0.693147182f
#define M_LN10_F 2.30258512f
#define M_LOG2E_F 1.44269502f
#define M_SQRT2_F 1.41421354f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u

namespace metal {

// ---- floating point: float directly, the 16-bit types through float, vectors element by element ------------------
#define TQ_LIFT1(name, RESULT, result_small) \
  template <class T, class = enable_if_t<is_small_float<T>>> \
  TQ_INLINE result_small name(T a) { return result_small(name(float(a))); } \
  template <class T, int N> TQ_INLINE vec<RESULT, N> name(const vec<T, N>& a) { typedef RESULT R; TQ_EACH(name(a.v[i])); }
#define TQ_FLOAT1(name, expression) \
  TQ_INLINE float name(float a) { return expression; } \
  TQ_LIFT1(name, T, T)
#ifdef TQ_COUNT
#define TQ_FLOAT1_OP(name, expression) TQ_FLOAT1(name, tq_op_##name(a))
#else
#define TQ_FLOAT1_OP(name, expression) TQ_FLOAT1(name, expression)
#endif
#define TQ_TEST1(name, expression) \
  TQ_INLINE bool name(float a) { return expression; } \
  TQ_LIFT1(name, bool, bool)
#define TQ_FLOAT2(name, expression) \
  TQ_INLINE float name(float a, float b) { return expression; } \
  template <class T, class = enable_if_t<is_small_float<T>>> \
  TQ_INLINE T name(T a, T b) { return T(name(float(a), float(b))); } \
  template <class R, int N> TQ_INLINE vec<R, N> name(const vec<R, N>& a, const vec<R, N>& b) { \
    TQ_EACH(name(a.v[i], b.v[i])); \
  }

TQ_FLOAT1(ceil, __builtin_ceilf(a))
TQ_FLOAT1(floor, __builtin_floorf(a))
TQ_FLOAT1(rint, __builtin_rintf(a))
TQ_FLOAT1(round, __builtin_roundf(a))
TQ_FLOAT1(trunc, __builtin_truncf(a))
TQ_FLOAT1(fabs, __builtin_fabsf(a))
TQ_FLOAT1_OP(fract, __builtin_fminf(a - __builtin_floorf(a), 0.99999994f))
TQ_FLOAT1(sqrt, __builtin_sqrtf(a))
TQ_FLOAT1_OP(rsqrt, 1.0f / __builtin_sqrtf(a))
TQ_FLOAT1(exp, __builtin_expf(a))
TQ_FLOAT1(exp2, __builtin_exp2f(a))
TQ_FLOAT1_OP(exp10, __builtin_powf(10.0f, a))
TQ_FLOAT1(log, __builtin_logf(a))
TQ_FLOAT1(log2, __builtin_log2f(a))
TQ_FLOAT1(log10, __builtin_log10f(a))
TQ_FLOAT1(sin, __builtin_sinf(a))
TQ_FLOAT1(cos, __builtin_cosf(a))
TQ_FLOAT1(tan, __builtin_tanf(a))
TQ_FLOAT1(asin, __builtin_asinf(a))
TQ_FLOAT1(acos, __builtin_acosf(a))
TQ_FLOAT1(atan, __builtin_atanf(a))
TQ_FLOAT1(sinh, __builtin_sinhf(a))
TQ_FLOAT1(cosh, __builtin_coshf(a))
TQ_FLOAT1(tanh, __builtin_tanhf(a))
TQ_FLOAT1_OP(saturate, __builtin_fminf(__builtin_fmaxf(a, 0.0f), 1.0f))
TQ_FLOAT1_OP(sign, a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a == 0.0f ? a : 0.0f)
TQ_TEST1(isnan, __builtin_isnan(a))
TQ_TEST1(isinf, __builtin_isinf(a))
TQ_TEST1(isfinite, __builtin_isfinite(a))
TQ_TEST1(signbit, __builtin_signbit(a))
TQ_FLOAT2(fmin, __builtin_fminf(a, b))
TQ_FLOAT2(fmax, __builtin_fmaxf(a, b))
TQ_FLOAT2(fmod, __builtin_fmodf(a, b))
TQ_FLOAT2(pow, __builtin_powf(a, b))
TQ_FLOAT2(powr, __builtin_powf(a, b))
TQ_FLOAT2(atan2, __builtin_atan2f(a, b))
TQ_FLOAT2(copysign, __builtin_copysignf(a, b))
TQ_FLOAT2(step, b < a ? 0.0f : 1.0f)
TQ_FLOAT2(divide, a / b)
TQ_FLOAT2(fdim, __builtin_fdimf(a, b))

TQ_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Exact product and one rounding: 2 x 11 bits and the sum fit double, whose rounding is innocuous here.
template <class T, class = enable_if_t<is_small_float<T>>> TQ_INLINE T fma(T a, T b, T c) {
  return T(float(__builtin_fma(double(float(a)), double(float(b)), double(float(c)))));
}
template <class R, int N> TQ_INLINE vec<R, N> fma(const vec<R, N>& a, const vec<R, N>& b, const vec<R, N>& c) {
  TQ_EACH(fma(a.v[i], b.v[i], c.v[i]));
}
TQ_INLINE float ldexp(float a, int e) { return __builtin_ldexpf(a, e); }
TQ_INLINE float frexp(float a, int& e) { return __builtin_frexpf(a, &e); }
TQ_INLINE int ilogb(float a) { return __builtin_ilogbf(a); }
TQ_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }
template <class T, int N> TQ_INLINE T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T sum = a.v[0] * b.v[0];
  for (int i = 1; i < N; ++i) sum += a.v[i] * b.v[i];
  return sum;
}

// ---- any scalar ---------------------------------------------------------------------------------------------------
// Metal's overloads take equal types; mixed ones are ambiguous there and do not compile here.
template <class T> using if_scalar = enable_if_t<is_scalar<T>::value, T>;
template <class T> using if_integral = enable_if_t<is_integral_v<T>, T>;
template <class T> struct unsigned_of { typedef conditional_t<sizeof(T) == 1, uchar, conditional_t<sizeof(T) == 2, ushort, conditional_t<sizeof(T) == 4, uint, ulong>>> type; };

template <class T> TQ_INLINE if_scalar<T> min(T a, T b) {
  if constexpr (is_floating_point_v<T>) return T(__builtin_fminf(float(a), float(b)));
  else return b < a ? b : a;
}
template <class T> TQ_INLINE if_scalar<T> max(T a, T b) {
  if constexpr (is_floating_point_v<T>) return T(__builtin_fmaxf(float(a), float(b)));
  else return a < b ? b : a;
}
template <class T> TQ_INLINE if_scalar<T> clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
template <class T> TQ_INLINE if_scalar<T> min3(T a, T b, T c) { return min(a, min(b, c)); }
template <class T> TQ_INLINE if_scalar<T> max3(T a, T b, T c) { return max(a, max(b, c)); }
template <class T> TQ_INLINE if_scalar<T> median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }
template <class T> TQ_INLINE if_scalar<T> abs(T a) {
  if constexpr (is_floating_point_v<T>) return T(__builtin_fabsf(float(a)));
  else if constexpr (is_signed_v<T>) return a < T(0) ? T(-a) : a;
  else return a;
}
template <class T> TQ_INLINE if_integral<T> absdiff(T a, T b) { return a < b ? T(b - a) : T(a - b); }
template <class T> TQ_INLINE T select(T a, T b, bool c) { return c ? b : a; }
template <class R, int N> TQ_INLINE vec<R, N> select(const vec<R, N>& a, const vec<R, N>& b, const vec<bool, N>& c) {
  TQ_EACH(c.v[i] ? b.v[i] : a.v[i]);
}
template <int N> TQ_INLINE bool any(const vec<bool, N>& a) { bool r = false; for (int i = 0; i < N; ++i) r |= a.v[i]; return r; }
template <int N> TQ_INLINE bool all(const vec<bool, N>& a) { bool r = true; for (int i = 0; i < N; ++i) r &= a.v[i]; return r; }
TQ_INLINE bool any(bool a) { return a; }
TQ_INLINE bool all(bool a) { return a; }

// ---- integers -----------------------------------------------------------------------------------------------------
template <class T> TQ_INLINE if_integral<T> popcount(T a) { return T(__builtin_popcountl(typename unsigned_of<T>::type(a))); }
template <class T> TQ_INLINE if_integral<T> clz(T a) {
  TQ_COUNTED(sizeof(T) == 4, T(tq_op_clz(uint(a))))
  const ulong u = typename unsigned_of<T>::type(a);
  return T(u ? __builtin_clzl(u) - int(64 - 8 * sizeof(T)) : int(8 * sizeof(T)));
}
template <class T> TQ_INLINE if_integral<T> ctz(T a) {
  TQ_COUNTED(sizeof(T) == 4, T(tq_op_ctz(uint(a))))
  const ulong u = typename unsigned_of<T>::type(a);
  return T(u ? __builtin_ctzl(u) : int(8 * sizeof(T)));
}
template <class T> TQ_INLINE if_integral<T> reverse_bits(T a) {
  TQ_COUNTED(sizeof(T) == 4, T(tq_op_reverse_bits(uint(a))))
  typedef typename unsigned_of<T>::type U;
  U u = U(a), r = 0;
  for (uint i = 0; i < 8 * sizeof(T); ++i) r = U(r | U(u >> i & 1) << (8 * sizeof(T) - 1 - i));
  return T(r);
}
template <class T> TQ_INLINE if_integral<T> rotate(T a, T by) {
  TQ_COUNTED(sizeof(T) == 4, T(tq_op_rotate(uint(a), uint(by))))
  typedef typename unsigned_of<T>::type U;
  const uint width = 8 * sizeof(T), s = uint(U(by)) & (width - 1);
  return T(U(a) << s | U(a) >> ((width - s) & (width - 1)));
}
template <class T> TQ_INLINE if_integral<T> mulhi(T a, T b) {
  TQ_COUNTED(sizeof(T) == 4 && is_signed_v<T>, T(tq_op_mulhi_signed(a, b)))
  TQ_COUNTED(sizeof(T) == 4 && !is_signed_v<T>, T(tq_op_mulhi(a, b)))
  if constexpr (sizeof(T) == 8) {
    if constexpr (is_signed_v<T>) return T((__int128(a) * b) >> 64);
    else return T((static_cast<unsigned __int128>(a) * b) >> 64);
  } else if constexpr (is_signed_v<T>) {
    return T((long(a) * long(b)) >> (8 * sizeof(T)));
  } else {
    return T((ulong(a) * ulong(b)) >> (8 * sizeof(T)));
  }
}
TQ_INLINE int mul24(int a, int b) { return a * b; }
TQ_INLINE uint mul24(uint a, uint b) { return a * b; }
TQ_INLINE int mad24(int a, int b, int c) { return a * b + c; }
TQ_INLINE uint mad24(uint a, uint b, uint c) { return a * b + c; }
template <class T> TQ_INLINE if_integral<T> hadd(T a, T b) { return T((a & b) + ((a ^ b) >> 1)); }
template <class T> TQ_INLINE if_integral<T> rhadd(T a, T b) { return T((a | b) - ((a ^ b) >> 1)); }
template <class T> TQ_INLINE if_integral<T> addsat(T a, T b) {
  T r;
  if (!__builtin_add_overflow(a, b, &r)) return r;
  if constexpr (is_signed_v<T>) return a < 0 ? T(ulong(1) << (8 * sizeof(T) - 1)) : T(~(ulong(1) << (8 * sizeof(T) - 1)));
  else return T(~T(0));
}
template <class T> TQ_INLINE if_integral<T> subsat(T a, T b) {
  T r;
  if (!__builtin_sub_overflow(a, b, &r)) return r;
  if constexpr (is_signed_v<T>) return a < 0 ? T(ulong(1) << (8 * sizeof(T) - 1)) : T(~(ulong(1) << (8 * sizeof(T) - 1)));
  else return T(0);
}
template <class T> TQ_INLINE if_integral<T> extract_bits(T x, uint offset, uint bits) {
  TQ_COUNTED(sizeof(T) == 4 && is_signed_v<T>, T(tq_op_extract_signed_bits(x, offset, bits)))
  TQ_COUNTED(sizeof(T) == 4 && !is_signed_v<T>, T(tq_op_extract_bits(x, offset, bits)))
  typedef typename unsigned_of<T>::type U;
  const uint width = 8 * sizeof(T);
  if (!bits) return T(0);
  const uint drop = (width - bits) & (width - 1);
  if constexpr (is_signed_v<T>) return T(T(U(U(x) >> offset << drop)) >> drop);
  else return T(U(U(U(x) >> offset) << drop) >> drop);
}
template <class T> TQ_INLINE if_integral<T> insert_bits(T base, T insert, uint offset, uint bits) {
  TQ_COUNTED(sizeof(T) == 4, T(tq_op_insert_bits(uint(base), uint(insert), offset, bits)))
  typedef typename unsigned_of<T>::type U;
  const uint width = 8 * sizeof(T);
  if (!bits) return base;
  const U mask = U(U(U(~U(0)) >> (width - bits)) << offset);
  return T((U(base) & U(~mask)) | (U(U(insert) << offset) & mask));
}

#define TQ_ELEMENTWISE1(name) \
  template <class R, int N> TQ_INLINE vec<R, N> name(const vec<R, N>& a) { TQ_EACH(name(a.v[i])); }
#define TQ_ELEMENTWISE2(name) \
  template <class R, int N> TQ_INLINE vec<R, N> name(const vec<R, N>& a, const vec<R, N>& b) { TQ_EACH(name(a.v[i], b.v[i])); }
TQ_ELEMENTWISE1(abs) TQ_ELEMENTWISE1(popcount) TQ_ELEMENTWISE1(clz) TQ_ELEMENTWISE1(ctz) TQ_ELEMENTWISE1(reverse_bits)
TQ_ELEMENTWISE2(min) TQ_ELEMENTWISE2(max) TQ_ELEMENTWISE2(absdiff) TQ_ELEMENTWISE2(mulhi) TQ_ELEMENTWISE2(rotate)
template <class R, int N> TQ_INLINE vec<R, N> clamp(const vec<R, N>& x, const vec<R, N>& lo, const vec<R, N>& hi) {
  TQ_EACH(clamp(x.v[i], lo.v[i], hi.v[i]));
}
template <class R, int N> TQ_INLINE vec<R, N> clamp(const vec<R, N>& x, R lo, R hi) { TQ_EACH(clamp(x.v[i], lo, hi)); }

template <class T> struct numeric_limits {
  typedef typename unsigned_of<T>::type U;
  static constexpr bool is_signed = is_signed_v<T>, is_integer = true, has_infinity = false;
  static constexpr int digits = int(8 * sizeof(T)) - (is_signed ? 1 : 0);
  static constexpr T max() { return is_signed ? T(U(~U(0)) >> 1) : T(~U(0)); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<float> {
  static constexpr bool is_signed = true, is_integer = false, has_infinity = true;
  static constexpr int digits = 24;
  static constexpr float max() { return FLT_MAX; }
  static constexpr float min() { return FLT_MIN; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float epsilon() { return FLT_EPSILON; }
  static constexpr float infinity() { return INFINITY; }
  static constexpr float quiet_NaN() { return NAN; }
};
#define TQ_SMALL_LIMITS(T, MAX, MIN, EPSILON, INF, QUIET, DIGITS) \
  template <> struct numeric_limits<T> { \
    static constexpr bool is_signed = true, is_integer = false, has_infinity = true; \
    static constexpr int digits = DIGITS; \
    TQ_INLINE static constexpr T max() { return as_type<T>(ushort(MAX)); } \
    TQ_INLINE static constexpr T min() { return as_type<T>(ushort(MIN)); } \
    TQ_INLINE static constexpr T lowest() { return as_type<T>(ushort(MAX | 0x8000)); } \
    TQ_INLINE static constexpr T epsilon() { return as_type<T>(ushort(EPSILON)); } \
    TQ_INLINE static constexpr T infinity() { return as_type<T>(ushort(INF)); } \
    TQ_INLINE static constexpr T quiet_NaN() { return as_type<T>(ushort(QUIET)); } \
  };
TQ_SMALL_LIMITS(half, 0x7BFF, 0x0400, 0x1400, 0x7C00, 0x7E00, 11)
TQ_SMALL_LIMITS(bfloat, 0x7F7F, 0x0080, 0x3C00, 0x7F80, 0x7FC0, 8)
#undef TQ_SMALL_LIMITS

namespace precise { using namespace metal; }
namespace fast { using namespace metal; }

}  // namespace metal
