// The scalar and vector types of the Metal Shading Language, as C++ classes.
#pragma once
#include "interface.h"

// For counting, what Metal has as one operation is one call; otherwise nothing.
#ifdef TQ_COUNT
#include "count.h"
#define TQ_COUNTED(condition, expression) if constexpr (condition) return expression;
#else
#define TQ_COUNTED(condition, expression)
#endif

#define TQ_INLINE inline __attribute__((always_inline))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace metal {

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class T, T v> struct integral_constant { static constexpr T value = v; constexpr operator T() const { return v; } };
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <class T> struct remove_reference { typedef T type; };
template <class T> struct remove_reference<T&> { typedef T type; };
template <class T> struct remove_cv { typedef T type; };
template <class T> struct remove_cv<const T> { typedef T type; };
template <class T> struct remove_cv<volatile T> { typedef T type; };
template <class T> struct remove_cv<const volatile T> { typedef T type; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct identity { typedef T type; };

struct half;
struct bfloat;

template <class T> struct is_integral : false_type {};
#define TQ_INTEGRAL(T) template <> struct is_integral<T> : true_type {};
TQ_INTEGRAL(bool) TQ_INTEGRAL(char) TQ_INTEGRAL(signed char) TQ_INTEGRAL(uchar) TQ_INTEGRAL(short) TQ_INTEGRAL(ushort)
TQ_INTEGRAL(int) TQ_INTEGRAL(uint) TQ_INTEGRAL(long) TQ_INTEGRAL(ulong) TQ_INTEGRAL(long long)
TQ_INTEGRAL(unsigned long long)
#undef TQ_INTEGRAL
template <class T> constexpr bool is_integral_v = is_integral<T>::value;
template <class T> struct is_floating_point
    : integral_constant<bool, is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>> {};
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> struct is_scalar : integral_constant<bool, is_integral_v<T> || is_floating_point_v<T>> {};
template <class T> constexpr bool is_arithmetic_v = is_scalar<T>::value;
template <class T, bool = is_integral_v<T>> constexpr bool is_signed_integral_v = false;
template <class T> constexpr bool is_signed_integral_v<T, true> = T(-1) < T(1);
template <class T> constexpr bool is_signed_v = is_floating_point_v<T> || is_signed_integral_v<T>;
template <class T> constexpr bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;
// The two 16-bit floating-point types, whose arithmetic is that of float rounded once.
template <class T> constexpr bool is_small_float = is_same_v<T, half> || is_same_v<T, bfloat>;

template <class To, class From> TQ_INLINE constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of equal size");
  return __builtin_bit_cast(To, value);
}

struct half {
  ushort bits;
  half() = default;
  TQ_INLINE half(float v) : bits(tq_float_to_half(v)) {}
  template <class T, class = enable_if_t<is_integral_v<T>>> TQ_INLINE half(T v) : half(float(v)) {}
  TQ_INLINE explicit half(bfloat v);
  TQ_INLINE operator float() const { return tq_half_to_float(bits); }
  TQ_INLINE half operator-() const { half r; r.bits = ushort(bits ^ 0x8000u); return r; }
  TQ_INLINE half operator+() const { return *this; }
#define TQ_ASSIGN(S, op) \
  template <class T> TQ_INLINE S& operator op##=(T v) { return *this = S(*this op v); }
  TQ_ASSIGN(half, +) TQ_ASSIGN(half, -) TQ_ASSIGN(half, *) TQ_ASSIGN(half, /)
};

// Metal converts float to bfloat only where the text asks for it.
struct bfloat {
  ushort bits;
  bfloat() = default;
  TQ_INLINE explicit bfloat(float v) : bits(tq_float_to_bfloat(v)) {}
  template <class T, class = enable_if_t<is_integral_v<T>>> TQ_INLINE explicit bfloat(T v) : bfloat(float(v)) {}
  TQ_INLINE explicit bfloat(half v) : bfloat(float(v)) {}
  TQ_INLINE operator float() const {
    TQ_COUNTED(true, tq_bfloat_to_float(bits))
    return as_type<float>(uint(bits) << 16);
  }
  TQ_INLINE bfloat operator-() const { bfloat r; r.bits = ushort(bits ^ 0x8000u); return r; }
  TQ_INLINE bfloat operator+() const { return *this; }
  TQ_ASSIGN(bfloat, +) TQ_ASSIGN(bfloat, -) TQ_ASSIGN(bfloat, *) TQ_ASSIGN(bfloat, /)
#undef TQ_ASSIGN
};
TQ_INLINE half::half(bfloat v) : half(float(v)) {}

