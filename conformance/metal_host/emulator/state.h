// The state of one launch. Nothing here allocates while kernel text runs: a signal may end the launch at any point.
#pragma once
#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>

#include "fiber.h"
#include "interface.h"

namespace tq {

constexpr uint32_t MAX_THREADS = 1024, MAX_SIMDGROUPS = MAX_THREADS / TQ_LANES, MAX_REGIONS = 192, MAX_CALLS = 64;
// A multiple of every page size in use (arm64 kernels have pages of up to 64 KiB).
constexpr uint64_t PAGE = 64 * 1024, GAP_PAGES = 4, STACK = 256 * 1024;
constexpr uint64_t VARIABLE_SPACE = 32u << 20;  // room for threadgroup variables, gaps included

enum State : uint32_t { READY, AT_SIMD, AT_SIMD_BARRIER, AT_BARRIER, DONE };
enum Space : uint32_t { DEVICE, THREADGROUP, SPACES };

struct Fiber {
  tq_context context;
  State state;
  uint32_t id;  // group * 1024 + thread in the group
  uint32_t lane, simdgroup;
  // The call stack outside inlined code, so that two threads at one line can be told apart by their callers.
  uint32_t depth;
  uint64_t calls[MAX_CALLS];
  uint64_t pc;  // of the last access or wait
  // What a waiting fiber waits for.
  tq_simd_fn fn;
  const void* in;
  void* out;
  uint32_t size, argument, line, flags;
  tq_thread thread;
};

// The last write and the readers of one granule (an element, or a byte) of checked memory. Epochs only grow; a new one
// starts with each group and with each barrier that orders the space. `sub` counts simdgroup barriers.
struct Cell {
  uint32_t w_id, w_epoch, w_sub, w_pc;
  uint32_t r_id, r_epoch, r_sub, r_pc;
  uint32_t o_id, o_pc;  // a reader of an earlier group
  uint32_t flags;
};
enum CellFlag : uint32_t {
  W_ATOMIC = 1, W_MANY = 2, R_ATOMIC = 4, R_MANY = 8, R_MIXED = 16, INITIALISED = 32, OTHER_READER = 64
};

struct Region {
  uint64_t lo, hi;
  uint32_t item_size, granule_shift;
  uint32_t writable, space;
  Cell* cells;
};

struct Globals {
  const tq_launch* launch;
  tq_report* report;
  uint64_t arena_lo, arena_hi, arena_used;
  uint16_t* owner;  // region number + 1 of each page of the arena
  uint64_t variable_lo, variable_used;
  Region regions[MAX_REGIONS];
  uint32_t region_count;
  Cell* cells;
  uint64_t cells_size, cells_used;
  uint64_t image_lo, image_hi;

  Fiber* current;  // null while the scheduler itself runs
  Fiber* last;     // that ran last
  Fiber* fibers;
  uint8_t* stacks;
  tq_context scheduler;
  sigjmp_buf crash;
  uint32_t group, threads;
  uint32_t epoch, group_epoch, space_epoch[SPACES];
  uint32_t sub[SPACES][MAX_SIMDGROUPS];
  uint64_t random;
  void* entry_buffers[MAX_REGIONS];
};

extern Globals g;

static inline uint32_t relative(uint64_t pc) {
  return pc >= g.image_lo && pc < g.image_hi ? static_cast<uint32_t>(pc - g.image_lo) : 0;
}

static inline bool wanted(uint32_t kind) { return (g.launch->checks >> kind) & 1; }

static inline void add_callers(uint32_t* chain, const Fiber& f) {
  uint32_t d = f.depth < MAX_CALLS ? f.depth : MAX_CALLS;
  for (uint32_t i = 1; i < TQ_CHAIN && d > 0; ++i) chain[i] = relative(f.calls[--d]);
}

// Adds a finding, or counts it on one of the same kind at the same two places.
static inline tq_record* record(uint32_t kind, uint32_t region, int64_t offset, uint32_t size, uint64_t pc,
                                uint32_t other = TQ_NO_THREAD, uint32_t other_pc = 0) {
  if (!wanted(kind)) return nullptr;
  const uint32_t where = relative(pc);
  tq_report* report = g.report;
  for (uint32_t i = 0; i < report->count; ++i) {
    tq_record& seen = report->records[i];
    if (seen.kind == kind && seen.pc[0] == where && seen.other_pc[0] == other_pc && seen.region == region) {
      ++seen.count;
      return nullptr;
    }
  }
  if (report->count == TQ_RECORDS) return nullptr;
  tq_record& r = report->records[report->count++];
  memset(&r, 0, sizeof r);
  r.kind = kind;
  r.region = region;
  r.offset = offset;
  r.size = size;
  r.thread = g.current ? g.current->id : TQ_NO_THREAD;
  r.other = other;
  r.count = 1;
  r.pc[0] = where;
  r.other_pc[0] = other_pc;
  if (g.current) add_callers(r.pc, *g.current);
  return &r;
}

// Leaves kernel text for good: the launch ends with what was found so far.
[[noreturn]] static inline void abandon() {
  g.report->aborted = 1;
  siglongjmp(g.crash, 1);
}

}  // namespace tq
