// Attention and scores on packed keys and values: sections 4 and 5 of docs/numerics.md.
//
// Threads take blocks of queries; where there are few, also ranges of tiles, whose sums then meet in the contract's
// tree. No array has one entry per query and token, and no vector is dequantized.
#include <cstdlib>

#include "block_keys.h"
#include "block_values.h"
#include "pool.h"

namespace tq::attention {
namespace {

// Memory of a thread, kept for its next call.
class Memory {
 public:
  ~Memory() { std::free(start); }
  char* get(size_t bytes) {
    if (bytes > size) {
      std::free(start);
      size = (bytes + 4095) & ~size_t(4095);
      start = static_cast<char*>(std::aligned_alloc(64, size));
      if (!start) std::abort();
      std::memset(start, 0, size);
    }
    return start;
  }

 private:
  char* start = nullptr;
  size_t size = 0;
};

thread_local Memory memory;

void run(const tq_attend_args& args) {
  const Problem problem(args);
  const int threads = int(args.threads);
  const size_t scratch = Block(problem, Carver(nullptr)).size;
  // Sums of every group, where several share a block.
  const bool shared = problem.groups > 1 && !problem.scores;
  Carver count(nullptr);
  take_sums(count, problem);
  count.take<int>(size_t(problem.rows));
  const size_t each = (count.size() + 63) & ~size_t(63);
  if (problem.scores) {
    std::fill_n(args.logits, args.batch * args.kv_heads * args.group * args.queries * args.columns, NOT_ALLOWED);
  }
  Memory partial;
  char* of_groups = shared ? partial.get(each * size_t(problem.items) * size_t(problem.groups)) : nullptr;
  const auto sums_at = [&](int at, int*& met) {
    Carver c(of_groups + each * size_t(at));
    const Sums found = take_sums(c, problem);
    met = c.take<int>(size_t(problem.rows));
    return found;
  };
  parallel_for(problem.items * problem.groups, threads, [&](int index) {
    const int item = index / problem.groups, group = index % problem.groups;
    Block block(problem, Carver(memory.get(scratch)));
    if (shared) {
      int* met;
      const Sums sums = sums_at(index, met);
      block.run(item, group, &sums, met);
      return;
    }
    block.run(item, group, nullptr, nullptr);
    if (!problem.scores) {
      std::vector<int> met(block.own_met(), block.own_met() + block.row_count());
      block.finish(item, block.own(), met.data());
    }
  });
  if (!shared) return;
  parallel_for(problem.items, threads, [&](int item) {
    Block block(problem, Carver(memory.get(scratch)));
    block.locate(item);
    const int first = item * problem.groups;
    int* met;
    for (int step = 1; step < problem.groups; step *= 2) {
      for (int g = 0; g + step < problem.groups; g += 2 * step) {
        int* other_met;
        const Sums other = sums_at(first + g + step, other_met), into = sums_at(first + g, met);
        for (int r = 0; r < block.row_count(); r++) {
          into.merge_row(r, other, problem.np, problem.nr);
          met[r] |= other_met[r];
        }
      }
    }
    const Sums total = sums_at(first, met);
    block.finish(item, total, met);
  });
}

}  // namespace
}  // namespace tq::attention

extern "C" __attribute__((visibility("default"))) int tq_attend(const tq_attend_args* args) {
  tq::attention::run(*args);
  return 0;
}
