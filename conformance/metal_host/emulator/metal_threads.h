// What threads do together: barriers, simd functions, atomics, threadgroup variables.
#pragma once
#include "metal_math.h"

// The line of kernel text that calls: two lanes wait for the same operation when these agree.
#define TQ_HERE uint tq_line = __builtin_LINE()

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
TQ_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
TQ_INLINE void threadgroup_barrier(mem_flags f, TQ_HERE) { tq_threadgroup_barrier(uint(f), tq_line); }
TQ_INLINE void simdgroup_barrier(mem_flags f, TQ_HERE) { tq_simdgroup_barrier(uint(f), tq_line); }

// ---- simd functions -------------------------------------------------------------------------------------------
namespace simd_detail {

template <class T> const T& in(const tq_simd_op* op, uint lane) { return *reinterpret_cast<const T*>(op->in + lane * TQ_SLOT); }
template <class T> T& out(tq_simd_op* op, uint lane) { return *reinterpret_cast<T*>(op->out + lane * TQ_SLOT); }

template <class T> struct element { typedef typename vec_traits<T>::element type; };
template <class T> constexpr bool floating = is_floating_point_v<typename element<T>::type>;

template <class T> bool same_bits(const T& a, const T& b) {
  const unsigned char *p = reinterpret_cast<const unsigned char*>(&a), *q = reinterpret_cast<const unsigned char*>(&b);
  for (uint i = 0; i < sizeof(T); ++i)
    if (p[i] != q[i]) return false;
  return true;
}

struct Sum { template <class T> static T apply(const T& a, const T& b) { return T(a + b); } };
struct Product { template <class T> static T apply(const T& a, const T& b) { return T(a * b); } };
struct Min { template <class T> static T apply(const T& a, const T& b) { return min(a, b); } };
struct Max { template <class T> static T apply(const T& a, const T& b) { return max(a, b); } };
struct And { template <class T> static T apply(const T& a, const T& b) { return T(a & b); } };
struct Or { template <class T> static T apply(const T& a, const T& b) { return T(a | b); } };
struct Xor { template <class T> static T apply(const T& a, const T& b) { return T(a ^ b); } };

// Signed sums wrap in hardware; here they are taken on the unsigned type, which wraps by definition.
template <class O, class T> T combine(const T& a, const T& b) {
  if constexpr (is_integral_v<T> && is_signed_v<T>) {
    typedef typename unsigned_of<T>::type U;
    if constexpr (is_same_v<O, Sum> || is_same_v<O, Product>) return T(O::template apply<ulong>(ulong(U(a)), ulong(U(b))));
    else return O::apply(a, b);
  } else {
    return O::apply(a, b);
  }
}

template <class O, class T> T in_order(const tq_simd_op* op, bool backwards) {
  const uint n = op->active_count;
  T sum = in<T>(op, op->order[backwards ? n - 1 : 0]);
  for (uint i = 1; i < n; ++i) sum = combine<O>(sum, in<T>(op, op->order[backwards ? n - 1 - i : i]));
  return sum;
}

template <class O, class T> T as_tree(const tq_simd_op* op) {
  T part[TQ_LANES];
  bool have[TQ_LANES];
  for (uint i = 0; i < TQ_LANES; ++i) {
    have[i] = op->active >> i & 1;
    if (have[i]) part[i] = in<T>(op, i);
  }
  for (uint width = TQ_LANES / 2; width; width /= 2)
    for (uint i = 0; i < width; ++i) {
      if (!have[i + width]) continue;
      part[i] = have[i] ? combine<O>(part[i], part[i + width]) : part[i + width];
      have[i] = true;
    }
  return part[0];
}

template <class O, class T> void reduce(tq_simd_op* op) {
  const T forward = in_order<O, T>(op, false);
  T result = forward;
  if constexpr (floating<T> && (is_same_v<O, Sum> || is_same_v<O, Product>)) {
    const T tree = as_tree<O, T>(op);
    op->order_matters = !same_bits(forward, tree) || !same_bits(forward, in_order<O, T>(op, true));
    if (op->tree) result = tree;
  }
  for (uint i = 0; i < op->active_count; ++i) out<T>(op, op->order[i]) = result;
}

template <class O, class T, bool INCLUSIVE> void scan(tq_simd_op* op) {
  T sum = T(is_same_v<O, Product> ? 1 : 0);
  bool first = true;
  for (uint lane = 0; lane < TQ_LANES; ++lane) {
    if (!(op->active >> lane & 1)) continue;
    const T mine = in<T>(op, lane), next = first ? mine : combine<O>(sum, mine);
    out<T>(op, lane) = INCLUSIVE ? next : sum;
    sum = next;
    first = false;
  }
}

// Where a lane reads. DOWN and UP leave lanes beyond the end undefined: they get all ones.
enum Move { TO, XOR, DOWN, UP, ROTATE_DOWN, ROTATE_UP, FIRST, QUAD, QUAD_XOR };
template <class T, Move M> void move(tq_simd_op* op) {
  for (uint k = 0; k < op->active_count; ++k) {
    const uint lane = op->order[k], by = op->argument[lane];
    const uint from = M == TO ? by : M == XOR ? lane ^ by : M == DOWN ? lane + by : M == UP ? lane - by
        : M == ROTATE_DOWN ? (lane + by) % TQ_LANES : M == ROTATE_UP ? (lane - by) % TQ_LANES
        : M == QUAD ? (lane & ~3u) + by : M == QUAD_XOR ? (lane ^ (by & 3u)) : uint(__builtin_ctz(op->active));
    if (from < TQ_LANES && (op->active >> from & 1)) {
      out<T>(op, lane) = in<T>(op, from);
    } else {
      unsigned char* bytes = op->out + lane * TQ_SLOT;
      for (uint i = 0; i < sizeof(T); ++i) bytes[i] = 0xFF;
      if (M != DOWN && M != UP) op->inactive_read |= 1u << lane;
    }
  }
}

inline void ballot(tq_simd_op* op) {
  ulong mask = 0;
  for (uint i = 0; i < TQ_LANES; ++i)
    if ((op->active >> i & 1) && in<bool>(op, i)) mask |= 1ul << i;
  for (uint k = 0; k < op->active_count; ++k) {
    out<ulong>(op, op->order[k]) = mask;
    *reinterpret_cast<uint*>(op->out + op->order[k] * TQ_SLOT + 8) = op->active;
  }
}

template <class T, class R = T> TQ_INLINE R call(tq_simd_fn fn, const T& value, uint argument, uint line) {
  static_assert(sizeof(T) <= TQ_SLOT, "simd functions take scalars and vectors");
  TQ_COUNTED(sizeof(T) == 8, as_type<R>(tq_op_simd64(fn, as_type<ulong>(value), argument, line)))
  TQ_COUNTED(sizeof(T) == 4, as_type<R>(tq_op_simd32(fn, as_type<uint>(value), argument, line)))
  TQ_COUNTED(sizeof(T) == 2, as_type<R>(tq_op_simd16(fn, as_type<ushort>(value), argument, line)))
  TQ_COUNTED(sizeof(T) == 1, as_type<R>(tq_op_simd8(fn, as_type<uchar>(value), argument, line)))
  alignas(16) unsigned char buffer[TQ_SLOT];
  tq_copy(buffer, &value, sizeof(T));
  tq_simd(fn, buffer, buffer, sizeof(R) > sizeof(T) ? sizeof(R) : sizeof(T), argument, line);
  R result;
  tq_copy(&result, buffer, sizeof(R));
  return result;
}

struct Vote { ulong mask; uint active, unused; };

}  // namespace simd_detail

