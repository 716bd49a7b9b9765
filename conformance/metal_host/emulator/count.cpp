// Counts how often each basic block of one kernel runs and what its accesses touch; linked into the counted kernel.
#include "metal_host.h"

#undef device
#undef constant
#undef threadgroup
#undef thread
#undef kernel

#include <string.h>

#include "state.h"

namespace {

enum { PRIVATE, CONSTANTS, THREADGROUP, CLASSES };

// One line of the tally: of a buffer, or of a class of other memory. An access counts once per four bytes.
struct Tally {
  uint64_t loads, load_bytes, stores, store_bytes;
};

struct Span {
  uint64_t lo, hi;
  uint8_t* read;     // one byte per byte of the buffer: was it read
  uint8_t* written;
};

uint64_t* blocks;
uint64_t* issued;  // runs of each block by simdgroups: as many as those of the lane that runs it most
uint32_t* by_thread;  // of the threadgroup that runs now
uint32_t block_count, group;
Tally* tallies;  // of the buffers, then of the classes
Span spans[256];
uint64_t* offsets;
uint32_t buffer_count;

void fold() {
  for (uint32_t first = 0; first < tq::MAX_THREADS; first += TQ_LANES)
    for (uint32_t b = 0; b < block_count; ++b) {
      uint32_t most = 0;
      for (uint32_t t = first; t < first + TQ_LANES; ++t) {
        uint32_t& runs = by_thread[uint64_t(t) * block_count + b];
        blocks[b] += runs;
        if (runs > most) most = runs;
        runs = 0;
      }
      issued[b] += most;
    }
}

void note(Tally& tally, uint32_t size, bool store) {
  const uint64_t times = (size + 3) / 4;
  if (store) {
    tally.stores += times;
    tally.store_bytes += size;
  } else {
    tally.loads += times;
    tally.load_bytes += size;
  }
}

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];

template <class T> T simd(tq_simd_fn fn, T value, uint32_t argument, uint32_t line) {
  alignas(16) unsigned char bytes[TQ_SLOT];
  memcpy(bytes, &value, sizeof value);
  tq_simd(fn, bytes, bytes, sizeof value, argument, line);
  memcpy(&value, bytes, sizeof value);
  return value;
}

uint32_t last_active;

}  // namespace

#define TQ_SHOWN __attribute__((visibility("default")))

