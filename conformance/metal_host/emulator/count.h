// What changes for counting operations: what Metal has as one operation is one call here, and nothing else is added.
//
// The names behind `tq_op_` say what is called; count_classes.py has their categories. The calls read no memory, so that
// the compiler may move and join them as it would the operations they stand for; `convergent` keeps the simd functions in
// their branches.
#pragma once
#include "interface.h"

#define TQ_PURE __attribute__((const))
#define TQ_SIMD_CALL __attribute__((const, convergent))

extern "C" {

TQ_PURE float tq_half_to_float(uint16_t bits);
TQ_PURE uint16_t tq_float_to_half(float value);
TQ_PURE uint16_t tq_float_to_bfloat(float value);
TQ_PURE float tq_bfloat_to_float(uint16_t bits);

TQ_PURE float tq_op_rsqrt(float a);
TQ_PURE float tq_op_exp10(float a);
TQ_PURE float tq_op_sign(float a);
TQ_PURE float tq_op_fract(float a);
TQ_PURE float tq_op_saturate(float a);
TQ_PURE uint32_t tq_op_clz(uint32_t a);
TQ_PURE uint32_t tq_op_ctz(uint32_t a);
TQ_PURE uint32_t tq_op_reverse_bits(uint32_t a);
TQ_PURE uint32_t tq_op_rotate(uint32_t a, uint32_t by);
TQ_PURE uint32_t tq_op_extract_bits(uint32_t a, uint32_t offset, uint32_t bits);
TQ_PURE int32_t tq_op_extract_signed_bits(int32_t a, uint32_t offset, uint32_t bits);
TQ_PURE uint32_t tq_op_insert_bits(uint32_t a, uint32_t b, uint32_t offset, uint32_t bits);
TQ_PURE uint32_t tq_op_mulhi(uint32_t a, uint32_t b);
TQ_PURE int32_t tq_op_mulhi_signed(int32_t a, int32_t b);

__attribute__((convergent)) void tq_threadgroup_barrier(uint32_t flags, uint32_t line);
__attribute__((convergent)) void tq_simdgroup_barrier(uint32_t flags, uint32_t line);
TQ_SIMD_CALL uint8_t tq_op_simd8(tq_simd_fn fn, uint8_t value, uint32_t argument, uint32_t line);
TQ_SIMD_CALL uint16_t tq_op_simd16(tq_simd_fn fn, uint16_t value, uint32_t argument, uint32_t line);
TQ_SIMD_CALL uint32_t tq_op_simd32(tq_simd_fn fn, uint32_t value, uint32_t argument, uint32_t line);
TQ_SIMD_CALL uint64_t tq_op_simd64(tq_simd_fn fn, uint64_t value, uint32_t argument, uint32_t line);
TQ_SIMD_CALL uint64_t tq_op_simd_ballot(tq_simd_fn fn, bool value, uint32_t line);
TQ_SIMD_CALL uint32_t tq_active(tq_simd_fn fn, uint64_t ballot);

// Atomics take and give bits; the type's size is in the name.
uint32_t tq_peek32(const volatile void* p);
void tq_poke32(volatile void* p, uint32_t bits);

// Inserted by count_build.py: the block that starts, and the access that follows.
void tq_count_block(uint32_t block);
void tq_count_access(uint64_t address, uint32_t size, uint32_t store);

}  // extern "C"