// For counting, a simd function of a vector is one of each component.
#ifdef TQ_COUNT
#define TQ_SIMD_PARTS(name) \
  template <class R, int N> TQ_INLINE vec<R, N> name(const vec<R, N>& a, TQ_HERE) { TQ_EACH(name(a.v[i], tq_line)); }
#define TQ_SIMD_MOVE_PARTS(name) \
  template <class R, int N> TQ_INLINE vec<R, N> name(const vec<R, N>& a, ushort by, TQ_HERE) { \
    TQ_EACH(name(a.v[i], by, tq_line)); \
  }
#else
#define TQ_SIMD_PARTS(name)
#define TQ_SIMD_MOVE_PARTS(name)
#endif
#define TQ_SIMD_REDUCE(name, O) \
  template <class T> TQ_INLINE T name(T v, TQ_HERE) { \
    return simd_detail::call<T>(simd_detail::reduce<simd_detail::O, T>, v, 0, tq_line); \
  } \
  TQ_SIMD_PARTS(name)
TQ_SIMD_REDUCE(simd_sum, Sum) TQ_SIMD_REDUCE(simd_product, Product) TQ_SIMD_REDUCE(simd_min, Min)
TQ_SIMD_REDUCE(simd_max, Max) TQ_SIMD_REDUCE(simd_and, And) TQ_SIMD_REDUCE(simd_or, Or) TQ_SIMD_REDUCE(simd_xor, Xor)
#undef TQ_SIMD_REDUCE
#define TQ_SIMD_SCAN(name, O, INCLUSIVE) \
  template <class T> TQ_INLINE T name(T v, TQ_HERE) { \
    return simd_detail::call<T>(simd_detail::scan<simd_detail::O, T, INCLUSIVE>, v, 0, tq_line); \
  } \
  TQ_SIMD_PARTS(name)