// The type of an operation between a 16-bit float and another scalar.
template <class A, class B, class = void> struct small_mix {};
template <class A> struct small_mix<A, A, enable_if_t<is_small_float<A>>> { typedef A type; };
template <class A> struct small_mix<A, float, enable_if_t<is_small_float<A>>> { typedef float type; };
template <class A> struct small_mix<float, A, enable_if_t<is_small_float<A>>> { typedef float type; };
template <class A, class B> struct small_mix<A, B, enable_if_t<is_small_float<A> && is_integral_v<B>>> { typedef A type; };
template <class A, class B> struct small_mix<A, B, enable_if_t<is_integral_v<A> && is_small_float<B>>> { typedef B type; };

#define TQ_SMALL(op) \
  template <class A, class B, class R = typename small_mix<A, B>::type> \
  TQ_INLINE R operator op(A a, B b) { return R(float(a) op float(b)); }
TQ_SMALL(+) TQ_SMALL(-) TQ_SMALL(*) TQ_SMALL(/)
#undef TQ_SMALL
#define TQ_SMALL(op) \
  template <class A, class B, class = typename small_mix<A, B>::type> \
  TQ_INLINE bool operator op(A a, B b) { return float(a) op float(b); }
TQ_SMALL(<) TQ_SMALL(>) TQ_SMALL(<=) TQ_SMALL(>=) TQ_SMALL(==) TQ_SMALL(!=)
#undef TQ_SMALL

// ---- vectors --------------------------------------------------------------------------------------------------
// The translator turns the swizzles of kernel text (v.zyx) into get<> and ref<>.

template <class T, int N> struct vec;
template <class V> struct vec_traits { static constexpr int size = 0; typedef V element; };
template <class T, int N> struct vec_traits<vec<T, N>> { static constexpr int size = N; typedef T element; };
template <class T> constexpr bool is_vec = vec_traits<T>::size != 0;

template <class T, int N> struct vec_data;
template <class T> struct alignas(2 * sizeof(T)) vec_data<T, 2> {
  union { struct { T x, y; }; struct { T r, g; }; T v[2]; };
};
template <class T> struct alignas(4 * sizeof(T)) vec_data<T, 3> {
  union { struct { T x, y, z; }; struct { T r, g, b; }; T v[3]; };
};
template <class T> struct alignas(4 * sizeof(T)) vec_data<T, 4> {
  union { struct { T x, y, z, w; }; struct { T r, g, b, a; }; T v[4]; };
};

template <class T, int N, int... I> struct swizzle_ref {
  T* v;
  TQ_INLINE operator vec<T, sizeof...(I)>() const { return vec<T, sizeof...(I)>(v[I]...); }
  template <class S> TQ_INLINE swizzle_ref& operator=(const S& s) {
    const vec<T, sizeof...(I)> from(s);
    int k = 0;
    ((v[I] = from.v[k++]), ...);
    return *this;
  }
#define TQ_ASSIGN(op) \
  template <class S> TQ_INLINE swizzle_ref& operator op##=(const S& s) { \
    return *this = vec<T, sizeof...(I)>(*this) op s; \
  }
  TQ_ASSIGN(+) TQ_ASSIGN(-) TQ_ASSIGN(*) TQ_ASSIGN(/) TQ_ASSIGN(&) TQ_ASSIGN(|) TQ_ASSIGN(^)
#undef TQ_ASSIGN
};

template <class T, int N> struct vec : vec_data<T, N> {
  vec() = default;
  template <class S, class = enable_if_t<is_scalar<S>::value>> TQ_INLINE vec(S s) {
    for (int i = 0; i < N; ++i) this->v[i] = T(s);
  }
  template <class U> TQ_INLINE explicit vec(const vec<U, N>& o) {
    for (int i = 0; i < N; ++i) this->v[i] = T(o.v[i]);
  }
  template <class A, class B, class... C> TQ_INLINE vec(const A& a, const B& b, const C&... c) {
    int at = 0;
    put(at, a);
    put(at, b);
    (put(at, c), ...);
  }
  TQ_INLINE T& operator[](uint i) { return this->v[i]; }
  TQ_INLINE const T& operator[](uint i) const { return this->v[i]; }
  template <int... I> TQ_INLINE vec<T, sizeof...(I)> tq_get() const { return vec<T, sizeof...(I)>(this->v[I]...); }
  template <int... I> TQ_INLINE swizzle_ref<T, N, I...> tq_ref() { return {this->v}; }

 private:
  template <class S> TQ_INLINE void put(int& at, const S& s) {
    if constexpr (vec_traits<S>::size == 0) {
      this->v[at++] = T(s);
    } else {
      for (int i = 0; i < vec_traits<S>::size; ++i) this->v[at++] = T(s.v[i]);
    }
  }
};

