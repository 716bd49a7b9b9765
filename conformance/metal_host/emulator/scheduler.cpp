// Runs the threadgroups of one launch, one after another, each thread of a group on its own stack.
//
// A thread runs until it waits (barrier, simd function) or ends. When no thread can run, the waits are resolved:
// first the simd functions of each simdgroup, then the barrier of the whole group.
#include <link.h>
#include <stdio.h>

#define TQ_DEFINE_SWITCH 1
#include "shadow.h"
#include "signals.h"

namespace tq {

Globals g;

namespace {

alignas(64) unsigned char simd_in[TQ_LANES * TQ_SLOT], simd_out[TQ_LANES * TQ_SLOT];
uint32_t thread_order[MAX_THREADS];
uint32_t group_size[3];

uint64_t next_random() {  // SplitMix64
  uint64_t z = (g.random += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

void arrange(uint32_t* items, uint32_t count, uint32_t order) {
  if (order == TQ_REVERSE) {
    for (uint32_t i = 0; i < count / 2; ++i) {
      const uint32_t t = items[i];
      items[i] = items[count - 1 - i];
      items[count - 1 - i] = t;
    }
  } else if (order == TQ_SHUFFLE) {
    for (uint32_t i = count; i > 1; --i) {
      const uint32_t j = static_cast<uint32_t>(next_random() % i), t = items[i - 1];
      items[i - 1] = items[j];
      items[j] = t;
    }
  }
}

void yield_to_scheduler() {
  Fiber* me = g.current;
  g.current = nullptr;
  tq_switch(&me->context, &g.scheduler);
}

void fiber_body() {
  Fiber* me = g.current;
  g.launch->entry(g.entry_buffers, &me->thread);
  me->state = DONE;
  yield_to_scheduler();
  __builtin_unreachable();
}

void wait(State state, uint32_t flags, uint32_t line, uint64_t pc) {
  Fiber* me = g.current;
  me->state = state;
  me->flags = flags;
  me->line = line;
  me->pc = pc;
  yield_to_scheduler();
}

bool same_calls(const Fiber& a, const Fiber& b) {
  if (a.pc != b.pc || a.depth != b.depth) return false;
  for (uint32_t i = 0; i < a.depth && i < MAX_CALLS; ++i)
    if (a.calls[i] != b.calls[i]) return false;
  return true;
}

void report_divergence(uint32_t kind, Fiber& at, const Fiber& other, bool suspect) {
  g.current = &at;
  tq_record* r = record(kind, TQ_NO_REGION, other.state == DONE ? 1 : 0, 0, at.pc, other.id, relative(other.pc));
  g.current = nullptr;
  if (!r) return;
  r->suspect = suspect;
  add_callers(r->other_pc, other);
}

void resolve_simd(Fiber* lanes, uint32_t* members, uint32_t count) {
  Fiber& first = lanes[members[0]];
  if (first.state == AT_SIMD_BARRIER) {
    if (first.flags & 1) ++g.sub[DEVICE][first.simdgroup];
    if (first.flags & 2) ++g.sub[THREADGROUP][first.simdgroup];
  } else {
    uint32_t argument[TQ_LANES] = {}, order[TQ_LANES];
    tq_simd_op op = {};
    for (uint32_t i = 0; i < count; ++i) {
      const Fiber& f = lanes[members[i]];
      memcpy(simd_in + f.lane * TQ_SLOT, f.in, f.size);
      argument[f.lane] = f.argument;
      order[i] = f.lane;
      op.active |= 1u << f.lane;
    }
    arrange(order, count, g.launch->float_order);
    op.in = simd_in;
    op.out = simd_out;
    op.argument = argument;
    op.order = order;
    op.active_count = count;
    op.tree = g.launch->float_order == TQ_TREE;
    first.fn(&op);
    for (uint32_t i = 0; i < count; ++i) {
      Fiber& f = lanes[members[i]];
      memcpy(f.out, simd_out + f.lane * TQ_SLOT, f.size);
      g.current = &f;
      if (op.order_matters) record(TQ_FLOAT_ORDER, TQ_NO_REGION, 0, 0, f.pc);
      if (op.inactive_read >> f.lane & 1) record(TQ_SIMD_INACTIVE, TQ_NO_REGION, 0, 0, f.pc);
      g.current = nullptr;
    }
  }
  for (uint32_t i = 0; i < count; ++i) lanes[members[i]].state = READY;
}

// Lets the waiting lanes at the lowest line go on together; true when there were any.
bool resolve_simdgroup(Fiber* lanes, uint32_t count) {
  uint32_t leader = TQ_LANES;
  for (uint32_t i = 0; i < count; ++i)
    if ((lanes[i].state == AT_SIMD || lanes[i].state == AT_SIMD_BARRIER) &&
        (leader == TQ_LANES || lanes[i].line < lanes[leader].line))
      leader = i;
  if (leader == TQ_LANES) return false;
  const Fiber& at = lanes[leader];
  uint32_t members[TQ_LANES], taken = 0, apart = TQ_LANES, suspect = TQ_LANES;
  for (uint32_t i = 0; i < count; ++i) {
    const Fiber& f = lanes[i];
    if (f.state == at.state && f.line == at.line && (f.state != AT_SIMD || f.fn == at.fn)) {
      members[taken++] = i;
      if (!same_calls(f, at)) suspect = i;
    } else {
      apart = i;
    }
  }
  if (apart != TQ_LANES)
    report_divergence(TQ_SIMD_DIVERGENCE, lanes[leader], lanes[apart], false);
  else if (suspect != TQ_LANES)
    report_divergence(TQ_SIMD_DIVERGENCE, lanes[leader], lanes[suspect], true);
  resolve_simd(lanes, members, taken);
  return true;
}

void resolve_barrier() {
  Fiber *leader = nullptr, *apart = nullptr, *suspect = nullptr;
  uint32_t flags = ~0u;
  for (uint32_t i = 0; i < g.threads; ++i)
    if (g.fibers[i].state == AT_BARRIER && (!leader || g.fibers[i].line < leader->line)) leader = &g.fibers[i];
  for (uint32_t i = 0; i < g.threads; ++i) {
    Fiber& f = g.fibers[i];
    if (f.state != AT_BARRIER || f.line != leader->line)
      apart = &f;
    else if (!same_calls(f, *leader))
      suspect = &f;
    if (f.state == AT_BARRIER) {
      flags &= f.flags;
      f.state = READY;
    }
  }
  if (apart)
    report_divergence(TQ_BARRIER_DIVERGENCE, *leader, *apart, false);
  else if (suspect)
    report_divergence(TQ_BARRIER_DIVERGENCE, *leader, *suspect, true);
  if (flags & 1) g.space_epoch[DEVICE] = ++g.epoch;
  if (flags & 2) g.space_epoch[THREADGROUP] = ++g.epoch;
}

void set3(uint32_t* to, uint32_t x, uint32_t y, uint32_t z) { to[0] = x, to[1] = y, to[2] = z; }

void start_fibers(const uint32_t* group_at, const uint32_t* groups, const uint32_t* size) {
  const tq_launch& l = *g.launch;
  const uint32_t simdgroups = (g.threads + TQ_LANES - 1) / TQ_LANES;
  uint32_t t = 0;
  for (uint32_t z = 0; z < size[2]; ++z)
    for (uint32_t y = 0; y < size[1]; ++y)
      for (uint32_t x = 0; x < size[0]; ++x, ++t) {
        Fiber& f = g.fibers[t];
        f.state = READY;
        f.id = g.group * MAX_THREADS + t;
        f.lane = t % TQ_LANES;
        f.simdgroup = t / TQ_LANES;
        f.depth = 0;
        f.pc = 0;
        uint32_t(*a)[3] = f.thread.attribute;
        memset(a, 0, sizeof f.thread.attribute);
        set3(a[0], group_at[0] * group_size[0] + x, group_at[1] * group_size[1] + y, group_at[2] * group_size[2] + z);
        set3(a[1], x, y, z);
        set3(a[2], group_at[0], group_at[1], group_at[2]);
        set3(a[3], l.grid[0], l.grid[1], l.grid[2]);
        set3(a[4], groups[0], groups[1], groups[2]);
        set3(a[5], size[0], size[1], size[2]);
        set3(a[6], group_size[0], group_size[1], group_size[2]);
        set3(a[7], l.grid[0], l.grid[1], l.grid[2]);
        a[9][0] = t;
        a[10][0] = t % TQ_LANES;
        a[11][0] = t / TQ_LANES;
        a[12][0] = simdgroups;
        a[13][0] = (group_size[0] * group_size[1] * group_size[2] + TQ_LANES - 1) / TQ_LANES;
        a[14][0] = a[15][0] = TQ_LANES;
        a[16][0] = t % 4;
        a[17][0] = t / 4;
        a[18][0] = (g.threads + 3) / 4;
        a[19][0] = (group_size[0] * group_size[1] * group_size[2] + 3) / 4;
        // Neighbouring stacks start at different cache lines.
        uint8_t* stack = g.stacks + t * STACK;
        tq_make(&f.context, stack + PAGE, STACK - PAGE - (t % 32) * 64, fiber_body);
      }
}

void run_group(uint32_t number, const uint32_t* groups) {
  const tq_launch& l = *g.launch;
  const uint32_t at[3] = {number % groups[0], number / groups[0] % groups[1], number / groups[0] / groups[1]};
  uint32_t size[3];
  for (int d = 0; d < 3; ++d) {
    const uint32_t left = l.grid[d] - at[d] * group_size[d];
    size[d] = left < group_size[d] ? left : group_size[d];
  }
  g.group = number;
  g.threads = size[0] * size[1] * size[2];
  g.group_epoch = g.space_epoch[DEVICE] = g.space_epoch[THREADGROUP] = ++g.epoch;
  for (uint32_t i = l.buffer_count; i < g.region_count; ++i)
    memset(reinterpret_cast<void*>(g.regions[i].lo), l.poison ? 0xFF : 0, g.regions[i].hi - g.regions[i].lo);
  start_fibers(at, groups, size);
  for (uint32_t t = 0; t < g.threads; ++t) thread_order[t] = t;
  arrange(thread_order, g.threads, l.order);
  for (;;) {
    for (uint32_t i = 0; i < g.threads; ++i) {
      Fiber& f = g.fibers[thread_order[i]];
      if (f.state != READY) continue;
      g.current = g.last = &f;
      tq_switch(&g.scheduler, &f.context);
    }
    bool resolved = false, waiting = false;
    for (uint32_t first = 0; first < g.threads; first += TQ_LANES) {
      const uint32_t left = g.threads - first;
      if (resolve_simdgroup(g.fibers + first, left < TQ_LANES ? left : uint32_t{TQ_LANES})) resolved = true;
    }
    if (resolved) continue;
    for (uint32_t t = 0; t < g.threads; ++t) waiting |= g.fibers[t].state == AT_BARRIER;
    if (!waiting) break;
    resolve_barrier();
  }
  g.report->threads += g.threads;
}

int find_image(struct dl_phdr_info* info, size_t, void* entry) {
  const uint64_t address = reinterpret_cast<uint64_t>(entry);
  uint64_t lo = ~0ull, hi = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    const uint64_t start = info->dlpi_addr + segment.p_vaddr;
    if (start < lo) lo = start;
    if (start + segment.p_memsz > hi) hi = start + segment.p_memsz;
  }
  if (address < lo || address >= hi) return 0;
  g.image_lo = info->dlpi_addr;
  g.image_hi = hi;
  return 1;
}

uint8_t handler_stack[64 * 1024];

bool prepare_stacks() {
  if (g.stacks) return true;
  void* stacks = mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return false;
  g.stacks = static_cast<uint8_t*>(stacks);
  for (uint32_t t = 0; t < MAX_THREADS; ++t) mprotect(g.stacks + t * STACK, PAGE, PROT_NONE);
  g.fibers = new Fiber[MAX_THREADS]();
  return true;
}

void* reserve(uint64_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

bool prepare_memory(const tq_launch& l, uint64_t* arena_size, uint64_t* owner_size, uint64_t* moat) {
  uint64_t total = (GAP_PAGES * 2) * PAGE + VARIABLE_SPACE;
  uint64_t cells = VARIABLE_SPACE / 16;  // a group may have 32 KiB; more is a finding, up to this many bytes
  for (uint32_t i = 0; i < l.buffer_count; ++i) {
    total += pages(l.buffers[i].size + 1) + GAP_PAGES * PAGE;
    if (l.buffers[i].flags & TQ_OUTPUT) cells += l.buffers[i].size + 2;
  }
  *arena_size = total;
  *owner_size = total / PAGE * sizeof(uint16_t);
  g.cells_size = cells * sizeof(Cell);
  // Far on both sides nothing else is mapped, so that a stray index never lands in other memory of the process.
  for (*moat = 20ull << 30; *moat; *moat = *moat >> 30 ? *moat >> 4 : 0)
    if ((g.arena_lo = reinterpret_cast<uint64_t>(reserve(total + 2 * *moat, PROT_NONE)))) break;
  if (!*moat) return false;
  g.arena_lo += *moat;
  g.owner = static_cast<uint16_t*>(reserve(*owner_size, PROT_READ | PROT_WRITE));
  g.cells = static_cast<Cell*>(reserve(g.cells_size, PROT_READ | PROT_WRITE));
  if (!g.owner || !g.cells) return false;
  g.arena_hi = g.arena_lo + total;
  g.region_count = 0;
  g.cells_used = 0;
  uint64_t at = g.arena_lo + GAP_PAGES * PAGE;
  for (uint32_t i = 0; i < l.buffer_count; ++i) {
    const tq_buffer& b = l.buffers[i];
    const bool output = b.flags & TQ_OUTPUT;
    const uint32_t number = add_region(at, b.size, b.item_size, output, DEVICE);
    if (b.data)
      memcpy(reinterpret_cast<void*>(at), b.data, b.size);
    else if (l.poison)
      memset(reinterpret_cast<void*>(at), 0xFF, b.size);
    if (output && (b.flags & TQ_INITIALISED)) {
      const Region& r = g.regions[number];
      for (uint64_t c = 0; c < (b.size >> r.granule_shift) + 1; ++c) r.cells[c].flags = INITIALISED;
    }
    g.entry_buffers[i] = reinterpret_cast<void*>(at + b.offset);
    at += pages(b.size + 1) + GAP_PAGES * PAGE;
  }
  g.variable_lo = at;
  g.variable_used = 0;
  return true;
}

void report_unwritten(const tq_launch& l) {
  for (uint32_t i = 0; i < l.buffer_count; ++i) {
    if (!(l.buffers[i].flags & TQ_OUTPUT)) continue;
    const Region& r = g.regions[i];
    const uint64_t count = (l.buffers[i].size + (1u << r.granule_shift) - 1) >> r.granule_shift;
    uint64_t missing = 0, first = 0;
    for (uint64_t c = 0; c < count; ++c)
      if (!(r.cells[c].flags & INITIALISED) && !missing++) first = c;
    if (missing)
      record(TQ_UNWRITTEN, i, static_cast<int64_t>(first << r.granule_shift),
             static_cast<uint32_t>(missing << r.granule_shift), 0);
  }
}

void run_groups(const tq_launch& l) {
  uint32_t groups[3];
  for (int d = 0; d < 3; ++d) {
    group_size[d] = l.group[d] < l.grid[d] ? l.group[d] : l.grid[d];
    groups[d] = group_size[d] ? (l.grid[d] + group_size[d] - 1) / group_size[d] : 0;
  }
  const uint32_t count = groups[0] * groups[1] * groups[2];
  uint32_t* order = static_cast<uint32_t*>(reserve(count * sizeof(uint32_t) + 1, PROT_READ | PROT_WRITE));
  for (uint32_t i = 0; i < count; ++i) order[i] = i;
  arrange(order, count, l.order);
  {
    Guard guard(l.timeout, handler_stack, sizeof handler_stack);
    volatile uint64_t mode = l.flush ? tq_flush_subnormals() : 0;
    if (sigsetjmp(g.crash, 1) == 0)
      for (uint32_t i = 0; i < count; ++i) run_group(order[i], groups);
    if (l.flush) tq_restore_float_mode(mode);
    g.current = nullptr;
  }
  munmap(order, count * sizeof(uint32_t) + 1);
}

}  // namespace
}  // namespace tq

using namespace tq;

extern "C" {

__attribute__((visibility("default"))) int tq_run(const tq_launch* launch, tq_report* report) {
  g.launch = launch;
  g.report = report;
  g.current = g.last = nullptr;
  g.epoch = 0;
  g.random = launch->seed;
  g.image_lo = g.image_hi = 0;
  memset(report, 0, sizeof *report);
  memset(g.sub, 0, sizeof g.sub);
  dl_iterate_phdr(find_image, reinterpret_cast<void*>(launch->entry));
  uint64_t arena_size = 0, owner_size = 0, moat = 0;
  if (!prepare_stacks() || !prepare_memory(*launch, &arena_size, &owner_size, &moat)) return 1;
  run_groups(*launch);
  if (!report->aborted) report_unwritten(*launch);
  for (uint32_t i = 0; i < launch->buffer_count; ++i)
    if (launch->buffers[i].out)
      memcpy(launch->buffers[i].out, reinterpret_cast<void*>(g.regions[i].lo), launch->buffers[i].size);
  munmap(reinterpret_cast<void*>(g.arena_lo - moat), arena_size + 2 * moat);
  munmap(g.owner, owner_size);
  munmap(g.cells, g.cells_size);
  return 0;
}

void* tq_threadgroup_variable(uint32_t id, const char* name, uint64_t size, uint32_t item_size) {
  // The first thread that meets a variable places it; the place serves all groups of the launch.
  const uint32_t base = g.launch->buffer_count;
  tq_report& report = *g.report;
  for (uint32_t i = 0; i < report.variable_count; ++i)
    if (report.variables[i].id == id) return reinterpret_cast<void*>(g.regions[base + i].lo);
  const bool too_many = report.variable_count == 64 || g.region_count == MAX_REGIONS;
  if (too_many || g.variable_used + pages(size) + GAP_PAGES * PAGE > VARIABLE_SPACE ||
      g.cells_used + size + 2 > g.cells_size / sizeof(Cell)) {
    record(TQ_THREADGROUP_MEMORY, TQ_NO_REGION, 0, static_cast<uint32_t>(size),
           reinterpret_cast<uint64_t>(__builtin_return_address(0)) - 1);
    abandon();
  }
  tq_variable& v = report.variables[report.variable_count++];
  snprintf(v.name, sizeof v.name, "%s", name);
  v.size = static_cast<uint32_t>(size);
  v.item_size = item_size;
  v.id = id;
  const uint64_t at = g.variable_lo + g.variable_used;
  add_region(at, size, item_size, true, THREADGROUP);
  memset(reinterpret_cast<void*>(at), g.launch->poison ? 0xFF : 0, size);
  g.variable_used += pages(size) + GAP_PAGES * PAGE;
  report.threadgroup_bytes += (size + 15) / 16 * 16;
  if (report.threadgroup_bytes > 32768)
    record(TQ_THREADGROUP_MEMORY, TQ_NO_REGION, 0, static_cast<uint32_t>(report.threadgroup_bytes),
           reinterpret_cast<uint64_t>(__builtin_return_address(0)) - 1);
  return reinterpret_cast<void*>(at);
}

void tq_threadgroup_barrier(uint32_t flags, uint32_t line) {
  wait(AT_BARRIER, flags, line, reinterpret_cast<uint64_t>(__builtin_return_address(0)) - 1);
}

void tq_simdgroup_barrier(uint32_t flags, uint32_t line) {
  wait(AT_SIMD_BARRIER, flags, line, reinterpret_cast<uint64_t>(__builtin_return_address(0)) - 1);
}

void tq_simd(tq_simd_fn fn, const void* in, void* out, uint32_t size, uint32_t argument, uint32_t line) {
  Fiber* me = g.current;
  me->fn = fn;
  me->in = in;
  me->out = out;
  me->size = size;
  me->argument = argument;
  wait(AT_SIMD, 0, line, reinterpret_cast<uint64_t>(__builtin_return_address(0)) - 1);
}

}  // extern "C"