TQ_SIMD_SCAN(simd_prefix_inclusive_sum, Sum, true) TQ_SIMD_SCAN(simd_prefix_exclusive_sum, Sum, false)
TQ_SIMD_SCAN(simd_prefix_inclusive_product, Product, true) TQ_SIMD_SCAN(simd_prefix_exclusive_product, Product, false)
#undef TQ_SIMD_SCAN
#define TQ_SIMD_MOVE(name, M) \
  template <class T> TQ_INLINE T name(T v, ushort by, TQ_HERE) { \
    return simd_detail::call<T>(simd_detail::move<T, simd_detail::M>, v, by, tq_line); \
  } \
  TQ_SIMD_MOVE_PARTS(name)
TQ_SIMD_MOVE(simd_shuffle, TO) TQ_SIMD_MOVE(simd_broadcast, TO) TQ_SIMD_MOVE(simd_shuffle_xor, XOR)
TQ_SIMD_MOVE(simd_shuffle_down, DOWN) TQ_SIMD_MOVE(simd_shuffle_up, UP)
TQ_SIMD_MOVE(simd_shuffle_rotate_down, ROTATE_DOWN) TQ_SIMD_MOVE(simd_shuffle_rotate_up, ROTATE_UP)
TQ_SIMD_MOVE(quad_shuffle, QUAD) TQ_SIMD_MOVE(quad_broadcast, QUAD) TQ_SIMD_MOVE(quad_shuffle_xor, QUAD_XOR)
#undef TQ_SIMD_MOVE
template <class T> TQ_INLINE T simd_broadcast_first(T v, TQ_HERE) {
  return simd_detail::call<T>(simd_detail::move<T, simd_detail::FIRST>, v, 0, tq_line);
}

class simd_vote {
 public:
  typedef ulong vote_t;
  simd_vote() = default;
  TQ_INLINE explicit simd_vote(vote_t v) : mask(v), active(~0u) {}
  TQ_INLINE simd_vote(simd_detail::Vote v) : mask(v.mask), active(v.active) {}
  TQ_INLINE explicit operator vote_t() const { return mask; }
  TQ_INLINE bool all() const { return uint(mask) == active; }
  TQ_INLINE bool any() const { return mask != 0; }

 private:
  vote_t mask;
  uint active;
};
TQ_INLINE simd_vote simd_ballot(bool v, TQ_HERE) {
#ifdef TQ_COUNT
  const ulong counted = tq_op_simd_ballot(simd_detail::ballot, v, tq_line);
  return simd_vote(simd_detail::Vote{counted, tq_active(simd_detail::ballot, counted), 0});
#else
  return simd_vote(simd_detail::call<bool, simd_detail::Vote>(simd_detail::ballot, v, 0, tq_line));
#endif
}
TQ_INLINE bool simd_all(bool v, TQ_HERE) { return simd_ballot(v, tq_line).all(); }
TQ_INLINE bool simd_any(bool v, TQ_HERE) { return simd_ballot(v, tq_line).any(); }
TQ_INLINE simd_vote simd_active_threads_mask(TQ_HERE) { return simd_ballot(true, tq_line); }
TQ_INLINE bool simd_is_first(TQ_HERE) {
  const uint mine = simd_detail::call<uint>(simd_detail::scan<simd_detail::Sum, uint, false>, 1u, 0, tq_line);
  return mine == 0;
}

// ---- atomics: plain operations, since threads take turns; the runtime checks the access --------------------------
enum memory_order { memory_order_relaxed };