#define TQ_EACH(expression) \
  vec<R, N> r; \
  for (int i = 0; i < N; ++i) r.v[i] = R(expression); \
  return r
#define TQ_VECTOR_OP(op, RESULT) \
  template <class T, int N> TQ_INLINE vec<RESULT, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    typedef RESULT R; TQ_EACH(a.v[i] op b.v[i]); \
  } \
  template <class T, int N, class S, class = enable_if_t<is_scalar<S>::value>> \
  TQ_INLINE vec<RESULT, N> operator op(const vec<T, N>& a, S s) { \
    typedef RESULT R; TQ_EACH(a.v[i] op T(s)); \
  } \
  template <class T, int N, class S, class = enable_if_t<is_scalar<S>::value>> \
  TQ_INLINE vec<RESULT, N> operator op(S s, const vec<T, N>& b) { \
    typedef RESULT R; TQ_EACH(T(s) op b.v[i]); \
  }
#define TQ_VECTOR_ASSIGN(op) \
  TQ_VECTOR_OP(op, T) \
  template <class T, int N, class S> TQ_INLINE vec<T, N>& operator op##=(vec<T, N>& a, const S& s) { \
    return a = a op s; \
  }
TQ_VECTOR_ASSIGN(+) TQ_VECTOR_ASSIGN(-) TQ_VECTOR_ASSIGN(*) TQ_VECTOR_ASSIGN(/) TQ_VECTOR_ASSIGN(%)
TQ_VECTOR_ASSIGN(&) TQ_VECTOR_ASSIGN(|) TQ_VECTOR_ASSIGN(^) TQ_VECTOR_ASSIGN(<<) TQ_VECTOR_ASSIGN(>>)
TQ_VECTOR_OP(<, bool) TQ_VECTOR_OP(>, bool) TQ_VECTOR_OP(<=, bool) TQ_VECTOR_OP(>=, bool)
TQ_VECTOR_OP(==, bool) TQ_VECTOR_OP(!=, bool) TQ_VECTOR_OP(&&, bool) TQ_VECTOR_OP(||, bool)
#undef TQ_VECTOR_OP
#undef TQ_VECTOR_ASSIGN
template <class R, int N> TQ_INLINE vec<R, N> operator-(const vec<R, N>& a) { TQ_EACH(-a.v[i]); }
template <class R, int N> TQ_INLINE vec<R, N> operator~(const vec<R, N>& a) { TQ_EACH(~a.v[i]); }
template <class T, int N> TQ_INLINE vec<bool, N> operator!(const vec<T, N>& a) { typedef bool R; TQ_EACH(!a.v[i]); }

// Vectors without padding or alignment beyond their elements'.
template <class T, int N> struct packed_vec {
  T v[N];
  packed_vec() = default;
  TQ_INLINE packed_vec(const vec<T, N>& o) { for (int i = 0; i < N; ++i) v[i] = o.v[i]; }
  template <class... A, class = enable_if_t<sizeof...(A) == N>> TQ_INLINE packed_vec(A... a) : v{T(a)...} {}
  TQ_INLINE operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; ++i) r.v[i] = v[i];
    return r;
  }
  TQ_INLINE T& operator[](uint i) { return v[i]; }
  TQ_INLINE const T& operator[](uint i) const { return v[i]; }
  template <int... I> TQ_INLINE vec<T, sizeof...(I)> tq_get() const { return vec<T, sizeof...(I)>(v[I]...); }
};

}  // namespace metal

#define TQ_TYPEDEFS(T, name) \
  typedef metal::vec<T, 2> name##2; typedef metal::vec<T, 3> name##3; typedef metal::vec<T, 4> name##4; \
  typedef metal::packed_vec<T, 2> packed_##name##2; typedef metal::packed_vec<T, 3> packed_##name##3; \
  typedef metal::packed_vec<T, 4> packed_##name##4;
using metal::bfloat;
using metal::half;
using metal::as_type;
using metal::vec;
TQ_TYPEDEFS(bool, bool) TQ_TYPEDEFS(char, char) TQ_TYPEDEFS(uchar, uchar) TQ_TYPEDEFS(short, short)
TQ_TYPEDEFS(ushort, ushort) TQ_TYPEDEFS(int, int) TQ_TYPEDEFS(uint, uint) TQ_TYPEDEFS(long, long)
TQ_TYPEDEFS(ulong, ulong) TQ_TYPEDEFS(float, float) TQ_TYPEDEFS(half, half) TQ_TYPEDEFS(bfloat, bfloat)
#undef TQ_TYPEDEFS