extern "C" {

void tq_entry(void* const* buffers, const tq_thread* at);

// `block_counts` has runs by threads, then by simdgroups; `threads` a count per block and thread of a threadgroup. `read`
// and `written` hold a byte per byte of all buffers, one buffer after the other.
TQ_SHOWN void tq_count_setup(uint64_t* block_counts, uint32_t* threads, uint32_t count, void* tally, uint32_t buffers,
                             const uint64_t* sizes, uint64_t* starts, uint8_t* read, uint8_t* written) {
  blocks = block_counts;
  issued = block_counts + count;
  by_thread = threads;
  block_count = count;
  group = 0;
  tallies = static_cast<Tally*>(tally);
  offsets = starts;
  buffer_count = buffers;
  for (uint32_t i = 0; i < buffers; ++i) {
    spans[i] = {0, sizes[i], read, written};
    read += sizes[i];
    written += sizes[i];
  }
}

TQ_SHOWN void tq_count_finish() { fold(); }

TQ_SHOWN void tq_counted_entry(void* const* buffers, const tq_thread* at) {
  if (tq::g.group != group) fold();
  group = tq::g.group;
  for (uint32_t i = 0; i < buffer_count; ++i) {
    Span& s = spans[i];
    const uint64_t size = s.hi - s.lo;
    s.lo = reinterpret_cast<uint64_t>(buffers[i]) - offsets[i];
    s.hi = s.lo + size;
  }
  tq_entry(buffers, at);
}

void tq_count_block(uint32_t block) {
  ++by_thread[uint64_t(tq::g.current->id % tq::MAX_THREADS) * block_count + block];
}

void tq_count_access(uint64_t address, uint32_t size, uint32_t store) {
  for (uint32_t i = 0; i < buffer_count; ++i) {
    Span& s = spans[i];
    if (address < s.lo || address >= s.hi) continue;
    note(tallies[i], size, store);
    const uint64_t from = address - s.lo, left = s.hi - address;
    memset((store ? s.written : s.read) + from, 1, size < left ? size : left);
    return;
  }
  const uint64_t here = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  const bool near_stack = address + 256 * 1024 > here && address < here + 256 * 1024;
  const bool image = address >= reinterpret_cast<uint64_t>(__ehdr_start) && address < reinterpret_cast<uint64_t>(_end);
  note(tallies[buffer_count + (near_stack ? PRIVATE : image ? CONSTANTS : THREADGROUP)], size, store);
}

float tq_bfloat_to_float(uint16_t bits) { return metal::as_type<float>(uint(bits) << 16); }
float tq_op_rsqrt(float a) { return metal::rsqrt(a); }
float tq_op_exp10(float a) { return metal::exp10(a); }
float tq_op_sign(float a) { return metal::sign(a); }
float tq_op_fract(float a) { return metal::fract(a); }
float tq_op_saturate(float a) { return metal::saturate(a); }
uint32_t tq_op_clz(uint32_t a) { return metal::clz(a); }
uint32_t tq_op_ctz(uint32_t a) { return metal::ctz(a); }
uint32_t tq_op_reverse_bits(uint32_t a) { return metal::reverse_bits(a); }
uint32_t tq_op_rotate(uint32_t a, uint32_t by) { return metal::rotate(a, by); }
uint32_t tq_op_extract_bits(uint32_t a, uint32_t offset, uint32_t bits) { return metal::extract_bits(a, offset, bits); }
int32_t tq_op_extract_signed_bits(int32_t a, uint32_t offset, uint32_t bits) {
  return metal::extract_bits(a, offset, bits);
}
uint32_t tq_op_insert_bits(uint32_t a, uint32_t b, uint32_t offset, uint32_t bits) {
  return metal::insert_bits(a, b, offset, bits);
}
uint32_t tq_op_mulhi(uint32_t a, uint32_t b) { return metal::mulhi(a, b); }
int32_t tq_op_mulhi_signed(int32_t a, int32_t b) { return metal::mulhi(a, b); }

uint8_t tq_op_simd8(tq_simd_fn fn, uint8_t v, uint32_t argument, uint32_t line) { return simd(fn, v, argument, line); }
uint16_t tq_op_simd16(tq_simd_fn fn, uint16_t v, uint32_t argument, uint32_t line) { return simd(fn, v, argument, line); }
uint32_t tq_op_simd32(tq_simd_fn fn, uint32_t v, uint32_t argument, uint32_t line) { return simd(fn, v, argument, line); }
uint64_t tq_op_simd64(tq_simd_fn fn, uint64_t v, uint32_t argument, uint32_t line) { return simd(fn, v, argument, line); }

uint64_t tq_op_simd_ballot(tq_simd_fn fn, bool value, uint32_t line) {
  alignas(16) unsigned char bytes[TQ_SLOT] = {value};
  tq_simd(fn, bytes, bytes, 16, 0, line);
  uint64_t mask;
  memcpy(&mask, bytes, sizeof mask);
  memcpy(&last_active, bytes + 8, sizeof last_active);
  return mask;
}
// Called next to the ballot, before another thread has its turn.
uint32_t tq_active(tq_simd_fn, uint64_t) { return last_active; }

uint32_t tq_peek32(const volatile void* p) { return *static_cast<const volatile uint32_t*>(p); }
void tq_poke32(volatile void* p, uint32_t bits) { *static_cast<volatile uint32_t*>(p) = bits; }

}  // extern "C"