template <class T> struct atomic { T tq_value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

template <class T> TQ_INLINE T tq_peek(const volatile atomic<T>* p) {
  TQ_COUNTED(sizeof(T) == 4, as_type<T>(tq_peek32(p)))
  T v;
  tq_copy(&v, p, sizeof(T));
  return v;
}
template <class T> TQ_INLINE void tq_poke(volatile atomic<T>* p, T v) {
  TQ_COUNTED(sizeof(T) == 4, tq_poke32(p, as_type<uint>(v)))
  tq_copy(p, &v, sizeof(T));
}

template <class T> TQ_INLINE T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  tq_atomic(p, sizeof(T), TQ_ATOMIC_LOAD);
  return tq_peek(p);
}
template <class T> TQ_INLINE void atomic_store_explicit(volatile atomic<T>* p, typename identity<T>::type v, memory_order) {
  tq_atomic(p, sizeof(T), TQ_ATOMIC_STORE);
  tq_poke(p, v);
}
#define TQ_ATOMIC(name, kind, expression) \
  template <class T> TQ_INLINE T name(volatile atomic<T>* p, typename identity<T>::type v, memory_order) { \
    tq_atomic(p, sizeof(T), kind); \
    const T old = tq_peek(p); \
    tq_poke(p, T(expression)); \
    return old; \
  }
#define TQ_SUM_KIND (is_floating_point_v<T> ? TQ_ATOMIC_UPDATE_FLOAT : TQ_ATOMIC_UPDATE)
TQ_ATOMIC(atomic_exchange_explicit, TQ_ATOMIC_UPDATE, v)
TQ_ATOMIC(atomic_fetch_add_explicit, TQ_SUM_KIND, simd_detail::combine<simd_detail::Sum>(old, v))
TQ_ATOMIC(atomic_fetch_sub_explicit, TQ_SUM_KIND, simd_detail::combine<simd_detail::Sum>(old, T(T(0) - v)))
TQ_ATOMIC(atomic_fetch_min_explicit, TQ_ATOMIC_UPDATE, min(old, v))
TQ_ATOMIC(atomic_fetch_max_explicit, TQ_ATOMIC_UPDATE, max(old, v))
TQ_ATOMIC(atomic_fetch_and_explicit, TQ_ATOMIC_UPDATE, old & v)
TQ_ATOMIC(atomic_fetch_or_explicit, TQ_ATOMIC_UPDATE, old | v)
TQ_ATOMIC(atomic_fetch_xor_explicit, TQ_ATOMIC_UPDATE, old ^ v)
#undef TQ_ATOMIC
#undef TQ_SUM_KIND
template <class T>
TQ_INLINE bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected, typename identity<T>::type desired,
                                                     memory_order, memory_order) {
  tq_atomic(p, sizeof(T), TQ_ATOMIC_UPDATE);
  const T old = tq_peek(p);
  if (!simd_detail::same_bits(old, *expected)) {
    *expected = old;
    return false;
  }
  tq_poke(p, desired);
  return true;
}

}  // namespace metal

namespace tq {
template <class T> struct element_of { typedef T type; };
template <class T, size_t N> struct element_of<T[N]> { typedef typename element_of<T>::type type; };

// Storage that the threads of a group share: every declaration site is one variable.
template <class T> TQ_INLINE T& threadgroup_variable(uint32_t id, const char* name) {
  return *static_cast<T*>(tq_threadgroup_variable(id, name, sizeof(T), sizeof(typename element_of<T>::type)));
}

// A position attribute as the type that the kernel declares: a scalar is its first component.
template <class T> struct position { static T get(const uint32_t* a) { return T(a[0]); } };
template <class T, int N> struct position<metal::vec<T, N>> {
  static metal::vec<T, N> get(const uint32_t* a) {
    metal::vec<T, N> r;
    for (int i = 0; i < N; ++i) r.v[i] = T(a[i]);
    return r;
  }
};

template <class P> struct argument {
  static P get(void* const*, const tq_thread* t, int k) { return position<P>::get(t->attribute[-1 - k]); }
};
template <class P> struct argument<P*> {
  static P* get(void* const* b, const tq_thread*, int k) { return static_cast<P*>(b[k]); }
};
template <class P> struct argument<P&> {
  static P& get(void* const* b, const tq_thread*, int k) { return *static_cast<P*>(b[k]); }
};
// K: for each parameter its buffer number, or -1 minus the number of its position attribute.
template <int... K, class... P> inline void invoke(void (*f)(P...), void* const* buffers, const tq_thread* t) {
  f(argument<P>::get(buffers, t, K)...);
}
}  // namespace tq
