// A block of queries of one kv head on a range of tiles: a row is a pair (query, query head of the group), rows next to
// each other belong to one query, so positions never decrease.
#pragma once
#include <algorithm>

#include "gemm.h"
#include "problem.h"
#include "tree.h"

namespace tq::attention {

constexpr int MET_ALLOWED = 1, MET_POISON = 2;
constexpr int MAX_LEVELS = 24;
constexpr int FEW = 16;  // rows whose sums are merged together

inline Sums take_sums(Carver& c, const Problem& p) {
  const size_t rows = size_t(p.rows);
  return {c.take<float>(rows * p.np), c.take<float>(rows * p.nr), c.take<float>(rows),
          c.take<int>(rows),          c.take<int>(rows),          c.take<int>(rows)};
}

// Where the raw vectors of a row and kv head are (section 2).
struct RawSource {
  const char *first, *recent;  // of this row and head
  int type, dim, held, recent_count;
  int64_t length;

  const void* token(int64_t j) const {
    const size_t size = size_t(dim) * (type == 2 ? 4 : 2);
    return length - j <= held ? recent + size_t(recent_count - (length - j)) * size : first + size_t(j) * size;
  }
};

class Block {
 public:
  Block(const Problem& problem, Carver c) : p(problem), a(problem.args) {
    const size_t r = size_t(p.rows), dk = size_t(p.dk), half = dk / 2;
    const size_t widest = size_t(std::max(p.dk, p.dv)), pairs = size_t(std::max(p.keys.pairs(), p.dk / 2));
    raw_query = c.take<uint32_t>(2 * r * half);
    query = c.take<uint32_t>(r * pairs);
    twice = c.take<uint32_t>(p.prod ? r * pairs : 0);
    // Keys are done with before values begin: one buffer for both stays in the first cache.
    const size_t of_keys = size_t(std::max(words_of(p.dk, p.keys.bits), p.dk / 2)) * TILE;
    columns = joined = c.take<uint32_t>(std::max(of_keys, TILE * size_t(p.values.stride) + 4 * SLACK));
    const size_t of_values = TILE / 2 * size_t(std::max(p.np, p.nr));
    key_pairs = value_pairs = c.take<uint32_t>(std::max(pairs * TILE, of_values));
    snapped = c.take<int16_t>(TILE * widest);
    logits = c.take<int32_t>(r * TILE);
    sign_sums = c.take<int32_t>(p.prod ? r * TILE : 0);
    raw_dots = c.take<int32_t>(2 * r * TILE);
    bases = c.take<int32_t>(r * TILE);
    shares = c.take<int16_t>(r * TILE);
    raw_shares_of = c.take<int16_t>(2 * r * TILE);
    sums = c.take<int32_t>(r * size_t(std::max(p.np, 2 * p.nr)));
    packed_e = c.take<int>(r);
    raw_e = c.take<int>(r);
    position = c.take<int>(r);
    limit = c.take<int>(r);
    exponent = c.take<int>(r);
    rotated = c.take<int>(r);
    twice_exponent = c.take<int>(r);
    bad = c.take<uint8_t>(r);
    met = c.take<int>(r);
    x = c.take<float>(widest);
    y = c.take<float>(widest);
    spare = c.take<float>(widest);
    if (!p.scores) {
      current = take_sums(c, p);
      for (int i = 0; i < p.levels; i++) level[i] = take_sums(c, p);
    }
    size = c.size();
  }

  size_t size = 0;  // bytes taken

  // Reads the tiles of `group` and leaves their sums in `into`, or writes the logits.
  void run(int item, int group, const Sums* into, int* met_into);
  // Writes the outputs of the block's queries.
  void finish(int item, const Sums& total, const int* what_met);
  void locate(int item);
  Sums own() const { return current; }
  int* own_met() const { return met; }
  int row_count() const { return rows; }

 private:
  void prepare();
  void tile(int t);
  void push(int split);
  void packed_keys(int t, int from, int to);
  void base_logits(int t);
  void raw_keys(int t, int from, int to, int count);
  uint64_t apply_mask(int r, int t, int32_t* row) const;
  uint64_t snap_tokens(const RawSource& source, int t, int count, int bits, int* exponents);
  void packed_values(int t, int from, int to);
  void raw_values(int from, int to, int count);
  void write_logits(int r, int t, const int32_t* row, uint64_t poison) const;
  uint64_t scales_of(const uint16_t* from, float* to) const;
  size_t out_row(int r) const {
    const int64_t m = m0 + r, h = head * a.group + m % a.group;
    return size_t((b * a.kv_heads * a.group + h) * a.queries + m / a.group);
  }

  const Problem& p;
  const tq_attend_args& a;
  // Scratch memory.
  uint32_t *raw_query, *query, *twice, *columns, *key_pairs, *value_pairs, *joined;
  int16_t *snapped, *shares, *raw_shares_of;
  int32_t *logits, *sign_sums, *raw_dots, *bases, *sums;
  int *packed_e, *raw_e, *position, *limit, *exponent, *rotated, *twice_exponent, *met;
  uint8_t* bad;
  float *x, *y, *spare;
  Sums current{}, level[MAX_LEVELS]{};
  // This block.
  int64_t b = 0, head = 0, kv = 0, m0 = 0, length = 0, padding = 0;
  int rows = 0, full = 0;
  int base_from = 0, base_to = 0;
  RawSource raw_key{}, raw_value{};
  float key_scale[TILE], sign_scale[TILE], value_scale[TILE];
  int key_exponent[TILE], value_exponent[TILE];
  uint64_t packed_poison = 0, raw_poison = 0;
};

}  // namespace tq::attention
