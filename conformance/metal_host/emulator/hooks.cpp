// The compiler's instrumentation: memory accesses and calls (the thread sanitizer's hooks), undefined behaviour.
#include "shadow.h"

namespace {

using namespace tq;

inline uint64_t caller(void* address) { return reinterpret_cast<uint64_t>(address) - 1; }

void undefined_behaviour(uint32_t kind, uint64_t pc) {
  if (!g.current) return;
  g.current->pc = pc;
  record(kind, TQ_NO_REGION, 0, 0, pc);
}

}  // namespace

extern "C" {

#define TQ_HOOK(name, size, read, write)                                                                      \
  void __tsan_##name(void* p) {                                                                               \
    access(reinterpret_cast<uint64_t>(p), size, read, write, false, caller(__builtin_return_address(0)));     \
  }
#define TQ_HOOKS(size)                          \
  TQ_HOOK(read##size, size, true, false)        \
  TQ_HOOK(write##size, size, false, true)       \
  TQ_HOOK(volatile_read##size, size, true, false) \
  TQ_HOOK(volatile_write##size, size, false, true) \
  TQ_HOOK(unaligned_read##size, size, true, false) \
  TQ_HOOK(unaligned_write##size, size, false, true)
TQ_HOOKS(1)
TQ_HOOKS(2)
TQ_HOOKS(4)
TQ_HOOKS(8)
TQ_HOOKS(16)

void __tsan_read_range(void* p, unsigned long size) {
  access(reinterpret_cast<uint64_t>(p), size, true, false, false, caller(__builtin_return_address(0)));
}
void __tsan_write_range(void* p, unsigned long size) {
  access(reinterpret_cast<uint64_t>(p), size, false, true, false, caller(__builtin_return_address(0)));
}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __tsan_func_entry(void* pc) {
  Fiber* me = g.current;
  if (!me) return;
  if (me->depth < MAX_CALLS) me->calls[me->depth] = caller(pc);
  ++me->depth;
}
void __tsan_func_exit() {
  if (g.current) --g.current->depth;
}

#define TQ_UNDEFINED(name, kind, parameters) \
  void __ubsan_handle_##name parameters { undefined_behaviour(kind, caller(__builtin_return_address(0))); }
TQ_UNDEFINED(shift_out_of_bounds, TQ_SHIFT, (void*, void*, void*))
TQ_UNDEFINED(add_overflow, TQ_OVERFLOW, (void*, void*, void*))
TQ_UNDEFINED(sub_overflow, TQ_OVERFLOW, (void*, void*, void*))
TQ_UNDEFINED(mul_overflow, TQ_OVERFLOW, (void*, void*, void*))
TQ_UNDEFINED(negate_overflow, TQ_OVERFLOW, (void*, void*))
TQ_UNDEFINED(float_cast_overflow, TQ_FLOAT_TO_INT, (void*, void*))

// What follows these would crash or run off: the launch ends here.
#define TQ_FATAL(name, kind, parameters)                                          \
  void __ubsan_handle_##name parameters {                                         \
    undefined_behaviour(kind, caller(__builtin_return_address(0)));               \
    if (g.current) abandon();                                                     \
  }
TQ_FATAL(out_of_bounds, TQ_ARRAY_BOUNDS, (void*, void*))
TQ_FATAL(divrem_overflow, TQ_DIVISION, (void*, void*, void*))
TQ_FATAL(missing_return, TQ_MISSING_RETURN, (void*))

void __ubsan_handle_type_mismatch_v1(void*, void* pointer) {
  if (!g.current) return;
  const uint64_t pc = caller(__builtin_return_address(0)), address = reinterpret_cast<uint64_t>(pointer);
  if (address < 65536) {
    record(TQ_NULL, TQ_NO_REGION, static_cast<int64_t>(address), 0, pc);
    abandon();
  }
  undefined_behaviour(TQ_MISALIGNED, pc);
}

void tq_atomic(const volatile void* p, uint32_t size, uint32_t kind) {
  const uint64_t pc = caller(__builtin_return_address(0));
  const bool read = kind != TQ_ATOMIC_STORE, write = kind != TQ_ATOMIC_LOAD;
  access(reinterpret_cast<uint64_t>(p), size, read, write, true, pc);
  if (kind == TQ_ATOMIC_UPDATE_FLOAT) record(TQ_FLOAT_ORDER, TQ_NO_REGION, 0, size, pc);
}

void tq_copy(volatile void* to, const volatile void* from, uint64_t size) {
  memcpy(const_cast<void*>(to), const_cast<const void*>(from), size);
}

static inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// Integer arithmetic throughout: half's subnormals are kept although float32's are flushed.
float tq_half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FFu;
  if (exponent == 31) return from_bits(sign | 0x7F800000u | mantissa << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  if (!mantissa) return from_bits(sign);
  const uint32_t shift = static_cast<uint32_t>(__builtin_clz(mantissa)) - 21;
  return from_bits(sign | (113 - shift) << 23 | ((mantissa << shift) & 0x3FFu) << 13);
}

uint16_t tq_float_to_half(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);
  const uint32_t exponent = magnitude >> 23;
  // Below 2^-14 the result counts in units of 2^-24: the significand moves right until it does.
  const uint32_t drop = exponent < 113 ? 126 - exponent : 13;
  const uint32_t significand = exponent < 113 ? (magnitude & 0x7FFFFFu) | 0x800000u : magnitude - 0x38000000u;
  const uint32_t kept = significand >> drop, rest = significand & ((1u << drop) - 1), tie = 1u << (drop - 1);
  return static_cast<uint16_t>(sign | (kept + (rest > tie || (rest == tie && (kept & 1)))));
}

uint16_t tq_float_to_bfloat(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

}  // extern "C"
