// Memory of a launch and the check of each access: bounds, initialisation and races.
//
// Every buffer and threadgroup variable has its own pages, with inaccessible pages around it. Writable memory has a
// Cell per granule. Two accesses by different threads, at least one a plain write, are a race unless a barrier that
// orders their address space lies between; threads of different groups are never ordered.
#pragma once
#include "state.h"

namespace tq {

static inline uint64_t pages(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static inline Cell* take_cells(uint64_t count) {
  Cell* cells = g.cells + g.cells_used;
  g.cells_used += count;
  return cells;
}

static inline uint32_t add_region(uint64_t lo, uint64_t size, uint32_t item_size, bool writable, Space space) {
  const uint32_t number = g.region_count++;
  Region& r = g.regions[number];
  r.lo = lo;
  r.hi = lo + size;
  r.item_size = item_size ? item_size : 1;
  r.granule_shift = g.launch->byte_shadow ? 0 : item_size % 4 == 0 ? 2 : item_size % 2 == 0 ? 1 : 0;
  r.writable = writable;
  r.space = space;
  r.cells = writable ? take_cells((size >> r.granule_shift) + 1) : nullptr;
  const uint64_t extent = pages(size ? size : 1);
  mprotect(reinterpret_cast<void*>(lo), extent, PROT_READ | PROT_WRITE);
  for (uint64_t p = (lo - g.arena_lo) / PAGE; p < (lo - g.arena_lo + extent) / PAGE; ++p)
    g.owner[p] = static_cast<uint16_t>(number + 1);
  return number;
}

static inline void report_outside(uint64_t address, uint64_t size, bool write, uint64_t pc) {
  if (address < 65536) {
    record(TQ_NULL, TQ_NO_REGION, static_cast<int64_t>(address), static_cast<uint32_t>(size), pc);
    abandon();
  }
  uint32_t nearest = TQ_NO_REGION;
  uint64_t best = ~0ull;
  for (uint32_t i = 0; i < g.region_count; ++i) {
    const Region& r = g.regions[i];
    const uint64_t distance = address < r.lo ? r.lo - address : address >= r.hi ? address - r.hi : 0;
    if (distance < best) best = distance, nearest = i;
  }
  const int64_t offset = nearest == TQ_NO_REGION ? 0 : static_cast<int64_t>(address - g.regions[nearest].lo);
  record(write ? TQ_OOB_WRITE : TQ_OOB_READ, nearest, offset, static_cast<uint32_t>(size), pc);
  abandon();
}

// Whether an access of `id` is ordered before one that the current fiber makes now, both in the current group.
static inline bool ordered(const Region& r, uint32_t id, uint32_t epoch, uint32_t sub) {
  const Fiber* me = g.current;
  if (id == me->id || epoch != g.space_epoch[r.space]) return true;
  return id / TQ_LANES == me->id / TQ_LANES && sub < g.sub[r.space][me->simdgroup];
}

static inline void report_race(uint32_t kind, const Region& r, uint64_t address, uint64_t size, uint64_t pc,
                               uint32_t other, uint32_t other_pc) {
  const bool groups = other / MAX_THREADS != g.group;
  record(groups ? static_cast<uint32_t>(TQ_RACE_GROUPS) : kind, static_cast<uint32_t>(&r - g.regions),
         static_cast<int64_t>(address - r.lo), static_cast<uint32_t>(size), pc, other, other_pc);
}

// Races with the last writer; true when one was reported.
static inline bool check_writer(const Region& r, const Cell& c, bool write, bool atomic, uint64_t address,
                                uint64_t size, uint64_t pc) {
  if (!c.w_epoch || (atomic && (c.flags & W_ATOMIC))) return false;
  const bool stale = c.w_epoch < g.group_epoch;
  if (stale && r.space == THREADGROUP) return false;
  const bool many = (c.flags & W_MANY) && (stale || c.w_epoch == g.space_epoch[r.space]);
  if (!stale && !many && ordered(r, c.w_id, c.w_epoch, c.w_sub)) return false;
  report_race(write ? TQ_RACE_WW : TQ_RACE_RW, r, address, size, pc, c.w_id, c.w_pc);
  return true;
}

static inline void check_readers(const Region& r, const Cell& c, bool atomic, uint64_t address, uint64_t size,
                                 uint64_t pc) {
  if (c.flags & OTHER_READER) {
    report_race(TQ_RACE_RW, r, address, size, pc, c.o_id, c.o_pc);
    return;
  }
  if (!c.r_epoch || (atomic && (c.flags & R_ATOMIC))) return;
  if (c.r_epoch < g.group_epoch) {
    if (r.space == DEVICE) report_race(TQ_RACE_RW, r, address, size, pc, c.r_id, c.r_pc);
    return;
  }
  if (c.r_epoch != g.space_epoch[r.space]) return;
  const Fiber* me = g.current;
  const bool same_simdgroup = c.r_id / TQ_LANES == me->id / TQ_LANES;
  const bool before = same_simdgroup && c.r_sub < g.sub[r.space][me->simdgroup];
  const bool alone = c.r_id == me->id && !(c.flags & R_MANY);
  if (!(c.flags & R_MIXED) && (before || alone)) return;
  report_race(TQ_RACE_RW, r, address, size, pc, c.r_id, c.r_pc);
}

static inline void note_reader(const Region& r, Cell& c, bool atomic, uint64_t pc) {
  const Fiber* me = g.current;
  const uint32_t epoch = g.space_epoch[r.space], sub = g.sub[r.space][me->simdgroup];
  uint32_t flags = c.flags;
  if (c.r_epoch == epoch) {
    if (!atomic) flags &= ~R_ATOMIC;
    if (c.r_id / TQ_LANES != me->id / TQ_LANES)
      flags |= R_MIXED;
    else if (c.r_sub != sub)
      flags &= ~R_MANY;
    else if (c.r_id != me->id)
      flags |= R_MANY;
    if (flags & R_MIXED && atomic) return;  // keep the plain reader's place for the report
  } else {
    if (c.r_epoch && c.r_epoch < g.group_epoch && r.space == DEVICE && !(flags & R_ATOMIC)) {
      flags |= OTHER_READER;
      c.o_id = c.r_id;
      c.o_pc = c.r_pc;
    }
    flags &= ~(R_MANY | R_MIXED | R_ATOMIC);
    if (atomic) flags |= R_ATOMIC;
  }
  c.flags = flags;
  c.r_id = me->id;
  c.r_epoch = epoch;
  c.r_sub = sub;
  c.r_pc = relative(pc);
}

static inline void note_writer(const Region& r, Cell& c, bool atomic, uint64_t pc) {
  const Fiber* me = g.current;
  const uint32_t epoch = g.space_epoch[r.space];
  uint32_t flags = c.flags & ~(W_ATOMIC | W_MANY);
  if (atomic) {
    flags |= W_ATOMIC;
    const bool current = c.w_epoch == epoch || (r.space == DEVICE && c.w_epoch && c.w_epoch < g.group_epoch);
    if (current && ((c.flags & W_MANY) || c.w_id != me->id)) flags |= W_MANY;
  }
  c.flags = flags | INITIALISED;
  c.w_id = me->id;
  c.w_epoch = epoch;
  c.w_sub = g.sub[r.space][me->simdgroup];
  c.w_pc = relative(pc);
}

static inline void access_cells(const Region& r, uint64_t address, uint64_t size, bool read, bool write, bool atomic,
                                uint64_t pc) {
  const uint64_t first = (address - r.lo) >> r.granule_shift;
  const uint64_t last = (address - r.lo + size - 1) >> r.granule_shift;
  if (r.granule_shift && ((address | size) & ((1u << r.granule_shift) - 1))) g.report->want_byte_shadow = 1;
  for (uint64_t i = first; i <= last; ++i) {
    Cell& c = r.cells[i];
    if (read) {
      const bool fresh = r.space == THREADGROUP ? c.w_epoch && c.w_epoch >= g.group_epoch : (c.flags & INITIALISED) != 0;
      if (!fresh)
        record(r.space == THREADGROUP ? TQ_UNINIT_THREADGROUP : TQ_UNINIT_OUTPUT,
               static_cast<uint32_t>(&r - g.regions), static_cast<int64_t>(address - r.lo),
               static_cast<uint32_t>(size), pc);
    }
    const bool raced = check_writer(r, c, write, atomic, address, size, pc);
    if (write && !raced) check_readers(r, c, atomic, address, size, pc);
    if (read) note_reader(r, c, atomic, pc);
    if (write) note_writer(r, c, atomic, pc);
  }
}

static inline void access(uint64_t address, uint64_t size, bool read, bool write, bool atomic, uint64_t pc) {
  Fiber* me = g.current;
  if (!me || !size) return;
  me->pc = pc;
  ++g.report->accesses;
  if (address >= g.arena_lo && address < g.arena_hi) {
    const uint32_t owner = g.owner[(address - g.arena_lo) / PAGE];
    const Region& r = g.regions[owner - 1];
    if (!owner || address + size > r.hi || address < r.lo) report_outside(address, size, write, pc);
    if (r.writable)
      access_cells(r, address, size, read, write, atomic, pc);
    else if (write) {
      record(TQ_WRITE_TO_INPUT, owner - 1, static_cast<int64_t>(address - r.lo), static_cast<uint32_t>(size), pc);
    }
    return;
  }
  const uint64_t stack = reinterpret_cast<uint64_t>(g.stacks);
  if (address >= stack && address < stack + MAX_THREADS * STACK) {
    const uint64_t owner = (address - stack) / STACK;
    if (owner != static_cast<uint64_t>(me - g.fibers))
      record(TQ_FOREIGN_STACK, TQ_NO_REGION, 0, static_cast<uint32_t>(size), pc,
             g.group * MAX_THREADS + static_cast<uint32_t>(owner));
    return;
  }
  if (address >= g.image_lo && address < g.image_hi) return;
  // The generated entry reads its arguments from the scheduler's own tables.
  const uint64_t fibers = reinterpret_cast<uint64_t>(g.fibers), pointers = reinterpret_cast<uint64_t>(g.entry_buffers);
  if (address >= fibers && address < fibers + MAX_THREADS * sizeof(Fiber)) return;
  if (address >= pointers && address < pointers + sizeof g.entry_buffers) return;
  report_outside(address, size, write, pc);
}

}  // namespace tq
