// What the threads of a call share: tables, layouts, and how the work is divided.
#pragma once
#include <vector>

#include "attend_args.h"
#include "softmax.h"
#include "transform.h"
#include "unpack.h"

namespace tq::attention {

constexpr int16_t SIGN_CENTROIDS[64] = {127, -127};

struct Problem {
  const tq_attend_args& args;
  Table key_table, sign_table, value_table;
  Weights weights;
  KeyLayout keys, signs;
  ValueLayout values;
  Rotation key_rotation, value_rotation;
  std::vector<int> position_of;  // of each coordinate of a value
  int dk, dv, np, nr;            // np, nr: numbers of a packed and of a raw sum
  bool prod, scores;
  int rows, blocks, items;       // queries of a block at most, blocks of a kv head, blocks in all
  int splits, groups;            // splits of a group, groups that share the splits of a block
  int levels;                    // of a group's tree

  explicit Problem(const tq_attend_args& a)
      : args(a),
        key_table(a.key_centroids, int(a.key_bits)),
        sign_table(SIGN_CENTROIDS, 1),
        value_table(a.value_centroids, int(a.value_bits)),
        weights(a.weights),
        keys{int(a.key_dim), int(a.key_bits)},
        signs{int(a.key_dim), 1},
        values(int(a.value_dim), int(a.value_bits)),
        key_rotation{int(a.key_dim), int(a.key_m), int(a.key_dim / a.key_m), a.key_signs, a.key_signs_two, a.key_paley},
        value_rotation{int(a.value_dim), int(a.value_m), int(a.value_dim / a.value_m), a.value_signs, nullptr,
                       a.value_paley},
        position_of(size_t(a.value_dim)),
        dk(int(a.key_dim)),
        dv(int(a.value_dim)),
        np(values.size),
        nr(up_to(dv, 16)),
        prod(a.prod != 0),
        scores(a.logits != nullptr) {
    for (int p = 0; p < np; p++) {
      if (values.coordinate(p) >= 0) position_of[size_t(values.coordinate(p))] = p;
    }
    const int64_t in_all = a.group * a.queries;
    const int most = clamp(65536 / (np + nr), 16, 128);
    blocks = int((in_all + most - 1) / most);
    rows = int((in_all + blocks - 1) / blocks);
    items = int(a.batch * a.kv_heads) * blocks;
    const int total = int((a.columns + SPLIT * TILE - 1) / (SPLIT * TILE));
    const int wanted = items < 2 * int(a.threads) && a.threads > 1 ? (2 * int(a.threads) + items - 1) / items : 1;
    splits = 1;
    while (splits * wanted < total) splits *= 2;
    groups = (total + splits - 1) / splits;
    levels = bit_length(uint64_t(splits < total ? splits : total)) + 1;
  }
};

// Arrays one after the other, each on its own cache line; without memory it only counts.
class Carver {
 public:
  explicit Carver(char* memory) : start(memory), at(0) {}
  template <class T>
  T* take(size_t count) {
    at = (at + 63) & ~size_t(63);
    T* found = start ? reinterpret_cast<T*>(start + at) : nullptr;
    at += count * sizeof(T);
    return found;
  }
  size_t size() const { return at; }

 private:
  char* start;
  size_t at;
};

}  // namespace tq::attention
