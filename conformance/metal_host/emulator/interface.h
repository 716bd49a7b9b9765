// What compiled kernel text, the runtime and the Python side agree on. Plain C layouts only: ctypes mirrors them.
#pragma once
#include <stddef.h>
#include <stdint.h>

extern "C" {

// Position attributes of one thread, in the order of the names in translate.py (ATTRIBUTES).
struct tq_thread {
  uint32_t attribute[20][3];
};

// The generated entry of one kernel: casts the buffers to the parameter types and calls the kernel function.
typedef void (*tq_entry_fn)(void* const* buffers, const tq_thread* thread);

enum tq_buffer_flag : uint32_t { TQ_OUTPUT = 1, TQ_INITIALISED = 2 };

struct tq_buffer {
  const void* data;    // bytes to copy in (null: nothing to copy)
  void* out;           // where to copy the bytes back to (outputs)
  uint64_t size;       // bytes the kernel may touch
  uint64_t offset;     // where the pointer handed to the kernel stands in them (not 0 for negative strides)
  uint32_t item_size;  // bytes per element
  uint32_t flags;
};

enum tq_order : uint32_t { TQ_FORWARD, TQ_REVERSE, TQ_SHUFFLE, TQ_TREE };

struct tq_launch {
  tq_entry_fn entry;
  tq_buffer* buffers;
  uint32_t buffer_count;
  uint32_t grid[3];
  uint32_t group[3];
  uint32_t order;        // of threads within a group, and of groups
  uint32_t float_order;  // of floating-point simd reductions
  uint32_t poison;       // fill unwritten memory with 0xFF (not-a-number, all ones) instead of zero
  uint32_t byte_shadow;  // one shadow cell per byte (else per element)
  uint32_t flush;        // flush float32 subnormals to zero
  uint64_t seed;
  uint64_t checks;  // bit k: report findings of kind k
  double timeout;   // seconds of processor time
};

// One kind of finding; findings.py lists the names in the same order.
enum tq_kind : uint32_t {
  TQ_OOB_READ, TQ_OOB_WRITE, TQ_NULL, TQ_WRITE_TO_INPUT, TQ_UNINIT_THREADGROUP, TQ_UNINIT_OUTPUT, TQ_UNWRITTEN,
  TQ_RACE_RW, TQ_RACE_WW, TQ_RACE_GROUPS, TQ_BARRIER_DIVERGENCE, TQ_SIMD_DIVERGENCE, TQ_SIMD_INACTIVE,
  TQ_ARRAY_BOUNDS, TQ_SHIFT, TQ_OVERFLOW, TQ_DIVISION, TQ_FLOAT_TO_INT, TQ_MISALIGNED, TQ_MISSING_RETURN,
  TQ_FOREIGN_STACK, TQ_HANG, TQ_CRASH, TQ_THREADGROUP_MEMORY, TQ_FLOAT_ORDER, TQ_KINDS
};

enum { TQ_CHAIN = 8, TQ_RECORDS = 64, TQ_NO_THREAD = 0xFFFFFFFFu, TQ_NO_REGION = 0xFFFFFFFFu };

struct tq_record {
  uint32_t kind;
  uint32_t region;  // buffer number; from buffer_count on, threadgroup variables
  int64_t offset;   // bytes from the start of the region
  uint32_t size;    // bytes touched; TQ_UNWRITTEN: bytes missing
  uint32_t thread, other;  // group * 1024 + thread in the group
  uint32_t count;
  uint32_t suspect;  // divergence: same line, other code address; a finding only if the call chains differ
  uint32_t pc[TQ_CHAIN], other_pc[TQ_CHAIN];  // code addresses relative to the image, innermost first, 0 ends
};

struct tq_variable {
  char name[48];
  uint32_t size, item_size, id;
};

struct tq_report {
  uint32_t count, aborted, want_byte_shadow, variable_count;
  uint64_t threads, accesses, threadgroup_bytes;
  tq_record records[TQ_RECORDS];
  tq_variable variables[64];
};

int tq_run(const tq_launch* launch, tq_report* report);

// Calls made by kernel text.
void* tq_threadgroup_variable(uint32_t id, const char* name, uint64_t size, uint32_t item_size);
void tq_threadgroup_barrier(uint32_t flags, uint32_t line);
void tq_simdgroup_barrier(uint32_t flags, uint32_t line);

enum { TQ_LANES = 32, TQ_SLOT = 64 };

// One resolved simd operation: the lanes that take part and what each brought.
struct tq_simd_op {
  const unsigned char* in;  // TQ_LANES slots of TQ_SLOT bytes
  unsigned char* out;
  const uint32_t* argument;  // one per lane
  const uint32_t* order;     // active lanes, in the order that floating-point sums should take
  uint32_t active;           // mask
  uint32_t active_count;
  uint32_t tree;          // sum as a balanced tree of lane pairs instead of in `order`
  uint32_t order_matters;  // set by the operation when the sum depends on its order
  uint32_t inactive_read;  // set by the operation: lanes that read a lane that takes no part
};
typedef void (*tq_simd_fn)(tq_simd_op* op);
void tq_simd(tq_simd_fn fn, const void* in, void* out, uint32_t size, uint32_t argument, uint32_t line);

enum tq_atomic_kind : uint32_t { TQ_ATOMIC_LOAD, TQ_ATOMIC_STORE, TQ_ATOMIC_UPDATE, TQ_ATOMIC_UPDATE_FLOAT };
void tq_atomic(const volatile void* address, uint32_t size, uint32_t kind);
void tq_copy(volatile void* to, const volatile void* from, uint64_t size);

float tq_half_to_float(uint16_t bits);
uint16_t tq_float_to_half(float value);
uint16_t tq_float_to_bfloat(float value);

}  // extern "C"
